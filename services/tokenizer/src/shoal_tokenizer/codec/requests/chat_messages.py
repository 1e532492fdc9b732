"""Chat Completions, the request: messages -> those of the one conversation.

Text parts are joined by an empty line, as DeepSeek does. What clients send back of an answer beyond its text, reasoning
and calls is on the list of fields that change nothing.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from shoal_tokenizer.codec.requests.fields import invalid, unsupported
from shoal_tokenizer.codec.requests.openai_sampling import Object
from shoal_tokenizer.codec.requests.tool_turns import MENDED_NOTE, pair_results, read_arguments

MAX_MESSAGES = 20_000  # rendering takes half a second for so many
_BETWEEN_TEXTS = "\n\n"
_NAME_NOTE = "messages: 'name' is not told to the model"
_CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class TextPart(Object, tag_field="type", tag="text"):
    text: str
    prompt_cache_breakpoint: Any = None
    cache_control: Any = None


class RefusalPart(Object, tag_field="type", tag="refusal"):
    refusal: str


class RefusedPart(msgspec.Struct, tag_field="type"):
    """A kind that this model does not take, whatever is in it."""

    is_refused: ClassVar[bool] = True


class ImagePart(RefusedPart, tag="image_url"):
    pass


class AudioPart(RefusedPart, tag="input_audio"):
    pass


class FilePart(RefusedPart, tag="file"):
    pass


class VideoPart(RefusedPart, tag="video_url"):
    pass


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart | VideoPart
Content = str | Annotated[list[Part], Meta(min_length=1)]


class CalledFunction(Object):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str
    parsed_arguments: Any = None


class CalledCustom(Object):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input: str


class ToolCall(Object):
    id: _CallId
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    index: int | None = None


class System(Object, tag_field="role", tag="system"):
    content: Content
    name: str | None = None


class Developer(Object, tag_field="role", tag="developer"):
    content: Content
    name: str | None = None


class User(Object, tag_field="role", tag="user"):
    content: Content
    name: str | None = None


class Assistant(Object, tag_field="role", tag="assistant"):
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool | None = None
    audio: Any = None
    function_call: Any = None
    # Of an answer that is sent back as it came, or as a client's library keeps it.
    annotations: Any = None
    parsed: Any = None
    reasoning_details: Any = None
    provider_specific_fields: Any = None


class ToolResult(Object, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: _CallId
    name: str | None = None


class FunctionResult(msgspec.Struct, tag_field="role", tag="function"):
    is_refused: ClassVar[bool] = True


Message = System | Developer | User | Assistant | ToolResult | FunctionResult


class Turns:
    """The messages of one request. ``continues``: the answer goes on with the last one, whether that says so or not."""

    def __init__(self, messages: Sequence[Message], continues: bool | None) -> None:
        self.is_continued = _is_continued(messages, continues)
        notes = {_NAME_NOTE: None} if any(getattr(message, "name", None) for message in messages) else {}
        read = [_message(message, f"messages[{index}]", notes) for index, message in enumerate(messages)]
        self.notes = tuple(notes)
        self.messages = pair_results(read, lambda index: f"messages[{index}]")


def _is_continued(messages: Sequence[Message], continues: bool | None) -> bool:
    *before, last = messages
    for index, message in enumerate(before):
        if isinstance(message, Assistant) and message.prefix:
            raise invalid("Only the last message can be a prefix of the answer.", f"messages[{index}].prefix")
    is_answer = isinstance(last, Assistant) and not last.tool_calls
    if isinstance(last, Assistant) and last.prefix:
        where = f"messages[{len(before)}].prefix"
    elif continues:
        where = "continue_final_message"
    else:
        return False
    if not is_answer:
        raise invalid("An answer can only go on with a last message of the assistant, without tool calls.", where)
    return True


def _message(message: Message, where: str, notes: dict[str, None]) -> dict[str, Any]:
    if isinstance(message, FunctionResult):
        raise unsupported("Results of 'functions' are not taken: use 'tools', and the role 'tool'.", f"{where}.role")
    if isinstance(message, Assistant):
        return _assistant(message, where, notes)
    content = _text(message.content, f"{where}.content")
    if isinstance(message, ToolResult):
        return {"role": "tool", "content": content, "tool_call_id": message.tool_call_id}
    return {"role": "user" if isinstance(message, User) else "system", "content": content}


def _assistant(message: Assistant, where: str, notes: dict[str, None]) -> dict[str, Any]:
    if message.audio is not None:
        raise unsupported("This model takes text only, not the audio of an earlier answer.", f"{where}.audio")
    if message.function_call is not None:
        raise unsupported("Calls of 'functions' are not taken: use 'tools' and 'tool_calls'.", f"{where}.function_call")
    reasoning = message.reasoning_content or message.reasoning
    content = message.content if message.content is not None else message.refusal
    if content is None and not message.tool_calls and not reasoning:
        raise invalid("An assistant message needs 'content' or 'tool_calls'.", f"{where}.content")
    shown: dict[str, Any] = {
        "role": "assistant",
        "content": "" if content is None else _text(content, f"{where}.content"),
    }
    if reasoning:
        shown["reasoning_content"] = reasoning
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        shown["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]", notes) for n, call in calls]
    return shown


def _call(call: ToolCall, where: str, notes: dict[str, None]) -> dict[str, Any]:
    called = call.function if call.type == "function" else call.custom
    if called is None:
        raise invalid(f"Missing required parameter: '{where}.{call.type}'.", f"{where}.{call.type}")
    if isinstance(called, CalledCustom):
        arguments: dict[str, Any] = {"input": called.input}
    else:
        arguments, is_mended = read_arguments(called.arguments)
        if is_mended:
            notes[MENDED_NOTE] = None
    return {"id": call.id, "type": "function", "function": {"name": called.name, "arguments": arguments}}


def _text(content: str | Sequence[Part], where: str) -> str:
    if isinstance(content, str):
        return content
    return _BETWEEN_TEXTS.join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Part, where: str) -> str:
    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, RefusalPart):
        return part.refusal
    kind = str(part.__struct_config__.tag)
    raise unsupported(f"This model takes text only, not '{kind}'.", f"{where}.type")

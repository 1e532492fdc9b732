"""Responses, the request: which bodies are taken, and what they mean.

``responses_body`` has the structure, ``responses_fields`` the verdicts. A body that goes on with a stored response is
converted when its items are there: they come before the new input, without the instructions of back then.
"""

import msgspec

from shoal_tokenizer.codec.api import AnswerShape, Api, Converted, NeedsHistory, RequestNames, Sampling
from shoal_tokenizer.codec.conversation import AnswerFormat, Conversation, Effort, Thinking, ToolMode
from shoal_tokenizer.codec.events.responses_items import RESPONSE_PREFIX
from shoal_tokenizer.codec.events.responses_object import Echo, write_echo
from shoal_tokenizer.codec.requests.fields import invalid, refuse_fields, unsupported
from shoal_tokenizer.codec.requests.responses_body import JsonFormat, Request, SchemaFormat, read_history, read_request
from shoal_tokenizer.codec.requests.responses_fields import FIELDS
from shoal_tokenizer.codec.requests.responses_items import MAX_ITEMS, Item, Message
from shoal_tokenizer.codec.requests.responses_kept import echo_fields, storage
from shoal_tokenizer.codec.requests.responses_tools import Toolbox, check_name
from shoal_tokenizer.codec.requests.responses_turns import Turns, refuse_silence
from shoal_tokenizer.codec.requests.served_model import ServedModel

_CARRIED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


class ResponsesConverter:
    """``RequestConverter`` for one served model."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def convert(self, body: bytes, names: RequestNames) -> Converted | NeedsHistory:
        request, parsed = read_request(body)
        self._served.check_name(request.model)
        _refuse(request)
        if request.previous_response_id is not None and names.history is None:
            return NeedsHistory(request.previous_response_id)
        toolbox = Toolbox()
        for index, tool in enumerate(request.tools or ()):
            toolbox.add(tool, f"tools[{index}]")
        turns = _turns(request, names.history)
        conversation = _conversation(request, turns, toolbox)
        sampling = self._sampling(request)
        shape = self._shape(request, toolbox, conversation, names)
        echo = Echo(
            msgspec.Raw(echo_fields(request, parsed, sampling)),
            is_background=bool(request.background),
            has_carried_reasoning=_CARRIED in (request.include or ()),
        )
        shape = msgspec.structs.replace(shape, echo=write_echo(echo))
        return Converted(
            prompt=conversation,
            sampling=sampling,
            shape=shape,
            is_agent=bool(toolbox.functions) or any(message["role"] == "tool" for message in conversation.messages),
            notes=(*toolbox.notes, *turns.notes, *_notes(request)),
            cache_key=request.prompt_cache_key or None,
            storage=storage(request, parsed, shape, names),
        )

    def _sampling(self, request: Request) -> Sampling:
        return self._served.sampling(
            max_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            logprobs=(request.top_logprobs or 0) if _LOGPROBS in (request.include or ()) else None,
        )

    def _shape(
        self, request: Request, toolbox: Toolbox, conversation: Conversation, names: RequestNames
    ) -> AnswerShape:
        return AnswerShape(
            api=Api.RESPONSES,
            response_id=RESPONSE_PREFIX + names.request_id,
            created_s=names.created_s,
            model=self._served.name,
            is_stream=bool(request.stream),
            has_logprobs=_LOGPROBS in (request.include or ()),
            top_logprobs=request.top_logprobs or 0,
            has_tools=bool(toolbox.functions) and conversation.tool_choice.mode is not ToolMode.NONE,
            custom_tools=tuple(toolbox.custom),
            namespaces=toolbox.namespaces,
            is_kept=request.store is not False,
        )


def _refuse(request: Request) -> None:
    refuse_fields(request, FIELDS)
    if request.prompt_cache_options is not None and request.prompt_cache_options.prewarm:
        where = "prompt_cache_options.prewarm"
        raise unsupported(f"'{where}' is not supported here. {FIELDS[where].note}", where)
    if request.background and request.store is False:
        raise invalid("A background response has to be stored: leave out 'store'.", "background")
    if request.stream_options is not None and not request.stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    if request.input is None and request.previous_response_id is None:
        raise invalid("Missing required parameter: 'input'.", "input")


def _turns(request: Request, history: bytes | None) -> Turns:
    turns = Turns(request.instructions)
    earlier: list[Item] = []
    if request.previous_response_id is not None and history is not None:
        earlier = read_history(history)
    given = request.input or []
    items = [Message(role="user", content=given)] if isinstance(given, str) else given
    if len(earlier) + len(items) > MAX_ITEMS:
        raise invalid(f"The conversation has more than {MAX_ITEMS} items.", "previous_response_id")
    new_places = ["input"] if isinstance(given, str) else [f"input[{index}]" for index in range(len(items))]
    turns.add([*earlier, *items], [*("previous_response_id" for _ in earlier), *new_places])
    return turns


def _conversation(request: Request, turns: Turns, toolbox: Toolbox) -> Conversation:
    messages = turns.messages()
    refuse_silence(messages)
    return Conversation(
        messages=messages,
        tools=toolbox.functions or None,
        tool_choice=toolbox.choice(request.tool_choice, is_single=request.parallel_tool_calls is False),
        thinking=_thinking(request),
        answer_format=_answer_format(request),
    )


def _thinking(request: Request) -> Thinking:
    effort = request.reasoning.effort if request.reasoning is not None else None
    if effort is None:
        return Thinking()
    return Thinking(is_on=False) if effort == "none" else Thinking(is_on=True, effort=Effort(effort))


def _answer_format(request: Request) -> AnswerFormat | None:
    wanted = request.text.format if request.text is not None else None
    if isinstance(wanted, SchemaFormat):
        check_name(wanted.name, "text.format")
        return AnswerFormat(schema=wanted.json_schema)
    return AnswerFormat() if isinstance(wanted, JsonFormat) else None


def _notes(request: Request) -> list[str]:
    """What was asked for and has no effect here."""
    reasoning, text = request.reasoning, request.text
    asked = {
        "reasoning.summary": reasoning is not None and bool(reasoning.summary or reasoning.generate_summary),
        "reasoning.context": reasoning is not None and reasoning.context not in (None, "auto"),
        "reasoning.mode": reasoning is not None and reasoning.mode not in (None, "standard"),
        "text.verbosity": text is not None and text.verbosity not in (None, "medium"),
        "service_tier": request.service_tier not in (None, "auto", "default"),
        "truncation": request.truncation == "auto",
        "max_tool_calls": request.max_tool_calls is not None,
    }
    notes = [f"{name}: {FIELDS[name].note}" for name, is_asked in asked.items() if is_asked]
    if request.top_logprobs and _LOGPROBS not in (request.include or ()):
        notes.append(f"top_logprobs: only with '{_LOGPROBS}' in 'include'.")
    return notes

"""What the engine may generate at all, as one structural tag over the whole answer.

It is written where the caller wants more than text: a format of the answer, a call, certain calls, at most one call,
arguments by a strict schema. Otherwise there is none, and generating costs nothing extra. Tags that are tokens are
demanded as tokens: spelled out they would be text to the parser.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from shoal_tokenizer.codec.api import AnswerStart
from shoal_tokenizer.codec.chat_template.calls import CallFormat
from shoal_tokenizer.codec.chat_template.formats import AnswerFormats
from shoal_tokenizer.codec.chat_template.reasoning import ReasoningFormat
from shoal_tokenizer.codec.chat_template.tag import Tag
from shoal_tokenizer.codec.conversation import AnswerFormat, Conversation, ToolMode

_Format: TypeAlias = dict[str, Any]
_ANY_OBJECT: _Format = {"type": "object"}
# White space between two words of JSON: weak models write nothing else for ever. Arguments take what templates write of
# them in the history, so that the next turn finds its prefix.
_MAX_SPACE_CHARS = 64
_MAX_ARGUMENT_SPACE_CHARS = 1


def wants_calls_bound(conversation: Conversation) -> bool:
    """Whether the caller wants more of calls than that they may happen."""
    choice = conversation.tool_choice
    if not conversation.tools or choice.mode is ToolMode.NONE:
        return False
    if choice.mode is ToolMode.REQUIRED or choice.names is not None or choice.is_single:
        return True
    return any(tool["function"].get("strict") is True for tool in conversation.tools)


def write_constraint(
    conversation: Conversation, formats: AnswerFormats, start: AnswerStart, *, may_reason: bool
) -> str | None:
    """``may_reason``: the model may open its reasoning by itself, before everything else."""
    calls = formats.calls if conversation.tool_choice.mode is not ToolMode.NONE and conversation.tools else None
    is_bound = calls is not None and wants_calls_bound(conversation)
    if not is_bound and conversation.answer_format is None:
        return None
    content = _content(conversation, calls)
    prefix = _reasoning(formats.reasoning, start, may_reason=may_reason)
    tag = {"type": "structural_tag", "format": _sequence([*prefix, content])}
    return json.dumps(tag, ensure_ascii=False)


def _content(conversation: Conversation, calls: CallFormat | None) -> _Format:
    choice = conversation.tool_choice
    answer = _answer(conversation.answer_format) if conversation.answer_format is not None else None
    if calls is None:
        assert answer is not None
        return answer
    tags = [_call(calls, tool["function"]) for tool in _callable_tools(conversation)]
    if choice.mode is ToolMode.REQUIRED:
        return _calls_only(calls, tags, is_single=choice.is_single)
    if answer is not None:
        return _any_of([answer, _calls_only(calls, tags, is_single=choice.is_single)])
    return _text_with_calls(calls, tags, is_single=choice.is_single)


def _callable_tools(conversation: Conversation) -> list[dict[str, Any]]:
    names = conversation.tool_choice.names
    return [tool for tool in conversation.tools or () if names is None or tool["function"]["name"] in names]


def _answer(wanted: AnswerFormat) -> _Format:
    if wanted.regex is not None:
        return {"type": "regex", "pattern": wanted.regex}
    return _json(_ANY_OBJECT if wanted.schema is None else wanted.schema)


def _json(schema: _Format | bool, max_space_chars: int = _MAX_SPACE_CHARS) -> _Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": max_space_chars}


def _call(calls: CallFormat, function: dict[str, Any]) -> _Format:
    """One whole call of this function. Arguments follow the schema only where it is strict, as the APIs have it."""
    schema = function.get("parameters") if function.get("strict") is True else None
    if schema is not None and calls.arguments == "qwen_xml":
        schema = _with_items(schema)
    arguments = _json(_ANY_OBJECT if schema is None else schema, _MAX_ARGUMENT_SPACE_CHARS)
    arguments["style"] = calls.arguments
    head = calls.head[0] + function["name"] + calls.head[1]
    begin, end = None if calls.is_bare else calls.begin, calls.end
    if begin is not None and begin.token_id is not None:
        inside = _sequence([_text(head), arguments, _text(calls.tail)])
        return {"type": "tag", "begin": _tag(begin), "content": inside, "end": _end(end)}
    opening = (begin.text if begin is not None else "") + head
    if end is not None and end.token_id is not None:
        return {"type": "tag", "begin": opening, "content": _sequence([arguments, _text(calls.tail)]), "end": _end(end)}
    return {"type": "tag", "begin": opening, "content": arguments, "end": calls.tail + (end.text if end else "")}


def _with_items(schema: _Format) -> _Format:
    """Lists that may hold anything say so: outside of JSON xgrammar takes one that says nothing to be empty."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return schema
    return schema | {
        "properties": {
            name: {"items": {}, **part} if isinstance(part, dict) and part.get("type") == "array" else part
            for name, part in properties.items()
        }
    }


def _calls_only(calls: CallFormat, tags: list[_Format], *, is_single: bool) -> _Format:
    call = _any_of(tags)
    if is_single:
        return call
    return _sequence([call, {"type": "star", "content": _sequence([_text(calls.between), call])}])


def _text_with_calls(calls: CallFormat, tags: list[_Format], *, is_single: bool) -> _Format:
    begin = None if calls.is_bare else calls.begin
    if begin is not None and begin.token_id is not None:
        return {
            "type": "token_triggered_tags",
            "trigger_tokens": [begin.token_id],
            "tags": tags,
            "stop_after_first": is_single,
        }
    trigger = begin.text if begin is not None else calls.head[0]
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": is_single}


def _reasoning(form: ReasoningFormat | None, start: AnswerStart, *, may_reason: bool) -> list[_Format]:
    """What comes before everything else."""
    if form is None or not (start is AnswerStart.REASONING or may_reason):
        return []
    rest = [*_up_to(form.close), _text(form.after)]
    if start is AnswerStart.REASONING:
        return rest
    return [{"type": "optional", "content": _sequence([_tag(form.open), *rest])}]


def _up_to(tag: Tag) -> list[_Format]:
    if tag.token_id is not None:
        return [{"type": "any_tokens", "exclude_tokens": [tag.token_id]}, _tag(tag)]
    return [{"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": tag.text}]


def _tag(tag: Tag) -> _Format:
    return {"type": "token", "token": tag.token_id} if tag.token_id is not None else _text(tag.text)


def _end(tag: Tag | None) -> _Format | str:
    if tag is None:
        return ""
    return _tag(tag) if tag.token_id is not None else tag.text


def _text(text: str) -> _Format:
    return {"type": "const_string", "value": text}


def _sequence(elements: Sequence[_Format]) -> _Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def _any_of(elements: Sequence[_Format]) -> _Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}

"""What the engine may generate at all, as one structural tag over the whole answer.

It is written where the caller wants more than text: a format of the answer, a call, certain calls, at most one call,
arguments by a strict schema; and where tools are in the prompt that must not be called. ``｜DSML｜`` and the end of the
reasoning are demanded as tokens, because spelled out they are text to the parser; only within arguments, which
xgrammar's own style describes, their spelling counts.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from shoal_tokenizer.codec.api import AnswerStart
from shoal_tokenizer.codec.conversation import AnswerFormat, Conversation, ToolMode
from shoal_tokenizer.codec.deepseek.dialects import ControlTokens, Dialect

_Format: TypeAlias = dict[str, Any]
_ANY_OBJECT: _Format = {"type": "object"}
_MAX_SPACE_CHARS = 64  # between two words of JSON: weak models write nothing else for ever


def write_constraint(
    conversation: Conversation, dialect: Dialect, tokens: ControlTokens, start: AnswerStart
) -> str | None:
    """None: anything may be generated."""
    content = _Content(conversation, dialect, tokens, start).write()
    if content is None:
        return None
    prefix = [_text_without(tokens.think, tokens.think_end, tokens.dsml), _token(tokens.think_end)]
    elements = [*prefix, content] if start is AnswerStart.REASONING else [content]
    return json.dumps({"type": "structural_tag", "format": _sequence(elements)}, ensure_ascii=False)


class _Content:
    """The answer behind its reasoning."""

    def __init__(self, conversation: Conversation, dialect: Dialect, tokens: ControlTokens, start: AnswerStart) -> None:
        self._choice = conversation.tool_choice
        self._tools = conversation.tools or []
        self._dialect = dialect
        self._tokens = tokens
        self._start = start
        self._format = conversation.answer_format

    def write(self) -> _Format | None:
        answer = _answer(self._format) if self._format is not None else None
        if not self._tools:
            return answer
        if self._choice.mode is ToolMode.NONE:
            return answer or _text_without(self._tokens.dsml)
        if self._choice.mode is ToolMode.REQUIRED:
            return self._calls()
        if answer is not None:
            return {"type": "or", "elements": [answer, self._calls()]}
        return self._text_with_calls() if self._is_bound() else None

    def _is_bound(self) -> bool:
        """Whether the caller wants more of calls than that they may happen."""
        choice = self._choice
        is_strict = any(tool["function"].get("strict") is True for tool in self._tools)
        return is_strict or choice.names is not None or choice.is_single

    def _calls(self) -> _Format:
        """The whole block, or what is missing of it."""
        if self._start is AnswerStart.CALLS:
            return _sequence(self._block())
        return _sequence([_text("\n\n<"), _token(self._tokens.dsml), _text(self._opening()), *self._block()])

    def _text_with_calls(self) -> _Format:
        """Text, and a block of calls as soon as a token begins one."""
        dsml = _token(self._tokens.dsml)
        *block, end = self._block()
        tag = {
            "type": "tag",
            "begin": dsml,
            "content": _sequence([_text(self._opening()), *block]),
            "end": end["value"],
        }
        return {
            "type": "token_triggered_tags",
            "trigger_tokens": [self._tokens.dsml],
            "exclude_tokens": [self._tokens.think, self._tokens.think_end],
            "tags": [tag],
            "stop_after_first": True,
        }

    def _opening(self) -> str:
        return f"{self._dialect.space}{self._dialect.calls}>\n"

    def _block(self) -> list[_Format]:
        """The calls and the block's end."""
        names = self._choice.names
        calls = [
            self._call(tool["function"]) for tool in self._tools if names is None or tool["function"]["name"] in names
        ]
        call = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
        end = [_text("</"), _token(self._tokens.dsml), _text(f"{self._dialect.space}{self._dialect.calls}>")]
        return [call if self._choice.is_single else {"type": "plus", "content": call}, *end]

    def _call(self, function: dict[str, Any]) -> _Format:
        """Arguments follow the schema only where it is strict, as the APIs have it."""
        schema = function.get("parameters") if function.get("strict") is True else None
        arguments = _json(_ANY_OBJECT if schema is None else schema) | {"style": self._dialect.xml_style}
        dsml, invoke = _token(self._tokens.dsml), f"{self._dialect.space}invoke"
        head = _text(f'{invoke} name="{function["name"]}">\n')
        return _sequence([_text("<"), dsml, head, arguments, _text("</"), dsml, _text(f"{invoke}>\n")])


def _answer(wanted: AnswerFormat) -> _Format:
    if wanted.regex is not None:
        return {"type": "regex", "pattern": wanted.regex}
    return _json(_ANY_OBJECT if wanted.schema is None else wanted.schema)


def _json(schema: _Format | bool) -> _Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_SPACE_CHARS}


def _text_without(*token_ids: int) -> _Format:
    return {"type": "any_tokens", "exclude_tokens": list(token_ids)}


def _token(token_id: int) -> _Format:
    return {"type": "token", "token": token_id}


def _text(text: str) -> _Format:
    return {"type": "const_string", "value": text}


def _sequence(elements: Sequence[_Format]) -> _Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}

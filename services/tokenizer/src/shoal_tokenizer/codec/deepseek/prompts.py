"""Our conversation -> deepseek-recipe's, which knows how it looks in a prompt.

recipe's own conversion of requests is not asked: it drops fields in silence and refuses what can be served. What it
does beyond copying is done here too, so that a body that it takes gives the same prompt: an empty system message is
left out, reasoning that is missing is empty, a tool without parameters takes none. Unlike there, all tools stay in the
prompt whatever the choice, and a strict tool's schema stays as it was written: neither may break a prefix.
"""

import json
from typing import Any

import deepseek_recipe as recipe

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import INVALID_REQUEST
from shoal_tokenizer.codec.conversation import AnswerFormat, Conversation
from shoal_tokenizer.codec.deepseek.dialects import EFFORTS

# What recipe raises on values that it cannot hold: lone surrogates, numbers beyond JSON's, great depth.
_VALUE_ERRORS = (ValueError, TypeError, OverflowError, RecursionError)


def write_conversation(conversation: Conversation, *, thinks: bool, opens_calls: bool) -> recipe.Conversation:
    """``opens_calls``: the prompt ends inside of the block of calls. BadRequest for what recipe cannot hold."""
    effort = conversation.thinking.effort
    answer = conversation.answer_format
    messages = _messages(conversation, thinks=thinks)
    tools = _tools(conversation.tools or [])
    try:
        return recipe.Conversation(
            messages,
            thinking_mode=thinks,
            tools=tools,
            tool_choice="required" if opens_calls else "auto",
            reasoning_effort=EFFORTS[effort][0] if thinks and effort is not None else None,
            response_format="json_object" if answer == AnswerFormat() else "text",
            response_schema=answer.schema if answer is not None else None,
            response_regex=answer.regex if answer is not None else None,
        )
    except _VALUE_ERRORS as error:
        raise _refusal("The format of the answer", "response_format") from error


def _messages(conversation: Conversation, *, thinks: bool) -> list[recipe.Message]:
    last = len(conversation.messages) - 1
    try:
        return [
            _message(message, thinks=thinks, is_continued=conversation.is_continued and index == last)
            for index, message in enumerate(conversation.messages)
            if message["role"] != "system" or message["content"]
        ]
    except _VALUE_ERRORS as error:
        raise _refusal("A message", "messages") from error


def _message(message: dict[str, Any], *, thinks: bool, is_continued: bool) -> recipe.Message:
    role, content = message["role"], message["content"]
    if role == "system":
        return recipe.SystemMessage(content)
    if role == "user":
        return recipe.UserMessage(content)
    if role == "tool":
        return recipe.ToolMessage(content, message["tool_call_id"])
    reasoning = message.get("reasoning_content") or ""
    return recipe.AssistantMessage(content, reasoning if thinks else None, _calls(message), is_continued)


def _calls(message: dict[str, Any]) -> list[recipe.ToolCall] | None:
    calls = message.get("tool_calls")
    if not calls:
        return None
    return [
        recipe.ToolCall(
            call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
        )
        for call in calls
    ]


def _tools(tools: list[dict[str, Any]]) -> list[recipe.ToolDefinition]:
    try:
        return [
            recipe.ToolDefinition(
                tool["function"]["name"], tool["function"].get("description"), tool["function"].get("parameters") or {}
            )
            for tool in tools
        ]
    except _VALUE_ERRORS as error:
        raise _refusal("A tool", "tools") from error


def _refusal(what: str, param: str) -> BadRequest:
    text = f"{what} holds what cannot be written: half a character (a lone surrogate), a number that JSON does not "
    return BadRequest(INVALID_REQUEST, text + "have, or JSON nested more than 128 levels deep.", param=param)

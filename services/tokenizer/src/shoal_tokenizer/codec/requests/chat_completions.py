"""Chat Completions, the request: which bodies are taken, and what they mean.

``chat_body`` has the structure, ``chat_fields`` the verdicts.
"""

import re

from shoal_tokenizer.codec.api import AnswerShape, Api, Converted, RequestNames, Sampling
from shoal_tokenizer.codec.conversation import AnswerFormat, Conversation, Effort, Thinking, ToolMode
from shoal_tokenizer.codec.events.chat_completions import ID_PREFIX
from shoal_tokenizer.codec.requests.chat_body import JsonFormat, RegexFormat, Request, SchemaFormat, read_request
from shoal_tokenizer.codec.requests.chat_fields import FIELDS
from shoal_tokenizer.codec.requests.chat_messages import Turns
from shoal_tokenizer.codec.requests.chat_tools import Toolbox, check_name
from shoal_tokenizer.codec.requests.fields import invalid, refuse_fields, unsupported
from shoal_tokenizer.codec.requests.openai_sampling import (
    check_delivery,
    choices,
    choose_tokens,
    stop_strings,
    wants_usage_event,
)
from shoal_tokenizer.codec.requests.served_model import ServedModel

__all__ = ["FIELDS", "ChatCompletionsConverter", "Request"]

_REGEX = "response_format.regex"
_FLAGS = re.compile(r"\(\?[aiLmsux-]")  # with (?i) Python compiles wide sets for seconds
_EFFORTS = {effort.value: effort for effort in Effort} | {"ultra": Effort.MAX}  # DeepSeek's word for it


class ChatCompletionsConverter:
    """``RequestConverter`` for one served model."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def convert(self, body: bytes, names: RequestNames) -> Converted:
        request = read_request(body)
        self._served.check_name(request.model)
        _refuse(request)
        toolbox = Toolbox(request.tools or ())
        turns = Turns(request.messages, request.continue_final_message)
        conversation = Conversation(
            messages=turns.messages,
            tools=toolbox.functions or None,
            tool_choice=toolbox.choice(request.tool_choice, is_single=request.parallel_tool_calls is False),
            thinking=_thinking(request),
            answer_format=_answer_format(request),
            is_continued=turns.is_continued,
        )
        return Converted(
            prompt=conversation,
            sampling=self._sampling(request),
            shape=self._shape(request, toolbox, conversation, names),
            is_agent=bool(toolbox.functions) or any(message["role"] == "tool" for message in conversation.messages),
            notes=(*toolbox.notes, *turns.notes, *_notes(request)),
            cache_key=request.prompt_cache_key or None,
            choices=choices(request),
        )

    def _sampling(self, request: Request) -> Sampling:
        old, new = request.max_tokens, request.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise invalid("'max_tokens' and 'max_completion_tokens' contradict each other; send one.", "max_tokens")
        return choose_tokens(
            self._served,
            request,
            max_tokens=new if new is not None else old,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )

    def _shape(
        self, request: Request, toolbox: Toolbox, conversation: Conversation, names: RequestNames
    ) -> AnswerShape:
        return AnswerShape(
            api=Api.CHAT_COMPLETIONS,
            response_id=ID_PREFIX + names.request_id,
            created_s=names.created_s,
            model=self._served.name,
            is_stream=bool(request.stream),
            stop_strings=stop_strings(request),
            has_usage_event=wants_usage_event(request),
            has_logprobs=bool(request.logprobs),
            top_logprobs=request.top_logprobs or 0,
            has_tools=bool(toolbox.functions) and conversation.tool_choice.mode is not ToolMode.NONE,
            custom_tools=tuple(toolbox.custom),
        )


def _refuse(request: Request) -> None:
    refuse_fields(request, FIELDS)
    check_delivery(request)
    if request.modalities not in (None, ["text"]):
        raise unsupported("Only the modality 'text' is supported by this model.", "modalities")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    if request.add_generation_prompt is False and not request.continue_final_message:
        raise unsupported(
            "A prompt without the beginning of an answer is only made with 'continue_final_message'.",
            "add_generation_prompt",
        )


def _thinking(request: Request) -> Thinking:
    """What the switches say; without one, whether there is an effort."""
    word, switch = _effort_word(request), _switch(request)
    if switch is None and word is not None:
        switch = word != "none"
    return Thinking(switch, _EFFORTS.get(word) if word is not None and switch else None)


def _effort_word(request: Request) -> str | None:
    variables = request.chat_template_kwargs
    return request.reasoning_effort or (variables.reasoning_effort if variables is not None else None)


def _switch(request: Request) -> bool | None:
    """What the caller says by name; BadRequest when it says both."""
    variables, thinking = request.chat_template_kwargs, request.thinking
    said = {
        "thinking": None if thinking is None else {"enabled": True, "disabled": False}.get(thinking.type),
        "enable_thinking": request.enable_thinking,
    }
    if variables is not None:
        said["chat_template_kwargs.enable_thinking"] = variables.enable_thinking
        said["chat_template_kwargs.thinking"] = variables.thinking
    switches = {name: is_on for name, is_on in said.items() if is_on is not None}
    if len(set(switches.values())) > 1:
        raise invalid(f"{' and '.join(map(repr, switches))} contradict each other; send one.", next(iter(switches)))
    return next(iter(switches.values()), None)


def _answer_format(request: Request) -> AnswerFormat | None:
    wanted = request.response_format
    if isinstance(wanted, SchemaFormat):
        check_name(wanted.json_schema.name, "response_format.json_schema.name")
        return AnswerFormat(schema=wanted.json_schema.json_schema)
    if isinstance(wanted, RegexFormat):
        _check_regex(wanted.regex)
        return AnswerFormat(regex=wanted.regex)
    return AnswerFormat() if isinstance(wanted, JsonFormat) else None


def _check_regex(regex: str) -> None:
    if _FLAGS.search(regex):
        raise unsupported("Flags are not supported in a regular expression: write out what they mean.", _REGEX)
    try:
        re.compile(regex)
    except (re.error, RecursionError, OverflowError):
        raise invalid("'regex' is no regular expression.", _REGEX) from None


def _notes(request: Request) -> list[str]:
    """What was asked for and has no effect here."""
    thinking = request.thinking
    asked = {
        "store": bool(request.store),
        "service_tier": request.service_tier not in (None, "auto", "default"),
        "verbosity": request.verbosity not in (None, "medium"),
        "prediction": request.prediction is not None,
        "thinking.budget_tokens": thinking is not None and thinking.budget_tokens is not None,
    }
    notes = [f"{name}: {FIELDS[name].note}" for name, is_asked in asked.items() if is_asked]
    word, switch = _effort_word(request), _switch(request)
    if word is not None and switch is not None and switch != (word != "none"):
        notes.append(f"reasoning_effort: thinking is {'on' if switch else 'off'}, so '{word}' has no effect.")
    return notes

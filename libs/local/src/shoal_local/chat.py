"""`shoal chat`: a conversation in the terminal, with what each turn cost.

Answers go to standard output, everything else to standard error. Where standard input is no terminal each of its
lines is one turn, and the first turn that fails ends it with exit code 1.
"""

import contextlib
import select
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.text import Text

from shoal_local.answer import (
    CHAT_PATH,
    MODELS_PATH,
    AnswerFailed,
    StreamedAnswer,
    client_options,
    failure_of_response,
    failure_of_transport,
    served_model,
)
from shoal_local.terminal import remarks
from shoal_local.wording import share

PROMPT = "› "
PASTE_S = 0.02


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What was asked for on the command line."""

    url: str
    model: str = ""  # "": the one that is served
    system: str = ""
    max_tokens: int = 512
    temperature: float | None = None


@dataclass(slots=True)
class Conversation:
    """Everything said so far; grows by the turns that were answered, also in part."""

    http: httpx.Client
    options: ChatOptions
    model: str
    messages: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def open(cls, http: httpx.Client, options: ChatOptions) -> "Conversation":
        """With the model that is served, when none was named. Raises AnswerFailed."""
        model = options.model or _ask_model(http, options.url)
        system = [{"role": "system", "content": options.system}] if options.system else []
        return cls(http, options, model, system)

    def ask(self, text: str, show: Callable[[str], None]) -> StreamedAnswer:
        """One turn. Raises AnswerFailed, and KeyboardInterrupt once the request was cancelled."""
        turn = [{"role": "user", "content": text}]
        answer = StreamedAnswer(time.monotonic)
        try:
            self._read(answer, turn, show)
        except httpx.HTTPError as error:
            raise failure_of_transport(error, self.options.url) from error
        finally:
            if answer.text:
                self.messages += [*turn, {"role": "assistant", "content": answer.text}]
        return answer

    def _read(self, answer: StreamedAnswer, turn: list[dict[str, str]], show: Callable[[str], None]) -> None:
        # Leaving this block closes the connection, which is how a gateway hears that nobody reads any more.
        with self.http.stream("POST", CHAT_PATH, json=self._body(turn)) as response:
            if response.status_code != httpx.codes.OK:
                raise failure_of_response(response.status_code, response.read())
            for line in response.iter_lines():
                if added := answer.take(line):
                    show(added)
        answer.close()

    def _body(self, turn: list[dict[str, str]]) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": [*self.messages, *turn],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.options.max_tokens,
        }
        if self.options.temperature is not None:
            body["temperature"] = self.options.temperature
        return body


def _ask_model(http: httpx.Client, url: str) -> str:
    try:
        return served_model(http.get(MODELS_PATH))
    except httpx.HTTPError as error:
        raise failure_of_transport(error, url) from error


def chat(options: ChatOptions) -> int:
    """Until the end of the input."""
    is_person = sys.stdin.isatty()
    with httpx.Client(**client_options(options.url)) as http:
        try:
            conversation = Conversation.open(http, options)
            if is_person:
                _say(f"{conversation.model} at {options.url}. Ctrl-C stops an answer, Ctrl-D ends.")
            for text in _typed() if is_person else _piped():
                _take_turn(conversation, text, is_person=is_person)
        except AnswerFailed as error:
            _say_failure(error)
            return 1
    return 0


def _take_turn(conversation: Conversation, text: str, *, is_person: bool) -> None:
    """A person may try again after an error; a script hears of it."""
    try:
        answer = conversation.ask(text, _show)
        print(flush=True)
        _say(cost(answer))
    except KeyboardInterrupt:
        print(flush=True)
        if not is_person:
            raise
        _say("stopped")
    except AnswerFailed as error:
        if not is_person:
            raise
        _say_failure(error)


def cost(answer: StreamedAnswer) -> str:
    """``2,498 tokens in, 2,432 of them cached (97.4 %) · first token after 1.12 s · 22 out, 14.3 a second``."""
    parts = []
    if answer.prompt_tokens is not None:
        parts.append(f"{answer.prompt_tokens:,} tokens in")
        if answer.cached_tokens is not None:
            part = share(answer.cached_tokens, answer.prompt_tokens)
            parts[0] += f", {answer.cached_tokens:,} of them cached ({part})"
    if answer.ttft_s is not None:
        parts.append(f"first token after {answer.ttft_s:.2f} s")
    if answer.completion_tokens is not None:
        parts.append(f"{answer.completion_tokens:,} out")
        if answer.token_s:
            parts[-1] += f", {1 / answer.token_s:.1f} a second"
    if answer.finish_reason == "length":
        parts.append("cut short by --max-tokens")
    return " · ".join(parts)


def _typed() -> Iterator[str]:
    """What a person enters; Ctrl-C takes back the line, Ctrl-D ends."""
    with contextlib.suppress(ImportError):  # not every Python has it; input() alone will do
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            text = _enter().strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if text:
            yield text


def _enter() -> str:
    """One turn. A paste of several lines is one: a terminal that marks pastes hands it over whole, from any other the
    lines that follow are there at once."""
    lines = [input(PROMPT)]
    while select.select([sys.stdin], [], [], PASTE_S)[0]:
        lines.append(input())
    return "\n".join(lines)


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        if text := line.strip():
            yield text


def _show(added: str) -> None:
    print(harmless(added), end="", flush=True)


def harmless(text: str) -> str:
    """Whatever a model writes must not move the cursor or recolour the terminal; every other character stays."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))


def _say(text: str) -> None:
    remarks().print(Text(text, "quiet"))


def _say_failure(error: AnswerFailed) -> None:
    remarks().print(Text(error.explained, "bad"))

"""One streamed answer of a gateway as its client sees it: the text, the usage, the times, and what went wrong.

Fed with lines, so that `chat` can read them one after the other and `bench` many at once.
"""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

CONNECT_S = 5.0
SILENCE_S = 90.0  # a gateway says something at least each SHOAL_GATEWAY_KEEP_ALIVE_S
CHAT_PATH = "/v1/chat/completions"
MODELS_PATH = "/v1/models"
DATA = "data:"
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})

ADVICE = {
    "context_length_exceeded": "Start a new conversation, or lower --max-tokens.",
    "model_not_found": "Leave --model out to take the one that is served.",
    "overloaded": "Too much runs now: try again in a moment; `shoal status` shows the load.",
    "rate_limit_exceeded": "Wait a moment and try again.",
    "draining": "It is leaving: try again in a moment.",
    "unavailable": "`shoal status` shows who is missing.",
    "bug": "The gateway's log has the reason: `shoal logs gateway --level error`.",
    "no_connection": "Start it with `shoal up`, or name another one with --url.",
    "silent": "`shoal status` shows what it is busy with.",
    "cut_off": "The gateway ended; `shoal status` shows whether it is back.",
}


class AnswerFailed(Exception):
    """No answer, or not all of it. ``kind`` has few values; the message says what happened, ``advice`` what to do."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.advice = ADVICE.get(kind, "")

    @property
    def explained(self) -> str:
        """Both, a line each."""
        return f"{self}\n{self.advice}" if self.advice else str(self)


class StreamedAnswer:
    """Grows with ``take``. Numbers are None until they are known."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = clock()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._is_done = False
        self.text = ""
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None

    def take(self, line: str) -> str:
        """One line of the stream; returns the text that it adds. Raises AnswerFailed when it tells of an error."""
        if not line.startswith(DATA):
            return ""  # an empty line between events, or a comment that keeps the connection alive
        payload = line.removeprefix(DATA).strip()
        if payload == "[DONE]":
            self._is_done = True
            return ""
        try:
            added = self._take_event(json.loads(payload))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AnswerFailed("not_shoal", "What answers there speaks no Chat Completions.") from error
        if added:
            self._last_s = self._clock()
            self._first_s = self._last_s if self._first_s is None else self._first_s
            self.text += added
        return added

    def _take_event(self, event: dict[str, Any]) -> str:
        if "error" in event:
            raise failure_of(event)
        self._take_usage(event.get("usage"))
        added = ""
        for choice in event.get("choices", ()):
            added += choice["delta"].get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return added

    def _take_usage(self, usage: dict[str, Any] | None) -> None:
        if usage is not None:
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def close(self) -> None:
        """The stream is at its end. Raises AnswerFailed when it was not at the answer's."""
        if not self._is_done:
            raise AnswerFailed("cut_off", "The answer broke off.")

    @property
    def ttft_s(self) -> float | None:
        """Until the first text."""
        return None if self._first_s is None else self._first_s - self._started_s

    @property
    def token_s(self) -> float | None:
        """Seconds for each token after the first."""
        if self._first_s is None or self._last_s is None or (self.completion_tokens or 0) < 2:
            return None
        return (self._last_s - self._first_s) / ((self.completion_tokens or 0) - 1)


def failure_of(body: object, status: int | None = None) -> AnswerFailed:
    """The gateway's error object, or whatever another server put in its place."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return AnswerFailed(f"http_{status}", f"It answered with status {status}. Is it a Shoal gateway?")
    return AnswerFailed(str(error.get("code") or error.get("type") or f"http_{status}"), error["message"])


def failure_of_response(status: int, content: bytes) -> AnswerFailed:
    """Of an answer that is no stream."""
    try:
        return failure_of(json.loads(content), status)
    except ValueError:
        return failure_of(None, status)


def failure_of_transport(error: httpx.HTTPError, url: str) -> AnswerFailed:
    """Of the connection itself."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return AnswerFailed("no_connection", f"Nothing answers at {url}.")
    if isinstance(error, httpx.TimeoutException):
        return AnswerFailed("silent", f"{url} was silent for {SILENCE_S:.0f} s.")
    return AnswerFailed("cut_off", "The connection broke off.")


def client_options(url: str) -> dict[str, Any]:
    """For httpx: a proxy that is set for the outside must not see loopback."""
    return {
        "base_url": url,
        "timeout": httpx.Timeout(SILENCE_S, connect=CONNECT_S),
        "trust_env": urlsplit(url).hostname not in LOOPBACK_HOSTS,
    }


def served_model(models: httpx.Response) -> str:
    """The first one of an answer to ``GET /v1/models``. Raises AnswerFailed when there is none."""
    if models.status_code != httpx.codes.OK:
        raise failure_of_response(models.status_code, models.content)
    try:
        served = [str(model["id"]) for model in models.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise AnswerFailed("not_shoal", "What answers there is no Shoal gateway.") from error
    if not served:
        raise AnswerFailed("unavailable", "The gateway serves no model now: no decode worker is there.")
    return served[0]

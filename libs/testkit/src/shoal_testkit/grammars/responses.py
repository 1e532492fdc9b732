"""The grammar of a Responses stream, on the bytes that a client got.

    created, in_progress, item*, completed | incomplete | failed
    item = output_item.added, [content_part.added], delta*, done, [content_part.done], output_item.done

An item that a failure or a cancellation broke off has no end of its own; the last event shows how far it came.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from shoal_testkit.grammars.events import Event, read_named, require

_TERMINAL = {
    "response.completed": ("completed",),
    "response.incomplete": ("incomplete", "cancelled"),
    "response.failed": ("failed",),
}
# Kind of item -> its deltas, the field of the done event that has the whole, whether that lies in a content part.
_TEXTS = {
    "message": ("response.output_text", "text", True),
    "reasoning": ("response.reasoning_text", "text", True),
    "function_call": ("response.function_call_arguments", "arguments", False),
    "custom_tool_call": ("response.custom_tool_call_input", "input", False),
}
_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
_ENDS = ("completed", "incomplete")


def check_responses_stream(raw: bytes) -> Event:
    """The final Response object; raises GrammarBroken."""
    stream = ResponsesStream()
    for event in read_named(raw):
        stream.take(event)
    return stream.close()


@dataclass(slots=True)
class _OpenItem:
    """What was said of one output item so far."""

    id: str
    kind: str
    added: Event
    has_part: bool = False
    is_part_done: bool = False
    is_text_done: bool = False
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)


class ResponsesStream:
    """Takes events in their order; ``close`` when there are no more."""

    def __init__(self) -> None:
        self._next = 0
        self._response_id = ""
        self._final: Event | None = None
        self._done: list[Event] = []
        self._item: _OpenItem | None = None
        self._ids: set[str] = set()

    def take(self, event: Event) -> None:
        kind = event["type"]
        require(self._final is None, f"{kind} after the last event")
        number = event["sequence_number"]
        require(number == self._next, f"{kind} has the number {number}, not {self._next}")
        self._next += 1
        if number < 2:
            self._open(event, "response.in_progress" if number else "response.created")
        elif kind in _TERMINAL:
            self._end(event)
        elif kind == "response.output_item.added":
            self._add(event)
        else:
            self._inside(event)

    def close(self) -> Event:
        """The final Response object."""
        require(self._final is not None, "no last event")
        assert self._final is not None
        return self._final

    def _open(self, event: Event, wanted: str) -> None:
        require(event["type"] == wanted, f"{event['type']} instead of {wanted}")
        response = event["response"]
        require(response["status"] in ("queued", "in_progress"), f"{wanted} with {response['status']}")
        require(response["output"] == [] and response["usage"] is None, f"{wanted} already has an answer")
        self._response_id = self._response_id or response["id"]
        require(response["id"] == self._response_id != "", "the response changed its id")

    def _add(self, event: Event) -> None:
        item, index = event["item"], event["output_index"]
        require(self._item is None, "an item begins inside of another")
        require(index == len(self._done), f"item {index} after {len(self._done)} items")
        require(item["type"] in _TEXTS, f"an item of type {item['type']}")
        require(item["id"].startswith(_ID_PREFIXES[item["type"]]), f"an id {item['id']} for {item['type']}")
        require(item["id"] not in self._ids, f"the id {item['id']} twice")
        if "call_id" in item:
            require(item["call_id"] not in self._ids and bool(item["call_id"]), f"the id {item['call_id']} twice")
            self._ids.add(item["call_id"])
        require(item["status"] == "in_progress", f"an item begins {item['status']}")
        require(not (item.get("content") or item.get("arguments") or item.get("input")), "an item begins with content")
        self._ids.add(item["id"])
        self._item = _OpenItem(item["id"], item["type"], item)

    def _inside(self, event: Event) -> None:
        kind, item = event["type"], self._item
        require(item is not None, f"{kind} outside of any item")
        assert item is not None
        require(event["output_index"] == len(self._done), f"{kind} of item {event['output_index']}")
        if kind == "response.output_item.done":
            self._finish_item(event["item"], item)
            return
        require(event["item_id"] == item.id, f"{kind} of {event['item_id']} inside of {item.id}")
        stem, whole, lies_in_part = _TEXTS[item.kind]
        if lies_in_part:
            require(event["content_index"] == 0, f"{kind} of part {event['content_index']}")
        if kind == "response.content_part.added":
            self._begin_part(event["part"], item, lies_in_part)
        elif kind == f"{stem}.delta":
            self._add_text(event, item, lies_in_part)
        elif kind == f"{stem}.done":
            self._finish_text(event, item, whole)
        elif kind == "response.content_part.done":
            require(item.is_text_done and not item.is_part_done, "a part ends before its text, or twice")
            require(event["part"]["text"] == item.text, "a part has another text than its deltas")
            item.is_part_done = True
        else:
            require(False, f"{kind} inside of {item.kind}")

    @staticmethod
    def _begin_part(part: Event, item: _OpenItem, lies_in_part: bool) -> None:
        require(lies_in_part and not item.has_part, "a part where none may begin")
        require(part["type"] == ("output_text" if item.kind == "message" else "reasoning_text"), f"part {part['type']}")
        require(part["text"] == "", "a part begins with text")
        item.has_part = True

    @staticmethod
    def _add_text(event: Event, item: _OpenItem, lies_in_part: bool) -> None:
        require(item.has_part == lies_in_part, "a delta before its part")
        require(not item.is_text_done, "a delta after the text was done")
        require(bool(event["delta"]) or bool(event.get("logprobs")), "a delta that says nothing")
        item.text += event["delta"]
        if item.kind == "message":
            item.logprobs += event["logprobs"]

    @staticmethod
    def _finish_text(event: Event, item: _OpenItem, whole: str) -> None:
        require(not item.is_text_done, "a text is done twice")
        require(event[whole] == item.text, f"done has another {whole} than the deltas")
        if item.kind == "message":
            require(event["logprobs"] == item.logprobs, "done has other logprobs than the deltas")
        item.is_text_done = True

    def _finish_item(self, shown: Event, item: _OpenItem) -> None:
        _, _, lies_in_part = _TEXTS[item.kind]
        require(item.is_text_done and item.is_part_done == lies_in_part, "an item ends before its parts")
        require(shown["status"] in _ENDS, f"an item ends {shown['status']}")
        _check_same(shown, item)
        self._done.append(shown)
        self._item = None

    def _end(self, event: Event) -> None:
        kind, response = event["type"], event["response"]
        status = response["status"]
        require(response["id"] == self._response_id, "the response changed its id")
        require(status in _TERMINAL[kind], f"{kind} with status {status}")
        require((response["error"] is not None) == (status == "failed"), f"{status} with error {response['error']}")
        details = response["incomplete_details"]
        require((details is not None) == (status == "incomplete"), f"{status} with details {details}")
        output = list(response["output"])
        if self._item is not None:
            require(status in ("failed", "cancelled"), f"{status} inside of an item")
            require(len(output) == len(self._done) + 1, "the broken item is missing")
            _check_same(output.pop(), self._item)
        require(output == self._done, "the final output differs from the items")
        require((response["usage"] is not None) == (status in _ENDS), f"{status} with usage {response['usage']}")
        if response["usage"] is not None:
            _check_usage(response["usage"])
        self._final = response


def _check_same(shown: Event, item: _OpenItem) -> None:
    """An item's final form has what its events said."""
    fixed = ("id", "type", "role", "call_id", "name", "namespace")
    for name in fixed:
        require(shown.get(name) == item.added.get(name), f"an item changed its {name}")
    _, whole, lies_in_part = _TEXTS[item.kind]
    text = "".join(part["text"] for part in shown["content"]) if lies_in_part else shown[whole]
    require(text == item.text, "an item ends with another text than its deltas")
    if item.kind == "function_call" and shown["status"] == "completed":
        require(isinstance(json.loads(text), dict), "arguments that are no JSON object")


def _check_usage(usage: Event) -> None:
    prompt, answer = usage["input_tokens"], usage["output_tokens"]
    require(usage["total_tokens"] == prompt + answer, "the total is no sum")
    require(0 <= usage["input_tokens_details"]["cached_tokens"] <= prompt, "more cached tokens than the prompt has")
    require(0 <= usage["output_tokens_details"]["reasoning_tokens"] <= answer, "more reasoning than answer")

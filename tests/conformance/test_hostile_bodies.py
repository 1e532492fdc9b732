"""Bodies that nobody should send: a clear refusal in the API's own words or an answer, soon, in bounded memory."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal_testkit.cluster import Cluster
from shoal_testkit.grammars import check_stream

from .conftest import MODEL

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
WITHIN_S = 20.0
MOST_MIB = {"gateway": 1024, "tokenizer-1": 3072}  # far more than a request should take, far less than a leak does
MANY_MESSAGES = 100_000
MANY_TOOLS = 5_000
DEPTH = 10_000
ALMOST_ALL = 7_900_000
ANSWERS = (  # a 404 would be a clear refusal too, and shows nothing
    httpx.codes.OK,
    httpx.codes.BAD_REQUEST,
    httpx.codes.REQUEST_ENTITY_TOO_LARGE,
    httpx.codes.UNSUPPORTED_MEDIA_TYPE,
)
JSON = {"content-type": "application/json"}


def body_of(path: str, text: str, **others: Any) -> dict[str, Any]:
    """A body that asks for little, with ``text`` as what the user says."""
    turn = {"role": "user", "content": text}
    if path == "/v1/completions":
        return {"model": MODEL, "prompt": text, "max_tokens": 4, **others}
    if path == "/v1/responses":
        return {"model": MODEL, "input": [turn], "max_output_tokens": 16, **others}
    limit = {} if path.endswith("count_tokens") else {"max_tokens": 4}
    return {"model": MODEL, "messages": [turn], **limit, **others}


def _limit(path: str) -> str:
    return "max_output_tokens" if path == "/v1/responses" else "max_tokens"


def _tool(path: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    if path.startswith("/v1/messages"):
        return {"name": name, "input_schema": schema}
    if path == "/v1/responses":
        return {"type": "function", "name": name, "parameters": schema, "strict": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def _dumped(path: str, text: str = "Say hello.", **others: Any) -> bytes:
    return json.dumps(body_of(path, text, **others)).encode()


def _many_messages(path: str) -> bytes:
    name = "input" if path == "/v1/responses" else "messages"
    turns = [{"role": ("user", "assistant")[n % 2], "content": "x"} for n in range(MANY_MESSAGES + 1)]
    return _dumped(path, **{name: turns})


def _deep(path: str, opening: str, closing: str) -> bytes:
    return _dumped(path).replace(b'"Say hello."', (opening * DEPTH + "1" + closing * DEPTH).encode())


def _deep_schema(path: str) -> bytes:
    deep = '{"type":"object","properties":{"a":' * DEPTH + "{}" + "}}" * DEPTH
    return _dumped(path, tools=[_tool(path, "deep", {"$comment": "HERE"})]).replace(
        b'{"$comment": "HERE"}', deep.encode()
    )


def _recursive(path: str) -> bytes:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "all": {"$ref": "#"}}}
    schema = {"type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    return _dumped(path, tools=[_tool(path, "tree", schema)])


def _recursive_answer(path: str) -> bytes:
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    fields: dict[str, Any] = {
        "/v1/responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": loop}}},
        "/v1/chat/completions": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": loop}}
        },
    }
    return _dumped(path, **fields.get(path, {"output_config": {"format": {"type": "json_schema", "schema": loop}}}))


def _many_tools(path: str) -> bytes:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    return _dumped(path, tools=[_tool(path, f"tool_{number}", schema) for number in range(MANY_TOOLS)])


HOSTILE: dict[str, Callable[[str], bytes]] = {
    "8 MB of words": lambda path: _dumped(path, "word " * (ALMOST_ALL // 5)),
    "8 MB of one character": lambda path: _dumped(path, "a" * ALMOST_ALL),
    "8 MB of escapes": lambda path: _dumped(path).replace(b"Say hello.", b"\\u4f60" * (ALMOST_ALL // 6)),
    "8 MB of spaces around": lambda path: b" " * ALMOST_ALL + _dumped(path),
    "many messages": _many_messages,
    "deep lists": lambda path: _deep(path, "[", "]"),
    "deep objects": lambda path: _deep(path, '{"a":', "}"),
    "deep schema": _deep_schema,
    "lone surrogate": lambda path: _dumped(path, "Say \ud800 hello \udfff."),
    "lone surrogate in a key": lambda path: _dumped(path, metadata={"\ud800": "\udfff"}),
    "NUL": lambda path: _dumped(path, "Say \x00 hello."),
    "raw NUL": lambda path: _dumped(path).replace(b"hello", b"he\x00llo"),
    "recursive schema": _recursive,
    "recursive answer": _recursive_answer,
    "many tools": _many_tools,
    "keys twice": lambda path: _dumped(path)[:-1] + b',"model":"nobody","model":"' + MODEL.encode() + b'"}',
    "NaN": lambda path: _dumped(path, temperature=float("nan")),
    "infinity": lambda path: _dumped(path, temperature=float("inf")),
    "a huge number": lambda path: _dumped(path, temperature=1).replace(b'"temperature": 1', b'"temperature": 1e999999'),
    "a huge integer": lambda path: _dumped(path, **{_limit(path): 10**4000}),
    "invalid UTF-8": lambda path: _dumped(path).replace(b"hello", b"\xff\xfe\xed\xa0\x80"),
    "empty": lambda path: b"",
    "null": lambda path: b"null",
    "a list": lambda path: b"[]",
    "half": lambda path: _dumped(path)[:20],
    "two": lambda path: _dumped(path) * 2,
}


def resident_mib(cluster: Cluster, name: str) -> float:
    """The most that the process ever had in memory."""
    status = Path(f"/proc/{cluster.running[name].process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def check_answer(path: str, answer: httpx.Response) -> None:
    """Success, or what is wrong in the error shape of the API."""
    assert answer.status_code in ANSWERS, answer.text[:500]
    told = answer.json()
    if answer.status_code == httpx.codes.OK:
        return
    if path.startswith("/v1/messages"):
        assert told["type"] == "error" and told["error"]["type"], told
    else:
        assert {"type", "param", "code"} <= set(told["error"]), told
    assert 0 < len(told["error"]["message"]) < 2000, "an error says what is wrong, and does not repeat the body"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_body_is_answered_or_refused_clearly(kind: str, path: str, deepseek: Cluster) -> None:
    body = HOSTILE[kind](path)
    began_s = time.monotonic()
    answer = httpx.post(f"{deepseek.url}{path}", content=body, headers=JSON, timeout=40, trust_env=False)
    took_s = time.monotonic() - began_s
    check_answer(path, answer)
    assert took_s < WITHIN_S
    for name, most in MOST_MIB.items():
        assert resident_mib(deepseek, name) < most
    print(
        f"{path} {kind}: {answer.status_code} in {took_s:.2f} s", {n: int(resident_mib(deepseek, n)) for n in MOST_MIB}
    )


@pytest.mark.parametrize("path", PATHS)
def test_what_is_too_long_is_refused(path: str, deepseek: Cluster) -> None:
    body = _dumped(path, "a" * 10_000_000)
    try:
        answer = httpx.post(f"{deepseek.url}{path}", content=body, headers=JSON, timeout=40, trust_env=False)
    except httpx.WriteError:
        pytest.fail("the refusal did not reach the client")
    assert answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE
    check_answer(path, answer)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data; boundary=x", ""])
def test_another_content_type_is_answered_or_refused_clearly(path: str, content_type: str, deepseek: Cluster) -> None:
    body, headers = _dumped(path), {"content-type": content_type}
    check_answer(path, httpx.post(f"{deepseek.url}{path}", content=body, headers=headers, timeout=40, trust_env=False))


@pytest.mark.parametrize("path", PATHS[:4])
@pytest.mark.parametrize("text", ["Say \ud800 hello.", "\udc00", "Say \x00 hello."])
def test_a_stream_survives_what_is_no_text(path: str, text: str, deepseek: Cluster) -> None:
    body = _dumped(path, text, stream=True)
    answer = httpx.post(f"{deepseek.url}{path}", content=body, headers=JSON, timeout=40, trust_env=False)
    if answer.status_code == httpx.codes.OK:
        check_stream(path, answer.content)
    else:
        check_answer(path, answer)


@pytest.mark.parametrize("path", PATHS)
def test_the_system_still_serves(path: str, deepseek: Cluster) -> None:
    """Last in this file, so behind everything above."""
    answer = httpx.post(f"{deepseek.url}{path}", json=body_of(path, "Say hello."), timeout=40, trust_env=False)
    assert answer.status_code == httpx.codes.OK, answer.text

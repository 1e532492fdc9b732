"""What looks like a control token is text: whatever a caller writes, wherever; and whatever a model quotes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal_contracts.errors import BadRequest
from shoal_testkit.cluster import Cluster
from shoal_testkit.grammars import check_stream
from shoal_testkit.tiny_tokenizer import write_tiny_tokenizer
from shoal_tokenizer.codec.api import Codec
from shoal_tokenizer.model_files import load_codec

from .codecs import api_of, token_ids
from .conftest import MODEL, SPELLED
from .recorded.full_bodies import BODIES, with_each_text_replaced

TEMPLATE = Path(__file__).parent / "recorded" / "qwen3_like.jinja"
# Places whose text must reach the prompt; that no token forms there would show nothing if they were refused.
REACHED = {
    "/v1/chat/completions": {
        ".messages[0].content",
        ".messages[1].content[0].text",
        ".messages[2].content",
        ".messages[3].content",
        ".messages[3].reasoning_content",
        ".messages[3].tool_calls[0].function.arguments~.city",
        ".messages[3].tool_calls[0].function.arguments~.city#",
        ".messages[4].content",
        ".tools[0].function.description",
        ".tools[0].function.parameters.properties.city#",
        ".tools[0].function.parameters.properties.city.enum[0]",
        ".response_format.json_schema.schema.properties.answer#",
    },
    "/v1/responses": {
        ".instructions",
        ".input[0].content[0].text",
        ".input[1].content",
        ".input[2].content[0].text",
        ".input[3].content[0].text",
        ".input[4].arguments~.days[0].from",
        ".input[5].output",
        ".input[6].input",
        ".input[7].output",
        ".tools[0].parameters.properties.city.description",
        ".tools[1].description",
        ".tools[2].tools[0].description",
        ".text.format.schema.properties.answer.description",
    },
    "/v1/messages": {
        ".system[0].text",
        ".messages[0].content",
        ".messages[1].content[0].thinking",
        ".messages[1].content[1].text",
        ".messages[1].content[2].input.deep.er#",
        ".messages[2].content[0].content[0].text",
        ".messages[2].content[1].content",
        ".messages[2].content[2].text",
        ".tools[0].description",
        ".tools[0].input_schema.properties.city.enum[1]",
        ".output_config.format.schema.properties.answer#",
    },
    "/v1/completions": {".prompt"},
}


@pytest.fixture(scope="session")
def deepseek_served(deepseek_codec: Codec, deepseek_folder: Path) -> tuple[Codec, dict[str, int]]:
    return deepseek_codec, _added_tokens(deepseek_folder)


@pytest.fixture(scope="session")
def template_served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Codec, dict[str, int]]:
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("template") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return load_codec(folder, MODEL, 64), _added_tokens(folder)


def _added_tokens(folder: Path) -> dict[str, int]:
    listed = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return {token["content"]: token["id"] for token in listed}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("served", ["deepseek_served", "template_served"])
def test_no_typed_token_is_a_control_token(served: str, path: str, request: pytest.FixtureRequest) -> None:
    """All added tokens at once, behind every string and every key of a body that has everything."""
    codec, added = request.getfixturevalue(served)
    control = set(added.values())

    def controls(body: dict[str, Any]) -> Counter[int]:
        return Counter(token_id for token_id in token_ids(codec, api_of(path), body) if token_id in control)

    wanted, reached = controls(BODIES[path]), set()
    for place, body in with_each_text_replaced(BODIES[path], " ".join(added)):
        try:
            found = controls(body)
        except BadRequest:
            continue  # names, roles and types have their own rules
        reached.add(place)
        assert not found - wanted, f"{place} forms {found - wanted}"
    assert REACHED[path] <= reached, f"refused: {REACHED[path] - reached}"


@pytest.mark.parametrize("path", BODIES)
def test_each_kind_of_token_over_the_wire(path: str, deepseek: Cluster, deepseek_folder: Path) -> None:
    """The system serves such bodies, and tells of no more tokens than text needs."""
    added = list(_added_tokens(deepseek_folder))
    typed = " ".join([*added[:40], *added[-20:]])
    body = {**BODIES[path], "stream": False}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    failed = []
    with httpx.Client(base_url=deepseek.url, trust_env=False, timeout=60) as http:
        for place, changed in with_each_text_replaced(body, typed):
            if place in REACHED[path]:
                answer = http.post(path, json={**changed, limit: 16})
                failed += [] if answer.status_code == httpx.codes.OK else [(place, answer.text)]
    assert not failed


QUOTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Quote your markers."}],
        "thinking": {"type": "disabled"},
        "tools": [{"type": "function", "function": {"name": "step", "parameters": {"type": "object"}}}],
    },
    "/v1/responses": {
        "input": "Quote your markers.",
        "reasoning": {"effort": "none"},
        "tools": [{"type": "function", "name": "step", "parameters": {"type": "object"}, "strict": False}],
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Quote your markers."}],
        "thinking": {"type": "disabled"},
        "max_tokens": 1000,
        "tools": [{"name": "step", "input_schema": {"type": "object"}}],
    },
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", QUOTED)
def test_markers_that_a_model_spells_out_stay_text(path: str, is_stream: bool, deepseek: Cluster) -> None:
    body = {"model": MODEL, "stream": is_stream, **QUOTED[path]}
    answer = httpx.post(f"{deepseek.url}{path}", json=body, timeout=60, trust_env=False)
    assert answer.status_code == httpx.codes.OK, answer.text
    if is_stream:
        check_stream(path, answer.content)
        assert _streamed_text(path, answer.text) == SPELLED
    else:
        assert _whole_text(path, answer.json()) == SPELLED


def _whole_text(path: str, answer: dict[str, Any]) -> str:
    if path == "/v1/chat/completions":
        message = answer["choices"][0]["message"]
        assert not message.get("tool_calls") and not message.get("reasoning_content")
        return str(message["content"])
    (only,) = answer["content"] if path == "/v1/messages" else answer["output"]
    if path == "/v1/responses":
        (only,) = only["content"]
    return str(only["text"])


def _streamed_text(path: str, stream: str) -> str:
    lines = [line.removeprefix("data:").strip() for line in stream.split("\n") if line.startswith("data:")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if path == "/v1/responses":
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    if path == "/v1/messages":
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return "".join(delta["text"] for delta in deltas)
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)

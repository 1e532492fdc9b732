"""Chat over HTTP: streams, answers, models, and clear errors for what is wrong."""

import json

import httpx
import openai
import pytest

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "Where does the wind come from?"}]
BODY = {"model": MODEL, "messages": QUESTION, "max_tokens": 8}


@pytest.fixture(scope="module")
def http(scripted):
    with scripted.http as client:
        yield client


def test_an_answer_comes_with_its_usage(scripted):
    answer = scripted.openai.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_stream_brings_the_same_text_as_an_answer(scripted):
    whole = scripted.openai.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40, temperature=0)
    events = list(
        scripted.openai.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    assert len([event for event in events if event.choices and event.choices[0].delta.content]) > 3
    assert events[-1].usage.completion_tokens == 40


def test_the_second_turn_finds_the_first_one_in_the_store(scripted):
    long = "Tell me about the sea. " * 60
    first = scripted.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": long}], max_tokens=8
    )
    turns = [
        {"role": "user", "content": long},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And the wind?"},
    ]
    second = scripted.openai.chat.completions.create(model=MODEL, messages=turns, max_tokens=8)
    full_blocks = first.usage.prompt_tokens // 128 * 128
    assert full_blocks >= 256
    assert second.usage.prompt_tokens_details.cached_tokens >= full_blocks


def test_the_curl_that_is_printed_works(scripted, http):
    body = next(line.split("-d '")[1].rstrip("'\n") for line in scripted.lines if line.lstrip().startswith("-d '"))
    with http.stream("POST", "/v1/chat/completions", json={**json.loads(body), "max_tokens": 4}) as response:
        events = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]"


def test_the_receipt_comes_when_asked(http):
    answer = http.post("/v1/chat/completions", json=BODY, headers={"x-shoal-receipt": "1"})
    assert json.loads(answer.headers["x-shoal-receipt"])["outcome"] == "finished"


def test_models_are_listed_and_found(scripted):
    assert [model.id for model in scripted.openai.models.list()] == [MODEL]
    assert scripted.openai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        scripted.openai.models.retrieve("no-such-model")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{broken", 400, ["JSON"]),
        (b"[]", 400, []),
        ({**BODY, "messages": "hello"}, 400, ["messages"]),
        ({**BODY, "temperature": "hot"}, 400, ["temperature"]),
        ({**BODY, "model": "no-such-model"}, 404, ["no-such-model"]),
        ({**BODY, "messages": []}, 400, ["messages"]),
        ({**BODY, "messages": [{"role": "user", "content": "word " * 20_000}]}, 400, ["8192", "2"]),
        ({**BODY, "max_tokens": 0}, 400, ["max_tokens"]),
        ({**BODY, "max_tokens": -3}, 400, ["max_tokens"]),
        ({**BODY, "messages": [{"role": "wizard", "content": "hi"}]}, 400, ["role"]),
    ],
)
def test_what_is_wrong_is_told_in_the_shape_of_the_api(http, body, status, words):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    told = f"{error['message']} {error['param']}"
    assert [word for word in words if word not in told] == []


def test_a_body_over_the_limit_is_refused(http):
    message = {"role": "user", "content": "x" * 9_000_000}
    answer = http.post("/v1/chat/completions", json={**BODY, "messages": [message]})
    assert answer.status_code == 413
    assert "message" in answer.json()["error"]


def test_unknown_paths_and_methods_answer_in_json(http):
    assert http.get("/v1/no-such-thing").status_code == 404
    assert http.get("/v1/chat/completions").status_code == 405
    assert http.get("/v1/no-such-thing").json()["error"]["message"]


def test_it_is_ready_and_tells_its_metrics(http):
    assert http.get("/healthz").status_code == httpx.codes.OK
    assert http.get("/readyz").json()["is_ready"] is True
    assert "shoal_gateway" in http.get("/metrics").text


def test_nothing_of_all_this_was_an_error_in_a_log(scripted):
    assert scripted.errors() == []

"""What is read from the lines of one streamed answer."""

import json

import httpx
import pytest

from shoal_local.answer import (
    AnswerFailed,
    StreamedAnswer,
    client_options,
    failure_of_response,
    failure_of_transport,
    served_model,
)


def an_event(content=None, finish_reason=None, usage=None):
    choices = [] if usage else [{"index": 0, "delta": {"content": content}, "finish_reason": finish_reason}]
    return "data: " + json.dumps({"choices": choices, "usage": usage})


USAGE = {"prompt_tokens": 300, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 256}}


@pytest.fixture
def clock():
    """Moves on by a second each time it is read."""
    seconds = iter(range(1000))
    return lambda: float(next(seconds))


def test_text_usage_and_times(clock):
    answer = StreamedAnswer(clock)
    added = [answer.take(line) for line in (an_event(""), "", ": alive", an_event("two "), an_event("words"))]
    assert added == ["", "", "", "two ", "words"]
    answer.take(an_event(finish_reason="stop"))
    answer.take(an_event(usage=USAGE))
    answer.take("data: [DONE]")
    answer.close()
    assert (answer.text, answer.finish_reason) == ("two words", "stop")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (300, 256, 5)
    assert (answer.ttft_s, answer.token_s) == (1.0, 0.25)  # the clock was read at the start and for each text


def test_what_was_not_told_is_unknown(clock):
    answer = StreamedAnswer(clock)
    assert (answer.ttft_s, answer.token_s, answer.prompt_tokens, answer.cached_tokens) == (None,) * 4


def test_a_stream_that_ends_early_is_no_answer(clock):
    answer = StreamedAnswer(clock)
    answer.take(an_event("half"))
    with pytest.raises(AnswerFailed, match="broke off") as raised:
        answer.close()
    assert raised.value.kind == "cut_off"


def test_an_error_within_the_stream_is_an_error(clock):
    with pytest.raises(AnswerFailed, match="every worker is lost") as raised:
        StreamedAnswer(clock).take('data: {"error": {"message": "every worker is lost", "code": "unavailable"}}')
    assert "shoal status" in raised.value.advice


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (b'{"error": {"message": "full", "code": "overloaded"}}', "overloaded", "full"),
        (b'{"error": {"message": "no", "code": null, "type": "server_error"}}', "server_error", "no"),
        (b"<html>nginx</html>", "http_502", "Is it a Shoal gateway?"),
        (b"[]", "http_502", "Is it a Shoal gateway?"),
    ],
)  # fmt: skip
def test_whatever_a_server_answers_is_told(content, kind, said):
    failure = failure_of_response(502, content)
    assert failure.kind == kind
    assert said in str(failure)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ConnectError("x"), "no_connection"),
        (httpx.ConnectTimeout("x"), "no_connection"),
        (httpx.ReadTimeout("x"), "silent"),
        (httpx.RemoteProtocolError("x"), "cut_off"),
    ],
)
def test_failures_of_the_connection_have_few_kinds(error, kind):
    assert failure_of_transport(error, "http://h").kind == kind


def test_a_proxy_for_the_outside_does_not_see_loopback():
    assert not client_options("http://127.0.0.1:8000")["trust_env"]
    assert client_options("http://gpu-7:8000")["trust_env"]


def test_the_served_model():
    assert served_model(httpx.Response(200, json={"data": [{"id": "tiny"}]})) == "tiny"
    with pytest.raises(AnswerFailed, match="no decode worker"):
        served_model(httpx.Response(200, json={"data": []}))
    with pytest.raises(AnswerFailed, match="Is it a Shoal gateway"):
        served_model(httpx.Response(404, content=b"nothing here"))


@pytest.mark.parametrize("line", ["data: <html>", 'data: {"choices": [{}]}', 'data: ["no", "event"]'])
def test_what_speaks_another_language_is_told_as_such(clock, line):
    with pytest.raises(AnswerFailed, match="speaks no Chat Completions"):
        StreamedAnswer(clock).take(line)


@pytest.mark.parametrize("page", ["<html>hello</html>", "[]", '{"data": 1}'])
def test_a_page_that_lists_no_models_is_no_gateway(page):
    with pytest.raises(AnswerFailed, match="no Shoal gateway"):
        served_model(httpx.Response(200, text=page))

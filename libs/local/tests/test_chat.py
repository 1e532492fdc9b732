"""A conversation grows by what was answered; each turn tells its cost."""

import json

import httpx
import pytest

from shoal_local.answer import AnswerFailed, StreamedAnswer
from shoal_local.chat import ChatOptions, Conversation, cost, harmless

USAGE = {"prompt_tokens": 2498, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2432}}


def a_stream(*texts, is_done=True):
    events = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in texts]
    events.append({"choices": [], "usage": USAGE})
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join(lines) + ("data: [DONE]\n\n" if is_done else "")


@pytest.fixture
def gateway():
    """Answers with what stands in ``replies``, and keeps what it was asked."""

    class Gateway:
        def __init__(self):
            self.asked, self.replies = [], []

        def handle(self, request):
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "tiny"}]})
            self.asked.append(json.loads(request.content))
            return self.replies.pop(0)

        def converse(self, **options):
            http = httpx.Client(transport=httpx.MockTransport(self.handle), base_url="http://gateway")
            return Conversation.open(http, ChatOptions(url="http://gateway", **options))

    return Gateway()


def a_reply(*texts, **options):
    return httpx.Response(200, content=a_stream(*texts, **options))


def messages(request):
    return [(message["role"], message["content"]) for message in request["messages"]]


def test_each_turn_carries_the_history(gateway):
    gateway.replies = [a_reply("good ", "day"), a_reply("again")]
    conversation, shown = gateway.converse(system="be kind"), []
    conversation.ask("hello", shown.append)
    conversation.ask("and now?", shown.append)
    assert shown == ["good ", "day", "again"]
    assert messages(gateway.asked[1]) == [
        ("system", "be kind"),
        ("user", "hello"),
        ("assistant", "good day"),
        ("user", "and now?"),
    ]


def test_the_request_asks_for_its_usage_and_takes_the_options(gateway):
    gateway.replies = [a_reply("x")]
    gateway.converse(max_tokens=7, temperature=0.0).ask("hello", str)
    [body] = gateway.asked
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 7, 0.0)


def test_what_was_not_asked_for_is_left_to_the_server(gateway):
    gateway.replies = [a_reply("x")]
    gateway.converse(model="named").ask("hello", str)
    assert gateway.asked[0]["model"] == "named"
    assert "temperature" not in gateway.asked[0]


def test_a_refused_turn_is_not_part_of_the_history(gateway):
    refusal = {"error": {"message": "queues are full", "code": "overloaded"}}
    gateway.replies = [httpx.Response(503, json=refusal), a_reply("fine")]
    conversation = gateway.converse()
    with pytest.raises(AnswerFailed, match="queues are full"):
        conversation.ask("hello", str)
    conversation.ask("hello again", str)
    assert messages(gateway.asked[1]) == [("user", "hello again")]


def test_of_an_answer_that_was_stopped_the_seen_part_stays(gateway):
    def stop(text):
        if text == "end":
            raise KeyboardInterrupt

    gateway.replies = [a_reply("one ", "end", "never seen")]
    conversation = gateway.converse()
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("hello", stop)
    assert conversation.messages[-1] == {"role": "assistant", "content": "one end"}


def test_an_answer_that_breaks_off_is_told(gateway):
    gateway.replies = [a_reply("half", is_done=False)]
    with pytest.raises(AnswerFailed, match="broke off"):
        gateway.converse().ask("hello", str)


def test_the_cost_of_a_turn():
    seconds = iter([0.0, 1.12, 1.32])
    answer = StreamedAnswer(lambda: next(seconds))
    for line in a_stream("a", "b").splitlines():
        answer.take(line)
    answer.finish_reason = "length"
    assert cost(answer) == (
        "2,498 tokens in, 2,432 of them cached (97.4 %) · first token after 1.12 s · 3 out, 10.0 a second"
        " · cut short by --max-tokens"
    )


def test_the_cost_of_an_answer_without_usage():
    assert cost(StreamedAnswer(lambda: 0.0)) == ""


def test_what_a_model_writes_cannot_steer_the_terminal_and_loses_no_letter():
    assert harmless("10\u202f000 \u00a0 👩\u200d🔬\n\tok") == "10\u202f000 \u00a0 👩\u200d🔬\n\tok"
    assert harmless("a\x1b[2Jb\rc\x9bd") == "a[2Jbcd"

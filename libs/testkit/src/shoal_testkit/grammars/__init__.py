"""What a stream of each API may say: one checker an API, for every stream that a test gets."""

from shoal_testkit.grammars.chat_completions import check_chat_stream
from shoal_testkit.grammars.events import Event, GrammarBroken
from shoal_testkit.grammars.messages import check_messages_stream
from shoal_testkit.grammars.responses import check_responses_stream

__all__ = ["Event", "GrammarBroken", "check_stream"]

_CHECKERS = {
    "/v1/chat/completions": check_chat_stream,
    "/v1/completions": check_chat_stream,
    "/v1/messages": check_messages_stream,
    "/v1/responses": check_responses_stream,
}


def check_stream(path: str, raw: bytes) -> Event:
    """What the stream came to: see the checker of its API. GrammarBroken says what is wrong."""
    return _CHECKERS[path](raw)

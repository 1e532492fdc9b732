"""``except Exception`` stands only where somebody else's work ends: at the boundary of a request, a message or a task.

Anywhere else it hides a bug from the one place that would have told it (docs/decisions/0015).
"""

import ast
from collections.abc import Iterator

# file -> whose boundary it is. What is caught there is logged as an error, counted, and answered with a typed failure.
BOUNDARIES = {
    "libs/runtime/src/shoal_runtime/grpc.py": "one RPC that we serve",
    "libs/runtime/src/shoal_runtime/nats.py": "one message that we receive",
    "libs/runtime/src/shoal_runtime/process.py": "the whole process, to choose its exit code",
    "libs/runtime/src/shoal_runtime/streams.py": "one reply handed to its receiver",
    "libs/runtime/src/shoal_runtime/tasks.py": "one background task",
    "services/decode/src/shoal_decode/token_stream.py": "one placed request",
    "services/gateway/src/shoal_gateway/api/endpoint.py": "one HTTP request",
    "services/tokenizer/src/shoal_tokenizer/format.py": "one stream among those of a connection",
}


def broad_handlers(source: str) -> Iterator[int]:
    """Lines of handlers that catch everything and do not raise it again."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            is_broad = any(kind is None or ast.unparse(kind) in {"Exception", "BaseException"} for kind in caught)
            if is_broad and not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None):
                yield node.lineno


def test_everything_is_caught_only_at_a_boundary(repository):
    found = {repository.name(path) for path in repository.shipped() if list(broad_handlers(path.read_text()))}
    assert sorted(found - set(BOUNDARIES)) == []
    assert sorted(set(BOUNDARIES) - found) == [], "no longer needed"


def test_broad_handlers_are_seen():
    source = (
        "try: pass\nexcept Exception: pass\nexcept BaseException:\n f()\n raise\nexcept (OSError, Exception): f()\n"
    )
    assert list(broad_handlers(source)) == [2, 6]
    assert list(broad_handlers("try: pass\nexcept: pass\n")) == [2]
    assert list(broad_handlers("try: pass\nexcept OSError: pass\n")) == []

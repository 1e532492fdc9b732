"""One question to a process over HTTP, for container health checks: ``python -m shoal_runtime.probe URL``.

Exit code 0 when it answers 200, 1 when not, and one line that says what it answered. An image needs no other program
for it, and the standard library alone keeps it at a tenth of a second of processor time.
"""

import sys
from collections.abc import Sequence
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

TIMEOUT_S = 60.0  # the caller's own limit is shorter; a gateway's answer is a request through every stage
MAX_LINE = 400


def probe(url: str, *, timeout_s: float = TIMEOUT_S) -> tuple[bool, str]:
    """Whether GET ``url`` answers 200, and what it said."""
    opener = build_opener(ProxyHandler({}))  # a proxy that is set for the outside must not see this
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return answer.status == 200, _line(answer.status, answer.read(MAX_LINE))
    except HTTPError as refusal:
        return False, _line(refusal.code, refusal.read(MAX_LINE))
    except URLError as failure:
        return False, f"{url} does not answer: {failure.reason}"
    except (OSError, HTTPException, ValueError) as failure:
        return False, f"{url} does not answer: {str(failure) or type(failure).__name__}"


def _line(status: int, body: bytes) -> str:
    return " ".join(f"{status} {body.decode(errors='replace')}".split())[:MAX_LINE]


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    if len(arguments) != 1:
        print("usage: python -m shoal_runtime.probe URL")
        return 1
    is_fine, said = probe(arguments[0])
    print(said)
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

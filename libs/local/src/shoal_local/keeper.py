"""Ends what a supervisor started when the supervisor itself dies without a word (kill -9, out of memory).

``python -m shoal_local.keeper <home>`` runs beside each supervisor, in a session of its own, and reads its standard
input: the word DONE means an orderly stop; the end of the input without it means that the supervisor is gone.
"""

import signal
import sys
from contextlib import suppress
from pathlib import Path

from shoal_local.home import AlreadyRunning, Home

DONE = "done"


def main() -> None:
    """Wait for the supervisor's end; signals are ignored, because this process must outlive it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.readline().strip() == DONE:
        return
    home = Home(Path(sys.argv[1]))
    # Held by somebody else: the next `shoal up` or `shoal down` came first and cleans up itself.
    with suppress(AlreadyRunning), home.hold():
        home.end_leftovers()


if __name__ == "__main__":
    main()

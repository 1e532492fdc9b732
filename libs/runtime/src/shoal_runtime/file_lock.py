"""A lock between processes of one machine that nobody has to give back: the kernel does, however they end."""

import fcntl
from typing import IO


def try_lock(file: IO[str]) -> bool:
    """Take the exclusive lock of an open file, which the kernel gives back when the file closes; False: it is held."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

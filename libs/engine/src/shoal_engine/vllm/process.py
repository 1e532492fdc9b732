"""What must be true inside every process of vLLM; vLLM calls ``prepare_process`` in each, early, as its plugin.

Two repairs. vLLM's engine process outlives a parent that was killed and keeps its memory and its cores: here it
watches its parent and leaves. And vLLM looks for kernels by asking every attribute of every module for its
``__dict__``, which llvmlite's library object answers with a C function: here it answers no.
"""

import atexit
import multiprocessing
import os
import signal
import threading
from multiprocessing.process import BaseProcess
from typing import Any

ORDERLY_EXIT_S = 5.0


def prepare_process() -> None:
    """Safe to call in any process of vLLM; the first call counts."""
    _quiet_llvmlite()
    parent = multiprocessing.parent_process()
    if parent is not None:
        atexit.register(os._exit, 0)
        threading.Thread(target=_leave_with, args=(parent,), name="shoal-parent-watch", daemon=True).start()


def _leave_with(parent: BaseProcess) -> None:
    parent.join()
    # First as vLLM would be asked to: the store forgets this engine at once and frees what it had locked.
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(ORDERLY_EXIT_S)
    os._exit(1)


def _quiet_llvmlite() -> None:
    try:
        from llvmlite.binding import ffi
    except ImportError:
        return  # not installed: nothing can ask it
    wrapper = ffi._lib_wrapper
    find_function = wrapper.__getattr__

    def find_unless_special(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find_function(self, name)

    wrapper.__getattr__ = find_unless_special

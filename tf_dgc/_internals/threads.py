"""Threads that may have to be started while the interpreter ends."""

import threading
from collections.abc import Callable
from typing import Any


def run_beside(call: Callable[[], Any], name: str) -> None:
    """Call in a daemon thread; in this one where none can be started.

    While the interpreter ends, Python 3.12 starts no thread any more.
    """
    try:
        threading.Thread(target=call, name=name, daemon=True).start()
    except RuntimeError:
        call()

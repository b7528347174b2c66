"""Remote workers, of which only the ssh process is visible here."""

import signal
import subprocess
from collections.abc import Callable, Mapping

from tf_dgc.multiworker.launch import remote
from tf_dgc.multiworker.launch.worker_processes import CHILDREN_SECONDS, wait_until

_BROKEN = 255  # ssh's exit code when its connection breaks
_KILLED = -signal.SIGTERM, -signal.SIGKILL  # of ssh itself, not of the worker


def wait_for_remote_workers(
    workers: Mapping[str, subprocess.Popen[bytes]],
    say: Callable[[str], None],
    hurry: Callable[[], bool],
) -> None:
    """Wait for remote workers whose ssh ended before them.

    Their input has ended too, after which they have a limited time. If an ssh did not
    end in time and was killed, its worker's state is unknown.

    Args:
        workers: processes that have ended, by name; those with an input are ssh's.
        say: function that shows a line to the user.
        hurry: function that is called repeatedly, and ends the wait by returning true.
    """
    codes = {name: w.returncode for name, w in workers.items() if w.stdin}
    for name in [name for name, code in codes.items() if code in _KILLED]:
        say(f"{name} may be running yet, as its machine does not tell that it ended")
    broken = [name for name, code in codes.items() if code == _BROKEN]
    if broken:
        seconds = remote.INTERRUPT_SECONDS + CHILDREN_SECONDS
        names = " and ".join(broken)
        say(f"waiting {seconds:g} s for {names} to end, if only the connection broke")
        wait_until(hurry, seconds)

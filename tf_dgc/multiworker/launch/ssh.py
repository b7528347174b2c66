"""Far ends: workers on other machines, of which only their ssh is seen here."""

import signal
import subprocess
from collections.abc import Callable, Mapping

from tf_dgc.multiworker.launch import remote
from tf_dgc.multiworker.launch.worker_processes import CHILDREN_SECONDS, wait_until

_BROKEN = 255  # ssh's exit code when its connection ends before what it runs
_KILLED = -signal.SIGTERM, -signal.SIGKILL  # ssh itself, not what it runs


def wait_for_remote_workers(
    workers: Mapping[str, "subprocess.Popen[bytes]"],
    say: Callable[[str], None],
    hurry: Callable[[], bool],
) -> None:
    """Wait until workers have ended whose ssh ended before them.

    Their input has ended by that, from where on they have a time of their own. Of those
    whose ssh did not end in time, and had to be killed, nothing is known.

    Args:
        workers: processes that have ended, by name; those with an input are ssh's.
        say: function that is given lines for the user.
        hurry: function that is asked again and again, whether to wait no longer.
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

"""How much other processes slow this one down, by Linux's scheduler statistics."""

import os
import pathlib
import time

_TASKS = pathlib.Path("/proc/self/task")
_MIN_SHARE = 0.05  # of the processors; what others use below it slows nothing down


class Load:
    """Measures the load of the machine from its creation on."""

    def __init__(self) -> None:
        self._threads = _thread_times()
        self._begin, self._own = time.perf_counter(), time.process_time()
        self._all = _busy_seconds()

    def slowdown(self) -> float:
        """Return the factor by which other processes lengthened this one's work.

        It is the time for which threads ran or waited for a processor, divided by the
        time for which they ran; 1 if other processes were idle, or on other systems.
        """
        elapsed = time.perf_counter() - self._begin
        others = _busy_seconds() - self._all - (time.process_time() - self._own)
        if others < _MIN_SHARE * elapsed * (os.cpu_count() or 1):
            return 1.0
        ran = waited = 0.0
        for thread, (thread_ran, thread_waited) in _thread_times().items():
            before = self._threads.get(thread, (0.0, 0.0))
            ran += thread_ran - before[0]
            waited += thread_waited - before[1]
        return 1.0 + waited / ran if ran else 1.0


def _thread_times() -> dict[str, tuple[float, float]]:
    """Return for how long each thread ran, and waited for a processor, in ns."""
    times = {}
    for task in _TASKS.glob("*/schedstat"):
        try:
            ran, waited, _ = task.read_text().split()
        except (OSError, ValueError):  # the thread has ended
            continue
        times[task.parent.name] = float(ran), float(waited)
    return times


def _busy_seconds() -> float:
    """Return the seconds for which all processors were busy since the system began."""
    try:
        fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, soft_irq, steal = map(float, fields[:8])
    ticks = user + nice + system + irq + soft_irq + steal
    return ticks / os.sysconf("SC_CLK_TCK")

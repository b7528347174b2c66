"""The clock: which pushes become a step, and which workers may go on."""

import math
from collections.abc import Iterable
from typing import Any


class Clock:
    """Counts the pushes of each worker, and bounds how far one may be ahead.

    Args:
        staleness: number of completed steps that a worker may be ahead of the slowest
            one; 0 makes the pushes of all workers of one clock one step; infinity lets
            nobody wait.
        quorum: number of pushes that make a step, of those that were computed by the
            same weights; all of them if there are fewer workers. None for a step of
            each push, or of all, by `staleness`.

    Attributes:
        completed: number of pushes of each worker that takes part, by index, counted
            from where the slowest was as it joined.
        most_ahead: most completed steps that any worker began one ahead of the slowest.
    """

    def __init__(self, staleness: float, quorum: int | None = None):
        self.staleness, self.quorum = staleness, quorum
        self.completed: dict[int, int] = {}
        self.most_ahead = 0
        self._pending: list[int] = []

    @classmethod
    def of_settings(cls, settings: dict[str, Any]) -> "Clock":
        """Return the clock of a mode.

        Args:
            settings: "mode", "staleness" and "quorum" of an optimizer.

        Raises:
            ValueError: for a mode that there is not.
        """
        found = {
            "sync": (0, None),
            "async": (math.inf, None),
            "ssp": (settings["staleness"], None),
            "backup": (math.inf, settings["quorum"]),
        }
        if settings["mode"] not in found:
            raise ValueError(f"there is no mode {settings['mode']!r}")
        return cls(*found[settings["mode"]])

    @property
    def workers(self) -> list[int]:
        """Indices of the workers that take part, ascending."""
        return sorted(self.completed)

    def join(self, worker: int) -> None:
        """Let a worker take part, from where the slowest one is.

        A push of it that was left behind, and is not yet applied, is its next one.
        """
        slowest = min(self.completed.values(), default=0)
        self.completed[worker] = slowest + (worker in self._pending)

    def leave(self, worker: int) -> None:
        """Let a worker take part no longer; a push of it that came counts."""
        self.completed.pop(worker, None)

    def push(self, worker: int) -> None:
        """Count a push."""
        self.completed[worker] += 1
        self._pending.append(worker)

    def due(self) -> list[list[int]]:
        """Return which pushes are to be applied now, each list as one step.

        In the order in which they came; those of one step by the workers' indices.
        """
        if self.quorum is None and self.staleness > 0:
            found = [[worker] for worker in self._pending]
        elif self._pending and self._is_full():
            found = [sorted(self._pending)]
        else:
            return []
        self._pending = []
        return found

    def _is_full(self) -> bool:
        if self.quorum is None:
            return not set(self.completed) - set(self._pending)
        return len(self._pending) >= min(self.quorum, len(self.completed))

    def may_go_on(self, worker: int) -> bool:
        """Whether a worker may begin its next step."""
        return worker not in self._pending and self._ahead(worker) <= self.staleness

    def go_on(self, worker: int) -> None:
        """Note that a worker begins its next step."""
        self.most_ahead = max(self.most_ahead, self._ahead(worker))

    def waited_for(self, worker: int) -> list[int]:
        """Return for which workers one waits, ascending."""
        if self.may_go_on(worker):
            return []
        if worker in self._pending:
            return sorted(set(self.completed) - set(self._pending))
        slowest = self.completed[worker] - self.staleness
        return sorted(w for w, done in self.completed.items() if done < slowest)

    def _ahead(self, worker: int) -> int:
        return self.completed.get(worker, 0) - min(self.completed.values(), default=0)


def names(workers: Iterable[int]) -> str:
    """Return workers as errors name them."""
    return " and ".join(f"worker {worker}" for worker in workers) or "nobody"

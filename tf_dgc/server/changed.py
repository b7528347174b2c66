"""Which entries a worker may lack, as far as that is known."""

from collections.abc import Sequence

import numpy as np

_SHARE = 1 / 16
"""Of a model's entries, of which it is still quicker to have a list than to look."""


class Changed:
    """Entries that pushes have changed since one worker was sent them.

    Args:
        sizes: number of entries of each tensor; 0 for those that always come whole.
    """

    def __init__(self, sizes: Sequence[int]):
        self._most = _SHARE * sum(sizes)
        self._sizes = sizes
        self.clear()

    def clear(self) -> None:
        """Note that the worker lacks nothing."""
        self._known = True
        self._number = 0
        self._parts: list[list[np.ndarray]] = [[] for _ in self._sizes]

    def add(self, touched: Sequence[np.ndarray] | None) -> None:
        """Note which entries may have changed.

        Args:
            touched: positions of each tensor, int32 `[m]`, in any order and more than
                once if so; None if it may be any.
        """
        if not self._known:
            return
        if touched is None:
            self._forget()
            return
        for i, (size, positions) in enumerate(zip(self._sizes, touched, strict=True)):
            if size:
                self.keep(i, positions)
        if self._number > self._most:
            self._count_once()

    def _count_once(self) -> None:
        for i, positions in enumerate(self._distinct()):
            self._parts[i] = [positions]
        self._number = sum(len(positions) for (positions,) in self._parts)
        if self._number > self._most / 2:  # else pushes would have to be sorted often
            self._forget()

    def _distinct(self) -> list[np.ndarray]:
        none = np.zeros([0], np.int32)
        return [np.unique(np.concatenate([none, *parts])) for parts in self._parts]

    def keep(self, index: int, positions: np.ndarray) -> None:
        """Note entries of one tensor."""
        self._parts[index].append(positions)
        self._number += len(positions)

    def _forget(self) -> None:
        self.clear()
        self._known = False

    def take(self) -> list[np.ndarray] | None:
        """Return all of them, of each tensor ascending and once, and note none.

        None if it may be any, which is then still noted.
        """
        if not self._known:
            return None
        found = self._distinct()
        self.clear()
        return found

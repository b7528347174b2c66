"""Admission: who may take part. All must hand over the same."""

from typing import Any

import numpy as np

from tf_dgc._versions import tf_dgc_version
from tf_dgc.server import checking, handing
from tf_dgc.server.beginnings import Restored
from tf_dgc.server.handing import Handed
from tf_dgc.server.messages import brief

_SAME = (
    "All workers must run the same version of tf_dgc, with the same model and settings"
)


class Admission:
    """Compares what workers hand over.

    Args:
        num_workers: number of workers, N.
        shard: index of this server, and number of servers.

    Attributes:
        num_workers: number of workers, N.
        handed: description that the first worker handed over; None before it has.
        restored: checkpoint that the first worker is to go on from; None for none.
    """

    def __init__(self, num_workers: int, shard: tuple[int, int] = (0, 1)):
        self.handed: Handed | None = None
        self.restored: Restored | None = None
        self.num_workers, self._shard = num_workers, shard

    def read(self, body: np.ndarray, late: bool) -> tuple[Any, int, str | None]:
        """Return what a worker hands over, its steps, and why it cannot be, or None.

        Args:
            body: words of it, int32 `[w]`.
            late: whether others have begun; then a learning rate may be another one, as
                callbacks change it.
        """
        handed = None
        try:
            handed = checking.read(body)
            steps = max(0, int(handed.pop("steps", 0)))
            return handed, steps, self._why_not(handed, late)
        except Exception as error:  # it may be anything
            return handed, 0, f"it cannot be read ({brief(error)})"

    def _why_not(self, handed: Handed, late: bool) -> str | None:
        different = self._differs(handed, late)
        if different is not None:
            return f"{different}. {_SAME}"
        if self.handed is None and self.restored is not None:
            return self.restored.difference(handed)
        return None

    def _differs(self, handed: Handed, late: bool) -> str | None:
        version = tf_dgc_version()
        if handed["version"] != version:
            return (
                f"version is {handed['version']!r}, and the server is tf_dgc "
                f"{version!r}"
            )
        if handed["num_workers"] != self.num_workers:
            return (
                f"num_workers is {handed['num_workers']}, and the server's TF_CONFIG "
                f"names {self.num_workers}"
            )
        if handed["shard"] != list(self._shard):
            here, there = self._shard, handed["shard"]
            return (
                f"it is for server {there[0]} of {there[1]}, and by its own TF_CONFIG "
                f"this one is server {here[0]} of {here[1]}"
            )
        if self.handed is None:
            checking.check(handed)
            return None
        return handing.difference(self.handed, handed, rates=not late)

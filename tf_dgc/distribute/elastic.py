"""Elastic restart: what N workers saved, divided among M."""

import numpy as np

RULES = ("sum", "mean", "largest", "zero")


def share(values: np.ndarray, worker: int, num_workers: int, rule: str) -> np.ndarray:
    """Return what one worker gets of what all workers saved.

    With as many workers as saved it, each gets its own back, bit for bit. Otherwise
    all get the same:

    - `"sum"`: the total divided by the number of workers, which keeps the total, to
      rounding of one division. For what adds up over workers.
    - `"mean"`: the mean. For what is of the same size whatever the number of workers.
    - `"largest"`: the largest, entry by entry. For what only grows, or fades.
    - `"zero"`: zeros, as before the first step. For what nobody else can go on with.

    Args:
        values: values of all workers that saved, `[N, ...]`.
        worker: index of this worker, 0 to `num_workers - 1`.
        num_workers: number of workers there are now.
        rule: name of the rule, one of `RULES`.

    Returns:
        `[...]`, of the same dtype.
    """
    if len(values) == num_workers:
        return values[worker]
    if rule == "zero":
        return np.zeros_like(values[0])
    if rule == "largest":
        return values.max(axis=0)
    total = values.sum(axis=0, dtype=np.float64)
    divisor = num_workers if rule == "sum" else len(values)
    return np.asarray(total / divisor, values.dtype)

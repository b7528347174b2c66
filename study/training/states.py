"""Values of variables on all workers, as arrays that can be saved."""

import keras
import numpy as np


def get_values(variables):
    """Return the values of variables, with one row if all workers have the same.

    Args:
        variables: Keras variables; `set_values` needs the same order.

    Returns:
        A dictionary of arrays, `[1, ...]` or `[workers, ...]`.
    """
    return {f"variable{i}": _deduplicate(values(v)) for i, v in enumerate(variables)}


def set_values(variables, state):
    """Assign the result of `get_values`."""
    for i, variable in enumerate(variables):
        per_worker, rows = _per_worker_variables(variable), state[f"variable{i}"]
        if len(rows) == 1:
            rows = [rows[0]] * len(per_worker)
        for worker_variable, value in zip(per_worker, rows, strict=True):
            worker_variable.assign(value)


def values(variable):
    """Return a variable's values on all workers; one row for an ordinary variable."""
    return np.stack([v.numpy() for v in _per_worker_variables(variable)])


def _per_worker_variables(variable):
    inner = variable.value if isinstance(variable, keras.Variable) else variable
    return getattr(inner, "values", None) or [inner]


def _deduplicate(rows):
    """Return a single row if all are bitwise equal."""
    equal = all(value.tobytes() == rows[0].tobytes() for value in rows)
    return rows[:1] if equal else rows

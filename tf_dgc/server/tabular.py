"""Which variables are tables, of which rows travel, and what they need."""

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_optimizers, row_rules
from tf_dgc.arguments import show

_ROWS = (
    "plain SGD or Adagrad, without weight decay of that variable, of which one step "
    "changes no other rows than the gradient has"
)


def check_settings(
    names: Any,
    inner: keras.optimizers.Optimizer,
    mode: str,
    correction: str | None,
) -> list[str]:
    """Return the names of tables.

    Args:
        names: regular expressions; or None, for no tables.
        inner: inner optimizer, as it was passed.
        mode: way in which workers wait for each other.
        correction: correction for staleness, or None.

    Raises:
        ValueError: unless they are texts, or for settings that do not go with rows.
    """
    if not names:
        return []
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            "`rows` must be a list of texts, of which one has to be found in a "
            'variable\'s path, for example `["embeddings"]`. Received: '
            f"rows={show(names)}"
        )
    if not row_rules.knows(inner):
        raise ValueError(
            f"`rows` needs {_ROWS}; momentum goes on with all of them. Use another "
            "inner optimizer, or no `rows`: then gradients go as those of other "
            f"variables. Received: {type(inner).__name__} with "
            f"momentum={getattr(inner, 'momentum', None)}"
        )
    if mode == "backup" or correction == "delay":
        raise ValueError(
            "Rows are sent whole, and nothing is kept of them: so there is no residual "
            'for what comes too late with mode "backup", and none of the copies that '
            '`correction="delay"` compares. Use another mode or correction, or no '
            f"`rows`. Received: mode={show(mode)}, correction={show(correction)}"
        )
    return list(names)


def find(
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    rule: keras.optimizers.Optimizer,
) -> list[bool]:
    """Return whether each variable is a table.

    Args:
        names: regular expressions, of which one has to be found in its path.
        variables: variables of the model.
        rule: inner optimizer.

    Raises:
        ValueError: if one is found nowhere, or what is found cannot be a table.
    """
    found = [any(re.search(n, v.path) for n in names) for v in variables]
    for name in names:
        if not any(re.search(name, v.path) for v in variables):
            raise ValueError(
                "`rows` names variables of the model, by a part of their paths. "
                f"Received: {show(name)}, which is in none of "
                f"{[v.path for v in variables]}"
            )
    for v in [v for v, is_table in zip(variables, found, strict=True) if is_table]:
        decays = rule.weight_decay and keras_optimizers.uses_weight_decay(rule, v.value)
        if len(v.shape) < 2 or decays:
            raise ValueError(
                f"`rows` is for variables of rank 2 or more, and needs {_ROWS} "
                "(`exclude_from_weight_decay`). Received: a variable "
                f"{v.path} of shape {tuple(v.shape)}, weight_decay={rule.weight_decay}"
            )
    return found


def check_gradients(
    grads: Sequence[Any],
    variables: Sequence[keras.Variable],
    tabular: Sequence[bool],
) -> None:
    """Raise `ValueError` unless the gradients of tables have rows.

    Args:
        grads: gradients of the variables.
        variables: variables of the model.
        tabular: whether each is a table.
    """
    for g, v, is_table in zip(grads, variables, tabular, strict=True):
        if is_table and not isinstance(g, tf.IndexedSlices):
            raise ValueError(
                "`rows` is for variables that are looked up and nothing else, as by "
                "`keras.layers.Embedding` without a regularizer; of others all rows "
                f"have a gradient. Leave it out. Received: variable {v.path} with "
                f"gradient {show(g)}"
            )

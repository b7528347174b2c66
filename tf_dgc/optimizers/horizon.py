"""Deep Gradient Compression with settings for the length of a run."""

from typing import Any

import keras

from tf_dgc import schedules
from tf_dgc.arguments import check_steps
from tf_dgc.inner import takeover
from tf_dgc.optimizers.dgc import DGCOptimizer

_EARLY_SPARSITY = 0.75  # that of the first stage of the paper's warm-up
_MOST_EARLY_STEPS = 100  # what was measured at the most; they cost long runs little


def dgc_for_steps(inner: Any, steps: int, **settings: Any) -> DGCOptimizer:
    """Return `DGCOptimizer` for a run of so many steps.

    The paper's settings are for tens of thousands of steps. In a few hundred of them
    most of what waits never reaches the model, and masking takes the momentum from
    entries that are sent often. Here the sparsity is that of `schedules.for_steps`, the
    velocity is not masked, and values are sent in 4 bits, those of small tensors in 8
    (`value_dtype="mxfp4"`, `exempt_dtype="mxint8"`), which pays for most of it.

    With an `SGD` it is 75 % for the first twentieth of the steps, for 100 at the most:
    weights move far in them, and what waits would point where they no longer are. For
    one sparsity from the first step to the last pass
    `sparsity=schedules.for_steps(steps)`, as it is with all other optimizers.

    >>> sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    >>> optimizer = tf_dgc.dgc_for_steps(sgd, epochs * steps_per_epoch)

    Args:
        inner: a `keras.optimizers.Optimizer`, as for `DGCOptimizer`.
        steps: number of steps of `fit` in which the model is trained. Of an `inner`
            that accumulates the gradients of several, one in so many counts.
        **settings: arguments of `DGCOptimizer`, also in place of these.

    Raises:
        ValueError: if `steps` is not whole or below 1, as of a data set whose length is
            unknown, and as `DGCOptimizer`.
    """
    steps = check_steps("steps", steps)
    inner = takeover.get_inner(inner)
    calls = inner.gradient_accumulation_steps or 1
    usual = {
        "sparsity": _sparsity(inner, max(1, steps // calls)),
        "factor_masking": False,
        "value_dtype": "mxfp4",
        "exempt_dtype": "mxint8",
    }
    return DGCOptimizer(inner, **{**usual, **settings})


def _sparsity(
    inner: keras.optimizers.Optimizer, steps: int
) -> float | schedules.SparsitySchedule:
    """Return the sparsity of a run of so many steps of the optimizer."""
    last = schedules.for_steps(steps)
    if not isinstance(inner, keras.optimizers.SGD) or last <= _EARLY_SPARSITY:
        return last
    early = min(steps // 20, _MOST_EARLY_STEPS)
    return schedules.WarmupSparsity(early, last, stages=[_EARLY_SPARSITY])

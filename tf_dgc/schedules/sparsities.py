"""Schedules of the sparsity."""

import abc
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import (
    check_sparsity,
    check_steps,
    is_whole,
    show,
    unknown_length,
)
from tf_dgc.schedules.base import Schedule, as_list, check_boundaries, stage


class SparsitySchedule(Schedule):
    """Sparsity by iteration, in the manner of Keras learning-rate schedules.

    Subclasses implement `__call__` and `get_config`, and are made loadable with
    `keras.saving.register_keras_serializable`.
    """

    @abc.abstractmethod
    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, a scalar in [0, 1), at a scalar integer iteration."""

    @property
    def smallest(self) -> float:
        """The least sparsity there may be.

        XLA makes room for as many entries. A step that goes dense at none is traced
        without that, and takes no longer than by a number. At a value below it the
        step ends with an error.
        """
        return 0.0

    @property
    def final(self) -> float | None:
        """The sparsity it comes to; None for what it begins with.

        By it follows how much of an Adam's momentum is left beside waiting, and what
        `exchange="auto"` chooses.
        """
        return None


@keras.saving.register_keras_serializable(package="tf_dgc")
class PiecewiseConstantSparsity(SparsitySchedule):
    """`values[i]` while `boundaries[i-1] <= iteration < boundaries[i]`.

    Args:
        boundaries: ascending iterations, one fewer than `values`.
        values: sparsities in [0, 1).

    Raises:
        ValueError: for lengths, order or values other than that.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[float]):
        self.boundaries = check_boundaries(boundaries, values)
        self.values = [check_sparsity(v, "values") for v in values]

    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, scalar float64."""
        return tf.gather(tf.constant(self.values, tf.float64), stage(self, iteration))

    @property
    def smallest(self) -> float:
        """The least of `values`."""
        return min(self.values)

    @property
    def final(self) -> float:
        """The last of `values`."""
        return self.values[-1]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"boundaries": self.boundaries, "values": self.values}


@keras.saving.register_keras_serializable(package="tf_dgc")
class WarmupSparsity(SparsitySchedule):
    """The paper's warm-up: 75 %, 93.75 %, 98.4375 %, 99.6 %, then the final sparsity.

    For fewer than 15,000 steps use `tf_dgc.dgc_for_steps`.

    Args:
        warmup_steps: iterations until the final sparsity is reached, shared evenly
            among the stages (the paper takes 4 epochs, one per stage).
        final_sparsity: sparsity afterwards, in [0, 1); default 0.999.
        stages: sparsities before, in [0, 1); the default is the paper's.

    Raises:
        ValueError: if `warmup_steps` is not whole or below 1, there are no stages, or a
            sparsity is not in [0, 1).

    Example:
        >>> sparsity = WarmupSparsity(warmup_steps=4 * steps_per_epoch)
        >>> DGCOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), sparsity=sparsity)
    """

    def __init__(
        self,
        warmup_steps: int,
        final_sparsity: float = 0.999,
        stages: Sequence[float] = (0.75, 0.9375, 0.984375, 0.996),
    ):
        there = len(as_list(stages)) > 0
        if not is_whole(warmup_steps) or warmup_steps < 1 or not there:
            raise ValueError(
                "`warmup_steps` must be a whole number of iterations, 1 or more, and "
                "`stages` at least one sparsity. Without warm-up, pass the sparsity "
                f"itself, for example `DGCOptimizer(inner, {final_sparsity})`"
                f"{unknown_length(warmup_steps)}. "
                f"Received: warmup_steps={show(warmup_steps)}, stages={show(stages)}"
            )
        self.warmup_steps = int(warmup_steps)
        self.final_sparsity = check_sparsity(final_sparsity, "final_sparsity")
        self.stages = [check_sparsity(s, "stages") for s in stages]
        ends = [
            math.ceil(self.warmup_steps * (i + 1) / len(self.stages))
            for i in range(len(self.stages))
        ]
        self._piecewise = PiecewiseConstantSparsity(
            ends, [*self.stages, self.final_sparsity]
        )

    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, scalar float64."""
        return self._piecewise(iteration)

    @property
    def smallest(self) -> float:
        """The least of all stages."""
        return self._piecewise.smallest

    @property
    def final(self) -> float:
        """The final sparsity."""
        return self.final_sparsity

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "warmup_steps": self.warmup_steps,
            "final_sparsity": self.final_sparsity,
            "stages": self.stages,
        }


def for_steps(steps: int) -> float:
    """Return the sparsity by which an entry is sent 15 times in a run, on average.

    What is not sent in time never reaches the model. It is `1 - 15 / steps`, 75 % at
    the least and 99.9 %, that of 15,000 steps and more, at the most.

    Args:
        steps: number of steps of the optimizer in which a model is trained, 1 or more;
            with `gradient_accumulation_steps` those are fewer than those of `fit`.
    """
    density = 15 / check_steps("steps", steps)
    return 1 - min(0.25, max(0.001, density))

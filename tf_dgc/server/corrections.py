"""Corrections for staleness: what a push of old weights counts."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_dgc._internals import learning_rates
from tf_dgc.steps.base import Outcome

STRENGTH = 0.04
"""Lambda of DC-ASGD-c on CIFAR-10 (Zheng et al., ICML 2017, section 6.1)."""


class ByRate:
    """Divides the learning rate of a push by its age (Zhang et al., IJCAI 2016, eq. 6).

    A push is a gradient divided by N, so its rate is multiplied by N / (age + 1): that
    of workers of one speed, each of which is N - 1 updates old, is left as it is.

    Args:
        optimizer: inner optimizer of the server, not yet built.
        num_workers: number of workers, N.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, num_workers: int):
        self._num_workers = num_workers
        self._factor = tf.Variable(1.0, trainable=False)
        self._rate = learning_rates.scale_rate(optimizer, self._factor)

    @property
    def rate(self) -> float:
        """Learning rate before it is divided."""
        return float(self._rate())

    def set_rate(self, rate: float) -> None:
        """Set the learning rate, which no schedule has then."""
        variable = self._rate()
        assert isinstance(variable, keras.Variable)
        variable.assign(rate)

    def restore(self, rate: float) -> None:
        """Set the learning rate, unless it has a schedule."""
        if isinstance(self._rate(), keras.Variable):
            self.set_rate(rate)

    def begin(self, age: int) -> None:
        """Make the next step one of a push of that age, in updates."""
        self._factor.assign(self._num_workers / (age + 1))


class Compensation:
    """Moves a gradient to the weights of now (DC-ASGD, Zheng et al., ICML 2017).

    `g + strength * g * g * (weights - weights that the worker had)` (eq. 10), for which
    it keeps a copy of the model for each worker; of what a push does not have, nothing.

    Args:
        variables: variables of the server.
        strength: lambda of the paper.
        num_workers: number of workers, N, by which a push is divided.
    """

    def __init__(
        self, variables: Sequence[keras.Variable], strength: float, num_workers: int
    ):
        self._variables = variables
        self._factor = strength * num_workers
        self._had: dict[int, list[tf.Variable]] = {}

    def note(self, worker: int) -> None:
        """Note that a worker is given the weights as they are."""
        now = [tf.convert_to_tensor(v.value) for v in self._variables]
        if worker not in self._had:
            self._had[worker] = [tf.Variable(w, trainable=False) for w in now]
        for variable, weights in zip(self._had[worker], now, strict=True):
            variable.assign(weights)

    def forget(self, worker: int) -> None:
        """Forget what a worker has, which is gone."""
        self._had.pop(worker, None)

    def apply(self, outcome: Outcome, worker: int) -> Outcome:
        """Return the outcome of a push, moved.

        Args:
            outcome: outcome of it alone.
            worker: index of the worker that it is from.
        """
        had = self._had[worker]

        def decode() -> tuple[list[tf.Tensor], tf.Tensor]:
            sums, nonfinite = outcome.decode()
            every = zip(sums, self._variables, had, strict=True)
            return [self._moved(*of_one) for of_one in every], nonfinite

        return Outcome(decode, 0, 0)

    def _moved(
        self, pushed: tf.Tensor, variable: keras.Variable, had: tf.Variable
    ) -> tf.Tensor:
        pushed = tf.reshape(pushed, had.shape)
        moved = tf.cast(tf.convert_to_tensor(variable.value) - had, pushed.dtype)
        return pushed + tf.cast(self._factor, pushed.dtype) * pushed * pushed * moved

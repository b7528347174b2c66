"""What an optimizer that steps alone remembers, and how a worker begins it anew."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import ages, optimizer_copies
from tf_dgc.distribute.copies import Copies
from tf_dgc.transforms import clipping


class InnerState:
    """Slots of the inner optimizer: momentum, second moments, waiting gradients.

    Iterations and the learning rate are not among them, as schedules go by these; but
    bias corrections go by the age of the slots (`_internals/ages.py`).

    Args:
        optimizer: inner optimizer, built, before its first step. Its slots begin with
            one number each, or as copies of the weights, as those of Keras do.
        variables: variables of the model.
        strategy: strategy under which it was built.

    Raises:
        ValueError: for slots that begin in another way.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
        strategy: tf.distribute.Strategy,
    ):
        self._optimizer, self._strategy = optimizer, strategy
        scalars = optimizer.iterations, optimizer.learning_rate
        apart = {id(v) for v in scalars}
        slots = [
            v
            for v in optimizer.variables
            if id(v) not in apart
            and tf.as_dtype(v.dtype).is_floating
            and optimizer_copies.was_added_by(optimizer, v)
        ]
        self._slots = slots
        self._copies = self._find_copies(variables)
        copied = {id(slot) for slot, _ in self._copies}
        others = [slot for slot in slots if id(slot) not in copied]
        self._first = [(slot, self._number_of(slot)) for slot in others]

    def begin_anew_unless_finite(
        self, moved: Sequence[tf.Tensor], natively: bool
    ) -> tf.Tensor:
        """Let this replica forget its state if that, or its weights, hold NaN or Inf.

        Call it in replica context, on the replica's own copies; and behind it, when the
        replica has the weights it goes on with, `copy_weights`.

        Args:
            moved: distance of its weights from where they were, of each tensor.
            natively: whether all workers have the native operations.

        Returns:
            Whether it did, scalar bool.
        """
        kept = [tf.convert_to_tensor(v.value) for v in self._slots]

        def begin_anew() -> tf.Tensor:
            for slot, first in self._first:
                slot.assign(tf.fill(slot.shape, tf.cast(first, slot.dtype)))
            ages.begin_anew(self._optimizer)
            return tf.constant(True)

        finite = clipping.all_finite([*moved, *kept], natively)
        return tf.cond(finite, lambda: tf.constant(False), begin_anew)

    def copy_weights(self, wanted: tf.Tensor) -> None:
        """Let slots that begin as copies of weights be that; in replica context.

        Args:
            wanted: whether to do so, scalar bool, as `begin_anew_unless_finite` said.
        """
        if not self._copies:
            return

        def copy() -> tf.Tensor:
            for slot, variable in self._copies:
                slot.assign(tf.cast(tf.convert_to_tensor(variable.value), slot.dtype))
            return tf.constant(True)

        tf.cond(wanted, copy, lambda: tf.constant(False))

    def _find_copies(
        self, variables: Sequence[keras.Variable]
    ) -> list[tuple[keras.Variable, keras.Variable]]:
        """Return the slots that begin as copies of weights, and whose they are."""
        weights = [self._read(v) for v in variables]

        def are_copies(slots: list[keras.Variable]) -> bool:
            pairs = list(zip(map(self._read, slots), weights, strict=True))
            some = any(not _is_one_number(value) for value, _ in pairs)
            return some and all(np.array_equal(value, w) for value, w in pairs)

        lists = ages.lists_of_slots(self._optimizer, len(variables))
        copied = [slots for slots in lists if are_copies(slots)]
        return [pair for slots in copied for pair in zip(slots, variables, strict=True)]

    def _number_of(self, slot: keras.Variable) -> float:
        values = self._read(slot)
        if not _is_one_number(values):
            raise ValueError(
                "A worker whose inner state is lost begins with a new one, so what the "
                "inner optimizer remembers must begin with one number per variable, or "
                "as copies of the model's variables. Pass another. Received: "
                f"{type(self._optimizer).__name__}, of which {slot.path} begins "
                "with others"
            )
        return float(values.reshape(-1)[0]) if values.size else 0.0

    def _read(self, variable: keras.Variable) -> np.ndarray:
        with tf.init_scope():  # the first call may come while a step is being traced
            return Copies(self._strategy, variable.value).local[0].numpy()


def _is_one_number(values: np.ndarray) -> bool:
    return values.size == 0 or bool(np.all(values == values.reshape(-1)[0]))

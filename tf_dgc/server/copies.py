"""What workers have of the server's variables, by which sparse pulls are chosen."""

import functools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.codecs import wire
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.codecs.wire import Selection
from tf_dgc.compressors import top_k
from tf_dgc.compressors.common.one_round import to_words
from tf_dgc.server.changed import Changed
from tf_dgc.server.pulls import Form, take


class Copies:
    """What the workers have of the server's variables.

    Where a rule changes only what was pushed, what a worker may lack is known without
    a look at the model; else the two are compared.

    Args:
        variables: variables of the server.
        form: form of the pulls.
    """

    def __init__(self, variables: Sequence[keras.Variable], form: Form):
        self._variables, self._form = variables, form
        self._of: dict[int, list[keras.Variable]] = {}
        self._changed: dict[int, Changed] = {}
        self._compared: dict[int, Callable] = {}
        self._sent: dict[int, Callable] = {}

    def reset(self, worker: int) -> None:
        """Note that a worker has been given all weights."""
        if worker in self._of:
            for copy, variable in zip(self._of[worker], self._variables, strict=True):
                copy.assign(variable.value)
            self._changed[worker].clear()
            return
        now = [tf.convert_to_tensor(v.value) for v in self._variables]
        copies = [keras.Variable(w, trainable=False) for w in now]
        signature = [[tf.TensorSpec([k], tf.int32) for k in self._counts]]
        self._of[worker] = copies
        self._changed[worker] = Changed(self._sizes)
        self._compared[worker] = tf.function(lambda: self._compare(copies))
        send = functools.partial(self._send, copies)
        self._sent[worker] = tf.function(send, input_signature=signature)

    @property
    def _counts(self) -> list[int]:
        """Entries of each tensor that are chosen: none of exempt ones."""
        pairs = zip(*self._form, strict=True)
        return [0 if tensor.exempt else k for tensor, k in pairs]

    @property
    def _sizes(self) -> list[int]:
        return [0 if t.exempt else t.size for t in self._form.layout]

    def note(self, touched: Sequence[np.ndarray] | None) -> None:
        """Note which entries an update may have changed.

        Args:
            touched: positions of each tensor, int32 `[m]`, which may come more than
                once; those of exempt ones are not needed. None if it may be any.
        """
        for changed in self._changed.values():
            changed.add(touched)

    def forget(self, worker: int) -> None:
        """Forget what a worker has, which is gone."""
        for kept in (self._of, self._changed, self._compared, self._sent):
            kept.pop(worker, None)

    def pull(self, worker: int) -> tf.Tensor:
        """Return what a worker is sent, which it has then, int32 `[num_words]`."""
        changed = self._changed[worker]
        candidates = changed.take()
        if candidates is None:
            words, is_left = self._compared[worker]()
            if not is_left:
                changed.clear()
            return words
        chosen = []
        every = zip(self._counts, candidates, self._variables, strict=True)
        for i, (k, found, variable) in enumerate(every):
            if len(found) > k:
                distance = np.abs(_behind(variable, self._of[worker][i], found).numpy())
                order = np.argpartition(distance, len(found) - k)
                changed.keep(i, found[order[: len(found) - k]])
                chosen.append(np.sort(found[order[len(found) - k :]]))
            else:
                chosen.append(_filled(found, k))
        return self._sent[worker]([tf.constant(c, tf.int32) for c in chosen])

    def _compare(self, copies: Sequence[keras.Variable]) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the pull of what differs most, and whether more may differ."""
        chosen, is_left = [], tf.constant(False)
        every = zip(*self._form, self._variables, copies, strict=True)
        for tensor, k, variable, copy in every:
            if tensor.exempt:
                chosen.append(tf.zeros([0], tf.int32))
                continue
            weights, had = (tf.cast(_flat(v), tensor.dtype) for v in (variable, copy))
            distances = weights - had
            positions, _ = top_k(distances, k, tf.constant(0))
            is_left = tf.logical_or(is_left, tf.math.count_nonzero(distances) > k)
            chosen.append(positions)
        return self._send(copies, chosen), is_left

    def _send(
        self, copies: Sequence[keras.Variable], positions: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Return the pull of these positions, and put them into the worker's copy."""
        layout, counts = self._form
        every = zip(layout, self._variables, positions, strict=True)
        sent = [_select(*of_one) for of_one in every]
        words = wire.encode(layout, counts, sent, tf.constant(True))
        take(self._form, copies, words)
        return words


def _select(
    tensor: Tensor, variable: keras.Variable, positions: tf.Tensor
) -> Selection:
    weights = _flat(variable)
    if tensor.exempt:
        return Selection(None, to_words(tf.cast(weights, tensor.dtype)))
    found = tf.cast(tf.gather(weights, positions), tensor.dtype)
    return Selection(positions, to_words(found))


def _flat(variable: keras.Variable) -> tf.Tensor:
    return tf.reshape(tf.convert_to_tensor(variable.value), [-1])


def _behind(
    variable: keras.Variable, copy: keras.Variable, positions: np.ndarray
) -> tf.Tensor:
    """Return how far a worker's copy is from the weights at some positions."""
    return tf.gather(_flat(variable), positions) - tf.gather(_flat(copy), positions)


def _filled(positions: np.ndarray, k: int) -> np.ndarray:
    """Return ascending positions and the first others, k in all."""
    others = np.setdiff1d(np.arange(k, dtype=np.int32), positions, assume_unique=True)
    return np.sort(np.concatenate([positions, others[: k - len(positions)]]))

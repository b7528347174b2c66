"""LAQ: send a quantized difference, and only if it is large enough."""

from collections.abc import Generator
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number, check_whole, show
from tf_dgc.collectives.requests import Aggregation, AllGather, Request, Result
from tf_dgc.compressors.base import NativeMethod, RandomKeys, StateSpec
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import (
    MethodStates,
    RoundsResult,
    TwoRounds,
    from_words,
    only_if,
    sum_decoded,
    to_words,
)


@keras.saving.register_keras_serializable(package="tf_dgc")
class LAQ(TwoRounds):
    """Lazily aggregated quantized gradients: workers with little news send nothing.

    Sun et al. Each worker m remembers what it uploaded last, q_m, and all
    know the sum of these, which is the estimate of the gradient. In every step:

    - *Quantize* (section 2.1): with `R = |g - q_m|_inf` and `tau = 1 / (2^bits - 1)`,
      the innovation is `delta_m = 2 tau R floor((g - q_m + R) / (2 tau R) + 1/2) - R`,
      entry by entry; of `e_m = g - q_m - delta_m` none is above `tau R`.
    - *Skip* (equation 7, section 2.2) if `|delta_m|^2` is at most
      `sum over d of xi_d |theta_k+1-d - theta_k-d|^2 / (alpha N)^2
      + 3 (|e_m|^2 + |e_m at the last upload|^2)`, and fewer than `patience` steps were
      skipped since the last upload. In the first step all upload.
    - Else `q_m += delta_m`, and the sum gets delta_m too.

    The method sees no weights and no learning rate alpha. It needs neither: weights of
    the paper's gradient descent move by `alpha * estimate`, so alpha cancels, and the
    threshold is `sum over d of xi_d |estimate_k-d|^2 / N^2`, of estimates that all
    know. With another inner optimizer, or a learning rate that changes, that is the
    rule; it no longer equals the paper's. The rule is applied to each tensor by itself,
    the paper's to all weights as one vector. `xi_d = xi / memory` for all d.

    Two rounds. First each worker says how much it has to tell: one word, the root of
    `|delta_m|^2 - 3 (...)`, or the largest number if it must upload. Everyone compares
    all of them with the threshold. Then, if any worker uploads, all hand over R and
    `bits` per entry (zeros, if they skip: a collective takes as much from everyone); if
    all skip, nothing. A skipped step costs 4 bytes per tensor, any other
    `4 + 4 ceil(bits n / 32)` (to whole words) more. The gradient is not kept back: what
    is not sent now is part of the next difference, so there is no error feedback.

    The paper's levels are even in number, so none of them is 0: an entry of which
    nothing is new becomes `tau R` in its direction, up or down. So rows without a
    gradient, such as those of an embedding that no batch looked up, move by up to
    `tau R` of their tensor in every step.

    Args:
        bits: number of bits b per entry, 1 to 16. The 4 that are enough for logistic
            regression stop the training of networks: where few entries are large, `3
            |e_m|^2` is always more than `|delta_m|^2`, and nothing is sent until
            patience ends.
        xi: sum of the weights xi_d; 0 skips only what quantization would drown. Well
            above 1 so much is skipped that training can diverge.
        memory: number D of estimates that the threshold is made of.
        patience: largest number of steps in a row that may be skipped, t_bar.
    """

    name = "laq"
    kind = "difference"
    reference = "Sun et al., LAQ, NeurIPS 2019"
    error_feedback = "forbidden"

    def __init__(
        self, bits: int = 8, xi: float = 0.8, memory: int = 10, patience: int = 100
    ):
        self.bits = check_whole("bits", bits)
        self.memory = check_whole("memory", memory)
        self.patience = check_whole("patience", patience, 0)
        if self.bits > 16:
            raise ValueError(f"`bits` must be at most 16. Received: bits={show(bits)}")
        self.xi = check_number("xi", xi, "[0, inf)")

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return what is uploaded, its sum and past lengths, and what the rule needs.

        `error` is the length of e_m at the last upload, `may_skip` the number of steps.
        Both begin anew with another number of workers, so that all upload at once.
        """
        return {
            "uploaded": StateSpec(shape),
            "uploaded_sum": StateSpec(shape, per_worker=False),
            "lengths": StateSpec((self.memory,), per_worker=False),
            "error": StateSpec((), elastic="zero"),
            "may_skip": StateSpec((), elastic="zero"),
        }

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> None:
        """Return None: it depends on who skips."""
        del shape, dtype

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Quantize the difference, agree on who uploads, and gather what they do."""
        del keys
        uploaded = state["uploaded"]
        words = self._encode(tf.reshape(values - uploaded, [-1]))
        delta = self._decode(words, values)
        error = _length(values - uploaded - delta)
        excess = _excess(_length(delta), error, state["error"])
        forced = state["may_skip"] < 0.5
        news = tf.where(forced, tf.float32.max, excess)
        mine, anyone = yield from self._decide(news, state["lengths"])
        sent = words * tf.cast(mine, tf.int32)
        gathered = yield AllGather(only_if(anyone, sent))
        total = state["uploaded_sum"] + self._sum(gathered, tf.size(words), values)
        moved = tf.where(mine, uploaded + delta, uploaded)
        changes = {
            "uploaded": moved,
            "uploaded_sum": total,
            "lengths": tf.concat([_length(total)[None], state["lengths"][:-1]], 0),
            **self._after(mine, error, state["error"], state["may_skip"]),
        }
        entries = tf.cast(mine, tf.int32) * tf.size(values)
        return Result(total, moved, changes, entries)

    def _after(
        self,
        mine: tf.Tensor,
        error: tf.Tensor,
        last_error: tf.Tensor,
        may_skip: tf.Tensor,
    ) -> dict[str, tf.Tensor]:
        """Return what the rule needs in the next step."""
        left = tf.maximum(may_skip - 1, 0)
        return {
            "error": tf.where(mine, error, last_error),
            "may_skip": tf.where(mine, tf.cast(self.patience, left.dtype), left),
        }

    def _decide(
        self, news: tf.Tensor, lengths: tf.Tensor
    ) -> Generator[Request, tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
        """Return whether this worker uploads, and whether any does."""
        gathered = yield AllGather(to_words(news[tf.newaxis]))
        everyone = from_words(gathered, tf.float32, [-1])
        limit = self._limit(lengths, gathered.shape[0])
        return news > limit, tf.reduce_any(everyone > limit)

    def _limit(self, lengths: tf.Tensor, num_workers: int) -> tf.Tensor:
        """Return what news must exceed, a scalar float32."""
        largest = tf.reduce_max(lengths)
        shares = tf.math.divide_no_nan(lengths, largest)
        mean = tf.sqrt(self.xi * tf.reduce_mean(tf.square(shares)))
        limit = mean / num_workers * largest
        return tf.cast(tf.minimum(limit, tf.float32.max / 2), tf.float32)

    def _encode(self, difference: tf.Tensor) -> tf.Tensor:
        """Return R, then codes."""
        radius = tf.reduce_max(tf.abs(difference))
        unit = tf.math.divide_no_nan(difference, radius)
        top = 2**self.bits - 1
        codes = tf.cast(tf.floor((unit + 1) * (top / 2) + 0.5), tf.int32)
        packed = quantize.pack(tf.clip_by_value(codes, 0, top), self.bits)
        return tf.concat([to_words(radius[tf.newaxis]), packed], axis=0)

    def _decode(self, words: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        """Return delta, of the shape and dtype of `like`; zeros for zeros."""
        split = like.dtype.size // 4
        radius = from_words(words[:split], like.dtype, [])
        codes = quantize.unpack(words[split:], self.bits, like.shape.num_elements())
        unit = tf.cast(codes, like.dtype) * (2 / (2**self.bits - 1)) - 1
        return radius * tf.reshape(unit, like.shape)

    def _sum(self, gathered: tf.Tensor, size: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        """Return the sum of deltas; of no words at all, too."""
        missing = size - tf.shape(gathered)[1]
        return sum_decoded(
            tf.pad(gathered, [[0, 0], [0, missing]]),
            lambda words: self._decode(words, like),
            like.shape,
            like.dtype,
        )

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method; a first one finds what is new."""
        del shape
        return NativeMethod(
            self.name,
            [self.bits],
            ["uploaded"],
            shared=["uploaded_sum"],
            first=f"{self.name}, news",
            num_words=1,
            num_notes=3,
        )

    def told_first(self, states: MethodStates) -> tf.Tensor:
        """Return the error at the last upload, and whether to upload in any case."""
        error = tf.stack([s["error"].local() for s in states])
        left = tf.stack([s["may_skip"].local() for s in states])
        return tf.stack([error, tf.cast(left < 0.5, tf.float32)], axis=1)

    def told_then(
        self, everyone: tf.Tensor, notes: tf.Tensor, states: MethodStates
    ) -> tf.Tensor:
        """Return whether this worker uploads, whether any does, and its radius."""
        num_workers = everyone.shape[1]
        limits = tf.stack(
            [self._limit(s["lengths"].local(), num_workers) for s in states]
        )
        news = tf.bitcast(everyone[:, :, 0], tf.float32)
        mine = tf.cast(notes[:, 2] > limits, tf.float32)
        anyone = tf.reduce_any(news > limits[:, tf.newaxis], axis=1)
        return tf.stack([mine, tf.cast(anyone, tf.float32), notes[:, 0]], axis=1)

    def settle(
        self, ended: RoundsResult, states: MethodStates
    ) -> list[dict[str, tf.Tensor]]:
        """Return lengths, errors and the steps that may be skipped."""
        return [
            {
                "lengths": tf.concat([norm, state["lengths"].local()[:-1]], 0),
                **self._after(
                    uploads > 0.5,
                    *(error, state["error"].local(), state["may_skip"].local()),
                ),
            }
            for norm, uploads, error, state in zip(
                tf.split(ended.norms, len(states)),
                tf.unstack(ended.told[:, 0]),
                tf.unstack(ended.notes[:, 1]),
                states,
                strict=True,
            )
        ]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "bits": self.bits,
            "xi": self.xi,
            "memory": self.memory,
            "patience": self.patience,
        }


def _length(values: tf.Tensor) -> tf.Tensor:
    """Return the norm, or the largest number if larger."""
    return quantize.norms(tf.reshape(values, [1, -1]))[0, 0]


def _excess(delta: tf.Tensor, error: tf.Tensor, last_error: tf.Tensor) -> tf.Tensor:
    """Return the root of `delta^2 - 3 (error^2 + last_error^2)`, or 0; in float32."""
    of_error, of_last = (tf.math.divide_no_nan(e, delta) for e in (error, last_error))
    share = 1 - 3 * (tf.square(of_error) + tf.square(of_last))
    excess = delta * tf.sqrt(tf.maximum(share, 0))
    return tf.cast(tf.minimum(excess, tf.float32.max), tf.float32)

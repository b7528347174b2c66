"""LAQ: quantized differences, sent only if they are large enough."""

from collections.abc import Generator
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number, check_whole, show
from tf_dgc.codecs.bits import to_words
from tf_dgc.collectives.requests import Aggregation, AllGather, Result, TensorRequest
from tf_dgc.compressors.base import NativeMethod, StateSpec
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import (
    MethodStates,
    RoundsResult,
    TwoRounds,
    from_words,
    only_if,
    sum_decoded,
)
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class LAQ(TwoRounds):
    """Lazily aggregated quantized gradients: workers with small changes send nothing.

    Sun et al. Each worker m keeps its last uploaded gradient q_m, and all workers keep
    the sum of these, the estimate of the gradient. In every step:

    1. *Quantize* (section 2.1): with `R = |g - q_m|_inf` and `tau = 1 / (2^bits - 1)`,
       the innovation is `delta_m = 2 tau R floor((g - q_m + R) / (2 tau R) + 1/2) - R`,
       entry by entry. No entry of the error `e_m = g - q_m - delta_m` exceeds `tau R`.
    2. *Skip* (equation 7, section 2.2) if `|delta_m|^2` is at most
       `sum over d of xi_d |theta_k+1-d - theta_k-d|^2 / (alpha N)^2
       + 3 (|e_m|^2 + |e_m at the last upload|^2)`, and fewer than `patience` steps were
       skipped since the last upload. In the first step all workers upload.
    3. Otherwise *upload*: delta_m is added to q_m and to the sum.

    The method needs neither weights nor the learning rate alpha: in the paper's
    gradient descent weights change by `alpha * estimate`, so alpha cancels, and the
    threshold is `sum over d of xi_d |estimate_k-d|^2 / N^2`, of estimates that all
    workers have. With another inner optimizer or a changing learning rate that rule
    still applies, but differs from the paper's. It applies to each tensor by itself, in
    the paper to all weights as one vector. `xi_d = xi / memory` for all d.

    The method has two rounds. In the first each worker sends one word, the root of
    `|delta_m|^2 - 3 (...)`, or the largest number if it must upload, and all compare
    these with the threshold. In the second, if any worker uploads, each sends R and
    `bits` per entry (zeros if it skips: a collective needs as much from all workers). A
    skipped step costs 4 bytes per tensor, any other `4 + 4 ceil(bits n / 32)` (in whole
    words) more. There is no error feedback, as values that are not sent are part of the
    next difference.

    The paper has an even number of levels, so none of them is 0: an unchanged entry
    becomes `tau R` or `-tau R`. So weights without a gradient, such as embedding rows
    that no batch looked up, change by up to `tau R` of their tensor in every step.

    Args:
        bits: number of bits b per entry, 1 to 16. 4 bits are enough for logistic
            regression, but stop the training of networks: if few entries are large, `3
            |e_m|^2` always exceeds `|delta_m|^2`, and nothing is sent until `patience`
            ends.
        xi: sum of the weights xi_d; 0 skips only changes smaller than the quantization
            error. Well above 1 so much is skipped that training can diverge.
        memory: number D of estimates in the threshold.
        patience: largest number of consecutive skipped steps, t_bar.
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
        """Return q_m, the sum of all q_m, its past norms, and the skip rule's state.

        `error` is the norm of e_m at the last upload, `may_skip` the number of steps
        that may still be skipped. With another number of workers both restart at 0, so
        that all workers upload.
        """
        return {
            "uploaded": StateSpec(shape),
            "uploaded_sum": StateSpec(shape, per_worker=False),
            "lengths": StateSpec((self.memory,), per_worker=False),
            "error": StateSpec((), rescaling="zero"),
            "may_skip": StateSpec((), rescaling="zero"),
        }

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> None:
        """Return None, as it depends on which workers skip."""
        del shape, dtype

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Quantize the difference, decide who uploads, and gather the uploads."""
        del keys
        uploaded = state["uploaded"]
        words = self._encode(tf.reshape(values - uploaded, [-1]))
        delta = self._decode(words, values)
        error = _norm(values - uploaded - delta)
        excess = _excess(_norm(delta), error, state["error"])
        must_upload = state["may_skip"] < 0.5
        news = tf.where(must_upload, tf.float32.max, excess)
        uploads, any_uploads = yield from self._decide(news, state["lengths"])
        payload = words * tf.cast(uploads, tf.int32)
        gathered = yield AllGather(only_if(any_uploads, payload))
        total = state["uploaded_sum"] + self._sum(gathered, tf.size(words), values)
        sent = tf.where(uploads, uploaded + delta, uploaded)
        new_state = {
            "uploaded": sent,
            "uploaded_sum": total,
            "lengths": tf.concat([_norm(total)[None], state["lengths"][:-1]], 0),
            **self._update_rule(uploads, error, state["error"], state["may_skip"]),
        }
        entries = tf.cast(uploads, tf.int32) * tf.size(values)
        return Result(total, sent, new_state, entries)

    def _update_rule(
        self,
        uploads: tf.Tensor,
        error: tf.Tensor,
        last_error: tf.Tensor,
        may_skip: tf.Tensor,
    ) -> dict[str, tf.Tensor]:
        """Return the new state of the skip rule."""
        remaining = tf.maximum(may_skip - 1, 0)
        patience = tf.cast(self.patience, remaining.dtype)
        return {
            "error": tf.where(uploads, error, last_error),
            "may_skip": tf.where(uploads, patience, remaining),
        }

    def _decide(
        self, news: tf.Tensor, lengths: tf.Tensor
    ) -> Generator[TensorRequest, tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
        """Return whether this worker uploads, and whether any does."""
        gathered = yield AllGather(to_words(news[tf.newaxis]))
        news_by_worker = from_words(gathered, tf.float32, [-1])
        limit = self._limit(lengths, gathered.shape[0])
        return news > limit, tf.reduce_any(news_by_worker > limit)

    def _limit(self, lengths: tf.Tensor, num_workers: int) -> tf.Tensor:
        """Return the threshold of a worker's news, a scalar float32."""
        largest = tf.reduce_max(lengths)
        shares = tf.math.divide_no_nan(lengths, largest)
        mean = tf.sqrt(self.xi * tf.reduce_mean(tf.square(shares)))
        limit = mean / num_workers * largest
        return tf.cast(tf.minimum(limit, tf.float32.max / 2), tf.float32)

    def _encode(self, difference: tf.Tensor) -> tf.Tensor:
        """Return the words of R and of the codes."""
        radius = tf.reduce_max(tf.abs(difference))
        unit = tf.math.divide_no_nan(difference, radius)
        top = 2**self.bits - 1
        codes = tf.cast(tf.floor((unit + 1) * (top / 2) + 0.5), tf.int32)
        packed = quantize.pack(tf.clip_by_value(codes, 0, top), self.bits)
        return tf.concat([to_words(radius[tf.newaxis]), packed], axis=0)

    def _decode(self, words: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        """Return delta, of the shape and dtype of `like`; 0 for words of 0."""
        split = like.dtype.size // 4
        radius = from_words(words[:split], like.dtype, [])
        codes = quantize.unpack(words[split:], self.bits, like.shape.num_elements())
        unit = tf.cast(codes, like.dtype) * (2 / (2**self.bits - 1)) - 1
        return radius * tf.reshape(unit, like.shape)

    def _sum(self, gathered: tf.Tensor, size: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        """Return the sum of deltas, 0 if no words were gathered."""
        missing = size - tf.shape(gathered)[1]
        return sum_decoded(
            tf.pad(gathered, [[0, 0], [0, missing]]),
            lambda words: self._decode(words, like),
            like.shape,
            like.dtype,
        )

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method; its first round computes the news."""
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

    def first_parameters(self, states: MethodStates) -> tf.Tensor:
        """Return the error at the last upload, and whether the worker must upload."""
        error = tf.stack([s["error"].local() for s in states])
        may_skip = tf.stack([s["may_skip"].local() for s in states])
        return tf.stack([error, tf.cast(may_skip < 0.5, tf.float32)], axis=1)

    def second_parameters(
        self, gathered: tf.Tensor, notes: tf.Tensor, states: MethodStates
    ) -> tf.Tensor:
        """Return whether this worker uploads, whether any does, and its R."""
        num_workers = gathered.shape[1]
        limits = tf.stack(
            [self._limit(s["lengths"].local(), num_workers) for s in states]
        )
        news = tf.bitcast(gathered[:, :, 0], tf.float32)
        uploads = tf.cast(notes[:, 2] > limits, tf.float32)
        any_uploads = tf.reduce_any(news > limits[:, tf.newaxis], axis=1)
        any_uploads = tf.cast(any_uploads, tf.float32)
        return tf.stack([uploads, any_uploads, notes[:, 0]], axis=1)

    def updated_states(
        self, rounds: RoundsResult, states: MethodStates
    ) -> list[dict[str, tf.Tensor]]:
        """Return past norms, errors and the steps that may be skipped."""
        return [
            {
                "lengths": tf.concat([norm, state["lengths"].local()[:-1]], 0),
                **self._update_rule(
                    uploads > 0.5,
                    error,
                    state["error"].local(),
                    state["may_skip"].local(),
                ),
            }
            for norm, uploads, error, state in zip(
                tf.split(rounds.norms, len(states)),
                tf.unstack(rounds.parameters[:, 0]),
                tf.unstack(rounds.notes[:, 1]),
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


def _norm(values: tf.Tensor) -> tf.Tensor:
    """Return the norm, at most the largest number."""
    return quantize.norms(tf.reshape(values, [1, -1]))[0, 0]


def _excess(delta: tf.Tensor, error: tf.Tensor, last_error: tf.Tensor) -> tf.Tensor:
    """Return the root of `delta^2 - 3 (error^2 + last_error^2)`, or 0, as float32."""
    error = tf.math.divide_no_nan(error, delta)
    last_error = tf.math.divide_no_nan(last_error, delta)
    share = 1 - 3 * (tf.square(error) + tf.square(last_error))
    excess = delta * tf.sqrt(tf.maximum(share, 0))
    return tf.cast(tf.minimum(excess, tf.float32.max), tf.float32)

"""DIANA: quantized differences to a shift that follows the gradient."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number
from tf_dgc.collectives.requests import Aggregation, Result
from tf_dgc.compressors.base import Compressor, NativeMethod, StateSpec
from tf_dgc.compressors.qsgd import QSGD
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class DIANA(Compressor):
    """Quantizes the difference of the gradient to a shift that each worker learns.

    Mishchenko et al., algorithm 1: `delta_i = Q(g_i - h_i)`, then
    `h_i += alpha delta_i`. The estimate is `h + sum of delta_i`, where `h`, the sum of
    all shifts, is the same on all workers and changes by `alpha * sum of delta_i`. As
    `h_i` approaches the gradient at the optimum, the quantization noise vanishes, which
    QSGD's never does.

    Q is `QSGD`. With `levels=1` it is the paper's quantizer (definition 1, norm 2, in
    blocks); with the default 7 it is finer, at 4 bits per entry instead of 2. The
    paper's momentum is that of the inner optimizer.

    Args:
        levels: number of levels, as in `QSGD`.
        bucket: number of entries that share a norm, as in `QSGD`.
        alpha: rate at which shifts follow, in (0, 1]; None for `1 / (1 + omega)`, where
            omega bounds the variance of Q (theorem 1).
        coding: coding of the levels, as in `QSGD`.
    """

    name = "diana"
    kind = "difference"
    reference = "Mishchenko et al., DIANA, 2019"
    unbiased = True
    error_feedback = "forbidden"

    def __init__(
        self,
        levels: int = 7,
        bucket: int = 512,
        alpha: float | None = None,
        coding: str | None = None,
    ):
        if alpha is not None:
            alternative = ", or None for what the theory allows"
            alpha = check_number("alpha", alpha, "(0, 1]", alternative)
        self.quantizer = QSGD(levels, bucket, coding)
        self.alpha = alpha

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return this worker's shift h_i, and the sum h over workers."""
        return {
            "shift": StateSpec(shape),
            "shift_sum": StateSpec(shape, per_worker=False),
        }

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of `QSGD`."""
        return self.quantizer.bytes(shape, dtype)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Quantize the difference, and update the shifts."""
        shift, shift_sum = state["shift"], state["shift_sum"]
        difference = yield from self.quantizer.aggregate(values - shift, {}, keys)
        delta = tf.reshape(difference.sent, values.shape)
        total = tf.reshape(difference.sum, values.shape)
        alpha = self._alpha(values.shape.num_elements())
        new_state = {
            "shift": shift + alpha * delta,
            "shift_sum": shift_sum + alpha * total,
        }
        return Result(shift_sum + total, shift + delta, new_state)

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method: the quantizer's, with alpha."""
        quantizer = self.quantizer.native(shape)
        name = quantizer.name.replace(self.quantizer.name, self.name)
        parameters = [*quantizer.parameters, self._alpha(math.prod(shape))]
        return NativeMethod(name, parameters, ["shift"], shared=["shift_sum"])

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {**self.quantizer.get_config(), "alpha": self.alpha}

    def _alpha(self, size: int) -> float:
        if self.alpha is not None:
            return self.alpha
        return 1 / (1 + self.quantizer.error_bound(size))

"""ECQ-SGD: quantization that compensates for a share of the accumulated error."""

from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number
from tf_dgc.collectives.requests import Aggregation, Result
from tf_dgc.compressors.base import NativeMethod, Quantizer, StateSpec
from tf_dgc.compressors.qsgd import QSGD
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class ECQ(Quantizer):
    """Quantizes the gradient plus a share of the quantization errors so far.

    Wu et al., algorithm 1, on every worker: `q = Q(g + alpha h)` is sent,
    and `h = beta h + (g - q)` accumulates the error. Q is `QSGD`. With alpha 1 and
    beta 1 this is plain error feedback, for which the noise of an unbiased Q is too
    large; with alpha 0 it is QSGD, which never compensates for errors.

    The accumulated error is this method's state, with its own two coefficients, so
    error feedback is not allowed in addition. From one step to the next the expected
    square of h grows by a factor of at most `(beta - alpha)^2 + omega alpha^2`, where
    omega bounds the variance of Q. Coefficients with a factor above 1 are rejected, as
    the error could grow without bound.

    Args:
        levels: number of levels, as in `QSGD`.
        bucket: number of entries that share a norm, as in `QSGD`.
        alpha: coefficient of the compensation, in [0, 1]; tune it and beta by task.
        beta: decay of old errors, in [0, 1]; with 1 nothing is lost.
        coding: coding of the levels, as in `QSGD`.
    """

    name = "ecq"
    reference = "Wu et al., Error compensated quantized SGD, ICML 2018"
    error_feedback = "forbidden"

    def __init__(
        self,
        levels: int = 7,
        bucket: int = 512,
        alpha: float = 0.2,
        beta: float = 0.9,
        coding: str | None = None,
    ):
        self.quantizer = QSGD(levels, bucket, coding)
        self.alpha = check_number("alpha", alpha, "[0, 1]")
        self.beta = check_number("beta", beta, "[0, 1]")
        omega = self.quantizer.error_bound(self.quantizer.bucket)
        if (beta - alpha) ** 2 + omega * alpha**2 > 1:
            raise ValueError(
                "With these coefficients the accumulated error grows without bound: "
                "`(beta - alpha)**2 + omega * alpha**2` must be at most 1, where omega "
                f"is the bound of the quantizer's variance, {omega:.4g} here. Lower "
                "`alpha`, or take more levels or smaller buckets. "
                f"Received: alpha={alpha}, beta={beta}"
            )

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return this worker's accumulated error h."""
        return {"error": StateSpec(shape)}

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of `QSGD`."""
        return self.quantizer.bytes(shape, dtype)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Compensate, quantize, and accumulate the error."""
        error = state["error"]
        compensated = values + self.alpha * error
        result = yield from self.quantizer.aggregate(compensated, {}, keys)
        sent = tf.reshape(result.sent, values.shape)
        error = self.beta * error + (values - sent)
        error = tf.clip_by_value(error, error.dtype.min, error.dtype.max)
        return Result(result.sum, sent, {"error": error})

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method of the quantizer's coding."""
        quantizer = self.quantizer.native(shape)
        name = quantizer.name.replace(self.quantizer.name, self.name)
        parameters = [*quantizer.parameters, self.alpha, self.beta]
        return NativeMethod(name, parameters, ["error"])

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {**self.quantizer.get_config(), "alpha": self.alpha, "beta": self.beta}

"""EF21: the largest entries of the difference to what all know of a worker."""

import keras
import tensorflow as tf

from tf_dgc.collectives.requests import Result, to_dense_tensor
from tf_dgc.compressors import Compressor, StateSpec, TopK


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class EF21(Compressor):
    """Sends the largest entries of the gradient's difference to an estimate of it.

    Richtárik et al., "EF21: a new, simpler, theoretically better, and practically
    faster error feedback", NeurIPS 2021, algorithm 2: `c_i = C(grad_i - g_i)`,
    `g_i += c_i`; the sum of the g_i, which everyone knows, is the gradient. The first
    gradient is the difference to zero.

    Args:
        sparsity: share of entries not sent, as of `TopK`.
    """

    name = "ef21"
    kind = "difference"
    reference = "Richtárik et al., EF21, NeurIPS 2021"
    error_feedback = "forbidden"

    def __init__(self, sparsity=0.99):
        self.choice = TopK(sparsity)

    def state(self, shape):
        """Return this worker's estimate, and the sum over workers."""
        return {
            "estimate": StateSpec(shape),
            "sum": StateSpec(shape, per_worker=False),
        }

    def bytes(self, shape, dtype):
        """Return those of `TopK`."""
        return self.choice.bytes(shape, dtype)

    def aggregate(self, values, state, draw):
        """Send the difference, and move the estimates."""
        estimate, total = state["estimate"], state["sum"]
        moved = yield from self.choice.aggregate(values - estimate, {}, draw)
        mine = estimate + tf.reshape(to_dense_tensor(moved.sent), values.shape)
        total += tf.reshape(to_dense_tensor(moved.sum), values.shape)
        states = {"estimate": mine, "sum": total}
        return Result(total, mine, states, moved.entries)

    def get_config(self):
        """Return the constructor's arguments."""
        return {"sparsity": self.choice.get_config()["sparsity"]}

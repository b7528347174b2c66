"""EF21: sends the largest entries of the gradient's difference to an estimate."""

import keras
import tensorflow as tf

from tf_dgc.collectives.requests import Result, to_dense_tensor
from tf_dgc.compressors import Compressor, StateSpec, TopK


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class EF21(Compressor):
    """Sends the largest entries of the gradient's difference to a shared estimate.

    Richtárik et al., "EF21: a new, simpler, theoretically better, and practically
    faster error feedback", NeurIPS 2021, algorithm 2: `c_i = C(grad_i - g_i)`,
    `g_i += c_i`; the gradient is the sum of the g_i, which all workers have. The
    estimates are zero at first.

    Args:
        sparsity: share of entries not sent, as in `TopK`.
    """

    name = "ef21"
    kind = "difference"
    reference = "Richtárik et al., EF21, NeurIPS 2021"
    error_feedback = "forbidden"

    def __init__(self, sparsity=0.99):
        self.top_k = TopK(sparsity)

    def state(self, shape):
        """Return this worker's estimate, and the sum over workers."""
        return {
            "estimate": StateSpec(shape),
            "sum": StateSpec(shape, per_worker=False),
        }

    def bytes(self, shape, dtype):
        """Return the bytes of `TopK`."""
        return self.top_k.bytes(shape, dtype)

    def aggregate(self, values, state, draw):
        """Send the difference, and update the estimates."""
        estimate, total = state["estimate"], state["sum"]
        change = yield from self.top_k.aggregate(values - estimate, {}, draw)
        estimate += tf.reshape(to_dense_tensor(change.sent), values.shape)
        total += tf.reshape(to_dense_tensor(change.sum), values.shape)
        states = {"estimate": estimate, "sum": total}
        return Result(total, estimate, states, change.entries)

    def get_config(self):
        """Return the constructor's arguments."""
        return {"sparsity": self.top_k.get_config()["sparsity"]}

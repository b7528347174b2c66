"""Top-k with other kinds of error feedback, for `short_runs.py`."""

import keras
import tensorflow as tf

from rivals.ef21 import EF21
from tf_dgc.collectives.requests import Result, to_dense_tensor
from tf_dgc.compressors import StateSpec, TopK


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class MomentumEF21(EF21):
    """EF21 of each worker's momentum.

    Fatkhullin et al., "Momentum provably improves error feedback!", NeurIPS 2023,
    algorithm 1 (EF21-SGDM): `v_i = (1 - eta) v_i + eta grad_i`, and EF21 of v_i. The
    inner optimizer has no momentum, and `1 / eta` times the learning rate of one with
    momentum. Uncompressed tensors bypass the method and so have no momentum at all.

    Args:
        sparsity: share of entries not sent, as in `TopK`.
        value_dtype: type of the values, as in `TopK`.
        eta: share of the new gradient, in (0, 1].
    """

    name = "momentum_ef21"
    reference = "Fatkhullin et al., Momentum provably improves error feedback, 2023"

    def __init__(self, sparsity=0.99, value_dtype=None, eta=0.1):
        self.top_k, self.eta = TopK(sparsity, value_dtype), eta

    def state(self, shape):
        """Return the state of EF21, and the momentum."""
        return {**super().state(shape), "momentum": StateSpec(shape)}

    def aggregate(self, values, state, draw):
        """Send the difference of the momentum."""
        momentum = state["momentum"] + self.eta * (values - state["momentum"])
        result = yield from super().aggregate(momentum, state, draw)
        return result._replace(state={**result.state, "momentum": momentum})

    def get_config(self):
        """Return the constructor's arguments."""
        return {**self.top_k.get_config(), "eta": self.eta}


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class EControl(EF21):
    """EF21 that adds a share of the accumulated error to the difference.

    Gao, Islamov and Stich, "EControl: fast distributed optimization with compression
    and error control", ICLR 2024, algorithm 1: `c_i = C(eta e_i + grad_i - h_i)`,
    `e_i += grad_i - h_i - c_i`, `h_i += c_i`; the sum of the h_i is the gradient.

    Args:
        sparsity: share of entries not sent, as in `TopK`.
        value_dtype: type of the values, as in `TopK`.
        eta: share of the error that is added.
    """

    name = "econtrol"
    reference = "Gao et al., EControl, ICLR 2024"

    def __init__(self, sparsity=0.99, value_dtype=None, eta=0.1):
        self.top_k, self.eta = TopK(sparsity, value_dtype), eta

    def state(self, shape):
        """Return the state of EF21, and the error."""
        return {**super().state(shape), "error": StateSpec(shape)}

    def aggregate(self, values, state, draw):
        """Send the difference with a share of the error."""
        corrected = self.eta * state["error"] + values
        result = yield from super().aggregate(corrected, state, draw)
        error = state["error"] + values - result.state["estimate"]
        return result._replace(state={**result.state, "error": error})

    def get_config(self):
        """Return the constructor's arguments."""
        return {**self.top_k.get_config(), "eta": self.eta}


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class SparseDIANA(EF21):
    """DIANA (Mishchenko et al., 2019, algorithm 1) with top-k as its quantizer Q.

    Args:
        sparsity: share of entries not sent, as in `TopK`.
        value_dtype: type of the values, as in `TopK`.
        alpha: share of the difference that is added to the shift, in (0, 1]; with 1 it
            is EF21.
    """

    name = "sparse_diana"
    reference = "Mishchenko et al., DIANA, 2019"

    def __init__(self, sparsity=0.99, value_dtype=None, alpha=0.5):
        self.top_k, self.alpha = TopK(sparsity, value_dtype), alpha

    def aggregate(self, values, state, draw):
        """Send the difference, and add a share of it to the shifts."""
        shift, total = state["estimate"], state["sum"]
        result = yield from self.top_k.aggregate(values - shift, {}, draw)
        change = tf.reshape(to_dense_tensor(result.sent), values.shape)
        total_change = tf.reshape(to_dense_tensor(result.sum), values.shape)
        states = {
            "estimate": shift + self.alpha * change,
            "sum": total + self.alpha * total_change,
        }
        return Result(total + total_change, shift + change, states, result.entries)

    def get_config(self):
        """Return the constructor's arguments."""
        return {**self.top_k.get_config(), "alpha": self.alpha}


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class DecayingTopK(TopK):
    """Top-k whose residual decays.

    Args:
        sparsity: share of entries not sent, as in `TopK`.
        value_dtype: type of the values, as in `TopK`.
        decay: share of the residual that is added to the next gradient, in (0, 1].
    """

    name = "forgetting_top_k"

    def __init__(self, sparsity=0.999, value_dtype=None, decay=0.95):
        super().__init__(sparsity, value_dtype)
        self.decay = self.feedback_decay = decay

    def native(self, shape):
        """Return None: the native engine has no residual decay."""

    def get_config(self):
        """Return the constructor's arguments."""
        return {**super().get_config(), "decay": self.decay}

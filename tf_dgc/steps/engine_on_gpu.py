"""What the engine's CUDA kernels take of a step, which is less than the engine does."""

from collections.abc import Sequence

import tensorflow as tf

from tf_dgc.compressors.base import Native
from tf_dgc.ops import loader
from tf_dgc.steps import native
from tf_dgc.steps.accumulation import flatten
from tf_dgc.steps.base import Inputs


def is_wanted() -> bool:
    """Whether there are GPUs, where a step might run."""
    return bool(tf.config.get_visible_devices("GPU"))


def suits(inputs: Inputs, methods: Sequence[Native]) -> bool:
    """Return whether there are kernels for all of a step, and it is all on a GPU."""
    state = loader.native()
    if state.cuda_problem:
        return False
    known = {*state.cuda_methods}
    own = inputs.memory
    memory = [*own.velocity, *own.residual, *own.second_moment]
    return all(m.name in known for m in methods) and all(
        native.is_on_gpu([v]) for v in memory
    )


def simplify(inputs: Inputs) -> Inputs:
    """Return the same step with dense gradients."""
    return inputs._replace(
        gradients=list(map(flatten, inputs.gradients, inputs.tensors))
    )

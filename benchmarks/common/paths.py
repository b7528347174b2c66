"""Ways through the step that corrects, accumulates, selects and encodes a gradient.

`native` is the fused operation, `tensorflow` the same by TensorFlow operations, `top_k`
`tf.math.top_k` of the magnitudes alone, which neither accumulates nor encodes. `floor`
is a plain loop over the same memory, as momentum SGD does it: it reads three arrays and
writes two.
"""

import ctypes
import functools
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from common import kernels
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors import num_sent
from tf_dgc.steps import native, tensorflow_ops
from tf_dgc.steps.base import LocalStep, StepPlan

NAMES = ("floor", "native", "tensorflow", "top_k")


class Work(NamedTuple):
    """What is compressed.

    Attributes:
        n: number of entries of a tensor.
        sparsity: share of entries not sent, in [0, 1).
        dtype: type of the gradients, by name.
        threads: number of threads.
        content: "noise", "mostly zeros" (90 %), "zeros", or "left out", for a step
            whose gradients are not finite.
        tensors: number of tensors of n entries each.
    """

    n: int
    sparsity: float
    dtype: str = "float32"
    threads: int = 2
    content: str = "noise"
    tensors: int = 1

    @property
    def entries(self):
        """Entries of all tensors."""
        return self.n * self.tensors

    def gradient(self, seed):
        """Return the gradient of a tensor."""
        values = kernels.floats(self.n, seed)
        if self.content == "zeros":
            values[:] = 0
        if self.content == "mostly zeros":
            values[np.random.default_rng(seed).random(self.n) < 0.9] = 0
        if self.content == "left out":
            values[0] = np.nan
        return tf.cast(values, self.dtype)


class Variable:
    """The state of one worker, as the optimizer's `PerWorkerVariable` offers it."""

    def __init__(self, n, dtype):
        self.value = tf.Variable(tf.zeros([n], dtype))
        self.shape = self.value.shape
        self.assign = self.value.assign

    def local(self):
        """Return the value."""
        return self.value


def make(names, work, times):
    """Return what is timed, by name: functions that do the same `times` in a row.

    Args:
        names: names of the paths wanted, of `NAMES`.
        work: a `Work`.
        times: number of steps in a row.
    """
    accumulators = tf.float64 if work.dtype == "float64" else tf.float32
    gradients = [work.gradient(seed) for seed in range(work.tensors)]
    layout = [TensorSpec("", (work.n,), accumulators, False, accumulators.name)]
    counts = [num_sent(work.n, work.sparsity)]
    plan = StepPlan(layout * work.tensors, counts * work.tensors, False)

    def steps(path):
        velocity, residual = (
            [Variable(work.n, accumulators) for _ in gradients] for _ in range(2)
        )

        @tf.function
        def run(gradients, offset):
            total = 0
            for _ in tf.range(times):
                total += compress(gradients, offset)
            return total

        def compress(gradients, offset):
            step = LocalStep(
                plan,
                gradients,
                [1.0] * work.tensors,
                velocity,
                residual,
                [offset] * work.tensors,
                0.9,
                False,
                True,
            )
            return path.compress(step)[1][0]

        return functools.partial(run, gradients, tf.constant(0))

    @tf.function
    def top_k(gradient):
        total = 0
        for _ in tf.range(times):
            indices = tf.math.top_k(tf.abs(gradient), counts[0]).indices
            total += indices[0]
        return total

    made = {
        "floor": lambda: floor(work.entries, work.threads, times),
        "native": lambda: steps(native),
        "tensorflow": lambda: steps(tensorflow_ops),
        "top_k": lambda: functools.partial(top_k, gradients[0]),
    }
    return {name: made[name]() for name in NAMES if name in names}


def floor(n, threads, times):
    """Return a function that goes over the memory of momentum SGD `times` times."""
    library = kernels.load()
    # In TensorFlow's memory, like the others: NumPy's has larger pages.
    tensors = [tf.constant(kernels.floats(n, seed)) for seed in range(3)]
    arrays = [np.asarray(memoryview(t)) for t in tensors]

    def run():
        for _ in range(times):
            library.floor_pass(
                *map(kernels.pointer, arrays), kernels.length(n), ctypes.c_int(threads)
            )

    return run

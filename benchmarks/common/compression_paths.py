"""Implementations of correcting, accumulating, selecting and encoding a gradient.

`native` is the fused operation, `tensorflow` the same with TensorFlow operations,
`top_k` only `tf.math.top_k` of the magnitudes, which neither accumulates nor encodes.
`floor` is a plain loop that reads three arrays and writes two, like momentum SGD.
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
    """Gradients to compress, and how.

    Attributes:
        n: number of entries of a tensor.
        sparsity: share of entries not sent, in [0, 1).
        dtype: name of the gradients' dtype.
        threads: number of threads.
        content: "noise", "mostly zeros" (90 %), "zeros", or "left out": gradients that
            are not finite, which the step leaves out.
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
        """Number of entries of all tensors."""
        return self.n * self.tensors

    def gradient(self, seed):
        """Return the random gradient of a tensor."""
        values = kernels.floats(self.n, seed)
        if self.content == "zeros":
            values[:] = 0
        if self.content == "mostly zeros":
            values[np.random.default_rng(seed).random(self.n) < 0.9] = 0
        if self.content == "left out":
            values[0] = np.nan
        return tf.cast(values, self.dtype)


class Variable:
    """One worker's state variable, with the interface of `PerWorkerVariable`."""

    def __init__(self, n, dtype):
        self.value = tf.Variable(tf.zeros([n], dtype))
        self.shape = self.value.shape
        self.assign = self.value.assign

    def local(self):
        """Return the value."""
        return self.value


def create_functions(names, work, num_steps):
    """Return the functions to time, by name; a call takes `num_steps` steps.

    Args:
        names: names of paths, of `NAMES`.
        work: a `Work`.
        num_steps: number of steps in a call.
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
            for _ in tf.range(num_steps):
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
        for _ in tf.range(num_steps):
            indices = tf.math.top_k(tf.abs(gradient), counts[0]).indices
            total += indices[0]
        return total

    creators = {
        "floor": lambda: floor(work.entries, work.threads, num_steps),
        "native": lambda: steps(native),
        "tensorflow": lambda: steps(tensorflow_ops),
        "top_k": lambda: functools.partial(top_k, gradients[0]),
    }
    return {name: creators[name]() for name in NAMES if name in names}


def floor(n, threads, num_passes):
    """Return a function that passes over momentum SGD's arrays `num_passes` times."""
    library = kernels.load()
    # TensorFlow's allocator, as for the other paths: NumPy's memory has larger pages.
    tensors = [tf.constant(kernels.floats(n, seed)) for seed in range(3)]
    arrays = [np.asarray(memoryview(t)) for t in tensors]

    def run():
        for _ in range(num_passes):
            library.floor_pass(
                *map(kernels.pointer, arrays), kernels.length(n), ctypes.c_int(threads)
            )

    return run

"""Ways through the step that corrects, accumulates, selects and encodes a gradient.

`native` is the fused operation, `tensorflow` the same by TensorFlow operations, `top_k`
`tf.math.top_k` of the magnitudes alone, which neither accumulates nor encodes. `floor`
is a plain loop over the same memory, as momentum SGD does it: it reads three arrays and
writes two.
"""

import ctypes
import functools

import numpy as np
import tensorflow as tf

from common import kernels
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.compressors import num_sent
from tf_dgc.steps import native, operations
from tf_dgc.steps.plan import LocalStep, Plan

NAMES = ("floor", "native", "tensorflow", "top_k")


class Variable:
    """The state of one worker, as the optimizer's `PerWorkerVariable` offers it."""

    def __init__(self, n, dtype):
        self.value = tf.Variable(tf.zeros([n], dtype))
        self.shape = self.value.shape
        self.assign = self.value.assign

    def local(self):
        """Return the value."""
        return self.value


def make(names, n, sparsity, dtype, threads, times):
    """Return what is timed, by name: functions that do the same `times` in a row.

    Args:
        names: names of the paths wanted, of `NAMES`.
        n: number of entries of the gradient.
        sparsity: share of entries not sent, in [0, 1).
        dtype: type of the gradient, by name.
        threads: number of threads of the floor.
        times: number of steps in a row.
    """
    accumulators = tf.float64 if dtype == "float64" else tf.float32
    gradient = tf.cast(kernels.floats(n, 0), dtype)
    layout = [Tensor("", (n,), accumulators, False, accumulators.name)]
    plan = Plan(layout, [num_sent(n, sparsity)], False)

    def steps(path):
        velocity, residual = Variable(n, accumulators), Variable(n, accumulators)

        @tf.function
        def run(gradient, offset):
            total = 0
            for _ in tf.range(times):
                total += compress(gradient, offset)
            return total

        def compress(gradient, offset):
            step = LocalStep(
                plan,
                [gradient],
                [1.0],
                [velocity],
                [residual],
                [offset],
                0.9,
                False,
                True,
            )
            return path.compress(step)[1][0]

        return functools.partial(run, gradient, tf.constant(0))

    @tf.function
    def top_k(gradient):
        total = 0
        for _ in tf.range(times):
            indices = tf.math.top_k(tf.abs(gradient), plan.counts[0]).indices
            total += indices[0]
        return total

    made = {
        "floor": lambda: floor(n, threads, times),
        "native": lambda: steps(native),
        "tensorflow": lambda: steps(operations),
        "top_k": lambda: functools.partial(top_k, gradient),
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

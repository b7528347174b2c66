"""A step of a method, taken apart: traced functions, of which some do less.

All are `CompressedOptimizer.apply`, as users run it, under `tf.function`:

compress  up to the last reply, with what is kept: nothing is decoded or applied
sum N     the same, and the sum of N workers' payloads is decoded, but not applied
step      all of it, with the communicator of the package

The first two use a `CopyingCommunicator`, whose time is subtracted.
"""

import contextlib
import itertools
import math
import time

import keras
import numpy as np
import tensorflow as tf

from common import method_settings, models
from common.copying_communicator import CopyingCommunicator
from tf_dgc.optimizers import compressed

ALONE = {
    "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.001),
}
"""Optimizers without a method, which are inner ones too."""
WORKERS = (1, 2, 8)
SETS = 3  # of gradients


def _mixed():
    """Return 60 shapes, of convolutions and biases, like those of a ResNet-50."""
    widths = [3] + [64] * 6 + [128] * 7 + [256] * 8 + [512] * 8
    shapes = [(3, 3, a, b) for a, b in itertools.pairwise(widths)]
    shapes += [(2048, 888)]
    return [shape for kernel in shapes for shape in (kernel, kernel[-1:])]


SHAPES = {
    "mixed": _mixed,
    "mlp": lambda: [tuple(v.shape) for v in models.mlp().trainable_variables],
    "tiny": lambda: [(64, 256), (256,), (3, 3, 16, 32)],
}


def gradients(shapes):
    """Return lists of gradients, that one step after the other gets: of long tails."""
    random = np.random.default_rng(0)

    def draw(shape):
        size = random.uniform(0.003, 0.03)
        values = random.standard_normal(shape, np.float32)
        return tf.constant(size * values * random.standard_normal(shape, np.float32))

    return [[draw(shape) for shape in shapes] for _ in range(SETS)]


class Method:
    """A method's optimizer, built for variables.

    Args:
        name: of a method, "dgc", "dgc_adamw", or one of `ALONE`.
        shapes: of the variables.
    """

    def __init__(self, name, shapes):
        self.variables = [
            keras.Variable(np.zeros(shape, np.float32), name=f"v{i}")
            for i, shape in enumerate(shapes)
        ]
        adam = name.endswith("adamw")
        self.optimizer = ALONE["adamw" if adam else "sgd"]()
        if name in method_settings.ARE_MOMENTUM:
            self.optimizer = keras.optimizers.SGD(0.01)
        if name not in ALONE:
            make, _ = method_settings.method(name.removesuffix("_adamw"))
            self.optimizer = make(self.optimizer, method_settings.NO_PHASES)
        self.optimizer.build(self.variables)
        self.sizes = [math.prod(shape) for shape in shapes]
        self._specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]

    def step(self):
        """Return the whole step."""
        return self._trace(None, compressed.apply_update)

    def compress(self):
        """Return the step that decodes nothing."""
        return self._trace(CopyingCommunicator(1), lambda *_: tf.constant(0))

    def sum(self, num_workers):
        """Return the step that decodes what as many workers sent."""
        return self._trace(CopyingCommunicator(num_workers), _decode)

    def step_of(self, num_workers):
        """Return the whole step, with what as many workers sent."""
        return self._trace(CopyingCommunicator(num_workers), compressed.apply_update)

    def repeated(self, times, grads, num_workers=1):
        """Return a call of so many whole steps, one after the other, which waits.

        Args:
            times: number of steps.
            grads: gradients of all of them.
            num_workers: workers that send the same.
        """

        def run(*grads):
            for _ in tf.range(times):
                self.optimizer.apply(list(grads), self.variables)
            return tf.identity(self.optimizer.iterations)

        copies = CopyingCommunicator(num_workers) if num_workers > 1 else None
        with _replaced(self.optimizer, copies, compressed.apply_update):
            traced = tf.function(run).get_concrete_function(*self._specs)
        return lambda: int(traced(*grads))

    def _trace(self, copies, update):
        def run(*grads):
            self.optimizer.apply(list(grads), self.variables)
            return copies.spent() if copies else (tf.constant(0.0), tf.constant(0))

        with _replaced(self.optimizer, copies, update):
            traced = tf.function(run).get_concrete_function(*self._specs)
        asked = copies.requests if copies else 0
        return Traced(traced, self.optimizer.iterations, asked)


class Traced:
    """A traced function of gradients.

    Attributes:
        requests: that it makes of the communicator.
        gathered: bytes gathered in the last call.
    """

    def __init__(self, function, iterations, requests):
        self._function = function
        self._iterations = iterations
        self.requests = requests
        self.gathered = 0

    def __call__(self, grads):
        """Do a step; return its milliseconds, without those of copying.

        Where workers take turns, it is the first one's, which this one is.
        """
        at = int(self._iterations)
        self._iterations.assign(at - at % -max(WORKERS))
        start = time.perf_counter()
        copying, gathered = self._function(*grads)
        copying, self.gathered = float(copying), int(gathered)
        return 1000 * (time.perf_counter() - start - copying)


def _decode(rule, outcome, *others):
    """Have the sums computed, in place of `inner.updating.update`."""
    del rule, others
    sums, nonfinite = outcome.decode()
    with tf.control_dependencies(list(sums)):
        return tf.identity(nonfinite)


@contextlib.contextmanager
def _replaced(optimizer, copies, update):
    """Let a step be traced with another communicator and update."""
    mine = getattr(optimizer, "communicator", None), compressed.apply_update
    if copies:
        optimizer.communicator = copies
    compressed.apply_update = update
    try:
        yield
    finally:
        if copies:
            optimizer.communicator = mine[0]
        compressed.apply_update = mine[1]

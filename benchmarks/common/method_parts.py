"""Parts of a method's step, as traced functions to time.

All are `CompressedOptimizer.apply` under `tf.function`, as users run it:

compress  up to the last reply, including the residual; decodes and applies nothing
sum N     the same, and decodes the sum of N workers' payloads without applying it
step      the whole step, with the package's communicator

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
"""Optimizers without a method, which are also inner optimizers."""
WORKERS = (1, 2, 8)
NUM_GRADIENT_SETS = 3


def _mixed():
    """Return 60 shapes of kernels and biases, like those of a ResNet-50."""
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
    """Return lists of gradients for successive steps, with heavy-tailed entries."""
    random = np.random.default_rng(0)

    def draw(shape):
        size = random.uniform(0.003, 0.03)
        values = random.standard_normal(shape, np.float32)
        return tf.constant(size * values * random.standard_normal(shape, np.float32))

    return [[draw(shape) for shape in shapes] for _ in range(NUM_GRADIENT_SETS)]


class Method:
    """A method's optimizer, built for variables.

    Args:
        name: name of a method, "dgc", "dgc_adamw", or one of `ALONE`.
        shapes: shapes of the variables.
    """

    def __init__(self, name, shapes):
        self.variables = [
            keras.Variable(np.zeros(shape, np.float32), name=f"v{i}")
            for i, shape in enumerate(shapes)
        ]
        uses_adam = name.endswith("adamw")
        self.optimizer = ALONE["adamw" if uses_adam else "sgd"]()
        if name in method_settings.NO_INNER_MOMENTUM:
            self.optimizer = keras.optimizers.SGD(0.01)
        if name not in ALONE:
            wrap, _ = method_settings.create_method(name.removesuffix("_adamw"))
            self.optimizer = wrap(self.optimizer, method_settings.NO_PHASES)
        self.optimizer.build(self.variables)
        self.sizes = [math.prod(shape) for shape in shapes]
        self._specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]

    def step(self):
        """Return the whole step."""
        return self._trace(None, compressed.apply_update)

    def compress(self):
        """Return a step that decodes nothing."""
        return self._trace(CopyingCommunicator(1), lambda *_: tf.constant(0))

    def sum(self, num_workers):
        """Return a step that decodes the payloads of `num_workers` workers."""
        return self._trace(CopyingCommunicator(num_workers), _decode)

    def step_of(self, num_workers):
        """Return the whole step with the payloads of `num_workers` workers."""
        return self._trace(CopyingCommunicator(num_workers), compressed.apply_update)

    def repeated(self, num_steps, gradients, num_workers=1):
        """Return a function that runs whole steps and waits for the last one.

        Args:
            num_steps: number of steps of a call.
            gradients: gradients of all steps.
            num_workers: number of workers that send the same payload.
        """

        def run(*gradients):
            for _ in tf.range(num_steps):
                self.optimizer.apply(list(gradients), self.variables)
            return tf.identity(self.optimizer.iterations)

        communicator = CopyingCommunicator(num_workers) if num_workers > 1 else None
        with _replaced(self.optimizer, communicator, compressed.apply_update):
            traced = tf.function(run).get_concrete_function(*self._specs)
        return lambda: int(traced(*gradients))

    def _trace(self, communicator, update):
        def run(*gradients):
            self.optimizer.apply(list(gradients), self.variables)
            if communicator is None:
                return tf.constant(0.0), tf.constant(0)
            return communicator.costs()

        with _replaced(self.optimizer, communicator, update):
            traced = tf.function(run).get_concrete_function(*self._specs)
        num_requests = communicator.requests if communicator else 0
        return Traced(traced, self.optimizer.iterations, num_requests)


class Traced:
    """A traced function of gradients.

    Attributes:
        requests: number of its requests to the communicator.
        gathered: bytes gathered in the last call.
    """

    def __init__(self, function, iterations, requests):
        self._function = function
        self._iterations = iterations
        self.requests = requests
        self.gathered = 0

    def __call__(self, gradients):
        """Take a step; return its milliseconds without those of copying.

        Methods in which one worker selects take a step in which it is this one.
        """
        iteration = int(self._iterations)
        self._iterations.assign(iteration - iteration % -max(WORKERS))
        start = time.perf_counter()
        copying, gathered = self._function(*gradients)
        copying_seconds = float(copying)
        self.gathered = int(gathered)
        return 1000 * (time.perf_counter() - start - copying_seconds)


def _decode(rule, outcome, *others):
    """Decode the sums without an update; replaces `compressed.apply_update`."""
    del rule, others
    sums, nonfinite = outcome.decode()
    with tf.control_dependencies(list(sums)):
        return tf.identity(nonfinite)


@contextlib.contextmanager
def _replaced(optimizer, communicator, update):
    """Replace the communicator, unless None, and the update while tracing a step."""
    original_update = compressed.apply_update
    original_communicator = getattr(optimizer, "communicator", None)
    if communicator:
        optimizer.communicator = communicator
    compressed.apply_update = update
    try:
        yield
    finally:
        if communicator:
            optimizer.communicator = original_communicator
        compressed.apply_update = original_update

"""Runs a native step with too little memory; see test_low_memory.py."""

import contextlib
import ctypes
import pathlib
import resource

import tensorflow as tf

from tf_dgc import native_library
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.steps import native
from tf_dgc.steps.base import StepPlan


@contextlib.contextmanager
def memory_left(num_bytes):
    """Limit the memory that this process can still allocate."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory counts as left
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = used * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main():
    """Check that a step without memory raises, and that the next one succeeds."""
    size, k = 20_000_000, 5_000_000
    layout = [TensorSpec("", (size,), tf.float32, False, "mxint8")]
    state = [tf.Variable(tf.zeros([size])) for _ in range(2)]
    arguments = dict(
        gradients=[tf.random.stateless_uniform([size], [0, 1])],
        velocity=[state[0].handle],
        residual=[state[1].handle],
        momentum=tf.constant(0.5, tf.float64),
        scales=tf.constant([1.0], tf.float64),
        counts=tf.constant([k]),
        offsets=tf.constant([0]),
        rows=[],
        sparse=[],
        moments=[],
        divided=[],
        divisors=tf.zeros([0, 5], tf.float64),
        nesterov=False,
        factor_masking=True,
        largest_exponents=[1024],
        **native.layout_attributes(StepPlan(layout, [k], False)),
    )
    compress = native_library.load_library().library.tf_dgc_compress
    try:
        # On top of free memory. The buffer takes 8 MB, and the values take 20 MB
        # before they are coded in blocks.
        with memory_left(14_000_000):
            compress(**arguments)
    except tf.errors.ResourceExhaustedError as error:
        assert "out of memory" in error.message
    else:
        raise AssertionError("there was enough memory")
    compress(**arguments)


if __name__ == "__main__":
    main()

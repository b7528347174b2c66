"""`Float16` and `BFloat16` against NumPy."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc import compressors
from tf_dgc.codecs import value_types
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.steps import engine_step
from tf_dgc.testing import Simulation


def test_float16_by_hand():
    simulation = Simulation("float16", [(5,)], 2, error_feedback=True)
    values = [1.0, 1.0 + 2.0**-12, 1e-9, 1e5, -1e5]
    (total,) = simulation.step([[values], [[1.0, 0.0, 0.0, 1.0, -2047.0]]])
    np.testing.assert_array_equal(total, [2.0, 1.0, 0.0, 2048.0, -4094.0])
    residual = np.float32(values) - np.float32([1, 1, 0, 2047, -2047])
    np.testing.assert_array_equal(simulation.residual[0][0], residual)


@pytest.mark.parametrize(("name", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_rounds_to_nearest(name, bits):
    values = np.random.default_rng(0).normal(size=1000)
    simulation = Simulation(name, [(1000,)], 1, "float64")
    (total,) = simulation.step([[values]])
    fraction, exponent = np.frexp(values)
    rounded = np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)
    np.testing.assert_array_equal(total, rounded)
    assert simulation.sent_bytes == 2 + 2 * 1000


@pytest.mark.parametrize("num_workers", [32, 33, 64, 100])
def test_spikes_of_many_workers_stay_in_the_residual(num_workers):
    simulation = Simulation("float16", [(2,)], num_workers, error_feedback=True)
    spikes = np.float32([3000.0, -3000.0])
    (total,) = simulation.step([[spikes]] * num_workers)
    largest = {32: 2047.0, 33: 1023.5, 64: 1023.5, 100: 511.75}[num_workers]
    np.testing.assert_array_equal(simulation.sent[0][0], [largest, -largest])
    np.testing.assert_allclose(total, num_workers * simulation.sent[0][0], rtol=1e-3)
    residual = spikes - simulation.sent[0][0]
    np.testing.assert_array_equal(simulation.residual[-1][0], residual)


@pytest.mark.parametrize(("num_workers", "halvings"), [(1, 5), (32, 5), (33, 6)])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_engine_gets_the_same_bound(dtype, num_workers, halvings):
    method = compressors.get(dtype.name)
    inputs = SimpleNamespace(compressor=method, num_workers=num_workers)
    tensor = TensorSpec("w", (3, 4), tf.float32, uncompressed=False)
    native = engine_step._native_method(inputs, tensor, sums_uncompressed=False)
    assert native.parameters == [float(dtype.max) / 2**halvings]


@pytest.mark.parametrize("num_workers", [33, 48, 64, 1000, 1024, 5000])
def test_sums_of_the_largest_terms_are_finite(num_workers):
    """Summed one after another, and in pairs of pairs."""
    term = np.float16(value_types.largest_term(tf.float16, num_workers))
    total, sums = np.float16(0), [term] * num_workers
    for value in sums:
        total += value
    while len(sums) > 1:
        rest = sums[-1:] if len(sums) % 2 else []
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [a + b for a, b in pairs] + rest
    assert np.isfinite([total, *sums]).all()

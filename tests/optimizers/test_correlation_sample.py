"""The correlation of the workers' gradients, estimated from a sample."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.optimizers.adam_sampling import create_correlation_sample

WORKERS = 4
TENSORS = [
    TensorSpec("alike", (40, 50), tf.float32, False),
    TensorSpec("uncompressed", (7,), tf.float32, True),
    TensorSpec("noise", (30, 20), tf.float32, False),
    TensorSpec("missing", (30, 20), tf.float32, False),
]


def factors_after(steps):
    correlation = create_correlation_sample(TENSORS, WORKERS, seed=0)
    rng = np.random.default_rng(0)
    for step in range(steps):
        alike = rng.normal(size=2000).astype("float32")
        first, second, _ = correlation.positions(tf.constant(step, tf.int64))
        samples = [
            correlation.sample(
                tf.constant([alike[first], noise[second]], "float32"), [0, 1]
            )
            for noise in rng.normal(size=(WORKERS, 600))
        ]
        correlation.update(tf.add_n(samples))
    return [float(factor) for factor in correlation.factors()]


def test_factors_are_from_n_to_its_square():
    alike, noise, missing = factors_after(100)
    assert alike == pytest.approx(WORKERS**2, rel=1e-5)
    assert noise == pytest.approx(WORKERS, rel=0.15)
    assert missing == WORKERS**2


def test_factors_are_largest_at_first():
    assert factors_after(0) == [WORKERS**2] * 3


def test_uncompressed_tensors_have_no_sample():
    assert create_correlation_sample(TENSORS[1:2], WORKERS, seed=0) is None

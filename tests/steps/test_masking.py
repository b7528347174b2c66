"""Factor masking follows the entries that were sent, not their values."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc import compressors

O = keras.optimizers  # noqa: E741
SHAPE = (40, 50)
WARM_UP = tf_dgc.schedules.WarmupSparsity(1000)
DENSE_AT_FIRST = tf_dgc.schedules.PiecewiseConstantSparsity([3], [0.0, 0.99])


def corrected_optimizer(compressor, factor_masking=None, **settings):
    return tf_dgc.CompressedOptimizer(
        O.SGD(1.0, momentum=0.9),
        compressor,
        corrections=tf_dgc.Corrections(True, factor_masking),
        **settings,
    )


def dgc_optimizer(sparsity, value_dtype=None):
    inner = O.SGD(1.0, momentum=0.9)
    return tf_dgc.DGCOptimizer(inner, sparsity, value_dtype=value_dtype)


def gradient(seed=0, scale=1.0):
    return scale * np.random.default_rng(seed).normal(size=SHAPE).astype("float32")


def velocity_after(optimizer, gradients):
    variable = keras.Variable(np.zeros(SHAPE, "float32"))
    optimizer.build([variable])
    for g in gradients:
        optimizer.apply([g], [variable])
    return optimizer.velocity[0].numpy(), variable.numpy()


def with_zero_entry(g):
    g[3, 4] = 0.0
    return g


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: corrected_optimizer(compressors.TopK(DENSE_AT_FIRST)),
        lambda: corrected_optimizer(compressors.TopK(0.0)),
        lambda: corrected_optimizer(compressors.RandomK(0.0)),
        lambda: dgc_optimizer(DENSE_AT_FIRST),
    ],
    ids=["schedule", "top_k", "random_k", "dgc"],
)
def test_velocity_survives_dense_steps_with_a_zero_entry(optimizer):
    """A zero entry is sent like the others."""
    gradients = [with_zero_entry(gradient(seed)) for seed in range(3)]
    expected = np.zeros(SHAPE, "float32")
    for g in gradients:
        expected = np.float32(0.9) * expected + g
    velocity, _ = velocity_after(optimizer(), gradients)
    np.testing.assert_allclose(velocity, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value_dtype", [None, "float16"])
@pytest.mark.parametrize("sparsity", [0.99, DENSE_AT_FIRST], ids=["sparse", "dense"])
def test_dgc_and_generic_top_k_mask_the_same_entries(sparsity, value_dtype):
    """Values below 6e-8 become 0 in float16, but count as sent."""
    gradients = [gradient(seed, scale=1e-9) for seed in range(3)]
    dgc_result = velocity_after(dgc_optimizer(sparsity, value_dtype), gradients)
    generic_result = velocity_after(
        corrected_optimizer(compressors.TopK(sparsity, value_dtype)), gradients
    )
    if sparsity == 0.99:
        assert np.count_nonzero(dgc_result[0] == 0) >= 20
    if value_dtype is None or sparsity == 0.99:
        for a, b in zip(dgc_result, generic_result, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    else:  # a dense step of DGC is not coded
        np.testing.assert_array_equal(dgc_result[0], generic_result[0])


SPARSIFIERS = [
    name
    for name, method in compressors.METHODS.items()
    if issubclass(method, compressors.Sparsifier)
    and method().error_feedback != "forbidden"
]


@pytest.mark.parametrize("name", SPARSIFIERS)
def test_velocity_is_cleared_exactly_where_entries_are_sent(name):
    optimizer = corrected_optimizer(name, factor_masking=True)
    velocity, change = velocity_after(optimizer, [gradient()])
    cleared = velocity == 0
    assert np.count_nonzero(cleared) == optimizer.stats.entries_per_step
    assert np.all(cleared[change != 0])


@pytest.mark.parametrize(
    ("compressor", "masked"),
    [
        pytest.param(compressors.RandomK(0.9), False, id="90 %"),
        pytest.param(compressors.RandomK(0.99), True, id="99 %"),
        pytest.param(compressors.GlobalTopK(0.75), False, id="global"),
        pytest.param(compressors.GlobalTopK(WARM_UP), False, id="warm-up"),
        pytest.param(compressors.ChunkedTopK(), False, id="a 64th of chunks"),
        pytest.param(compressors.ChunkedTopK(400, 4), True, id="a 100th of chunks"),
        pytest.param(compressors.AdaComp(), True, id="by growth"),
    ],
)
def test_default_masking_depends_on_the_density(compressor, masked):
    velocity, _ = velocity_after(corrected_optimizer(compressor), [gradient()])
    assert np.any(velocity == 0) == masked


class WithoutChosen(compressors.RandomK):
    """Returns a dense tensor, which has no positions."""

    def aggregate(self, values, state, keys):
        result = yield from super().aggregate(values, state, keys)
        return result._replace(
            sent=compressors.to_dense_tensor(result.sent), chosen=None
        )


def test_sparsifier_without_chosen_entries_raises():
    with pytest.raises(ValueError, match="must say which: pass `chosen`"):
        velocity_after(corrected_optimizer(WithoutChosen(0.99)), [gradient()])


class TopKSubclass(compressors.TopK):
    """Runs as a generic step, because a subclass may select other entries."""


@pytest.mark.parametrize("method", [compressors.TopK, TopKSubclass])
def test_values_rounded_to_zero_count_as_sent(method):
    variable = keras.Variable(np.zeros(SHAPE, "float32"))
    optimizer = tf_dgc.CompressedOptimizer(
        O.SGD(1.0),
        method(1e-5, "float16"),
        diagnostics=tf_dgc.Diagnostics(track_staleness=True),
    )
    optimizer.build([variable])
    for seed in range(3):
        optimizer.apply([tf.constant(gradient(seed, scale=1e-9))], [variable])
    assert np.count_nonzero(optimizer.residual[0].numpy()) == variable.numpy().size
    assert optimizer.staleness.max == 0

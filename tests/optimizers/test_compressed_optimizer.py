"""`CompressedOptimizer` with every method."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import SHAPES, Trainer, initial_weights, make_gradients
from selection import in_turn, rows

import tf_dgc
from tf_dgc import compressors

O = keras.optimizers  # noqa: E741


def make_trainer(strategy, compressor, inner=None, dtype="float64", **settings):
    inner = inner or (lambda: O.SGD(0.125, momentum=0.9))
    return Trainer(
        strategy,
        lambda: tf_dgc.CompressedOptimizer(inner(), compressor, **settings),
        initial_weights(dtype),
    )


def assert_same_weights(one, other, rtol):
    for a, b in zip(one.weights(), other.weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


# --- compared with references ---------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "value_dtype"), in_turn([1, 2], ["bfloat16", None])
)
def test_top_k_with_momentum_correction_is_dgc(strategies, num_workers, value_dtype):
    strategy = strategies[num_workers]

    def inner():
        return O.SGD(0.125, momentum=0.9, nesterov=True, clipnorm=3.0)

    generic = make_trainer(
        strategy,
        compressors.TopK(0.97, value_dtype),
        inner,
        corrections=tf_dgc.Corrections(momentum=True),
    )
    dgc = Trainer(
        strategy,
        lambda: tf_dgc.DGCOptimizer(inner(), 0.97, value_dtype=value_dtype),
        initial_weights(),
    )
    for gradients in make_gradients(num_workers, 6):
        generic.step(gradients)
        dgc.step(gradients)
    assert_same_weights(generic, dgc, 1e-12)
    assert generic.optimizer.stats == dgc.optimizer.stats


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    "inner",
    [
        lambda: O.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=2.0),
        lambda: O.AdamW(0.01, weight_decay=0.1),
    ],
    ids=["nesterov", "adamw"],
)
def test_no_compression_is_the_inner_optimizer(strategies, num_workers, inner):
    wrapped = make_trainer(strategies[num_workers], "none", inner, "float32")
    alone = Trainer(strategies[num_workers], inner, initial_weights("float32"))
    for gradients in make_gradients(num_workers, 4, "float32"):
        wrapped.step(gradients)
        alone.step(gradients)
    assert_same_weights(wrapped, alone, 2e-6)


@pytest.mark.parametrize("clipping", ["clipnorm", "global_clipnorm"])
def test_without_delayed_entries_gradients_are_clipped_as_in_keras(
    strategies, clipping
):
    def inner():
        return O.SGD(0.1, momentum=0.9, **{clipping: 0.5})

    wrapped = make_trainer(strategies[4], "float16", inner, "float32")
    alone = Trainer(strategies[4], inner, initial_weights("float32"))
    for gradients in make_gradients(4, 4, "float32"):
        wrapped.step(gradients)
        alone.step(gradients)
    assert_same_weights(wrapped, alone, 2e-3)


def test_a_schedule_of_the_sparsity(strategies):
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.9, 0.99])
    trainer = make_trainer(strategies[2], compressors.TopK(schedule))
    entries = []
    for gradients in make_gradients(2, 2):
        trainer.step(gradients)
        entries.append(trainer.optimizer.stats.entries_per_step)
    uncompressed = 50 + 21
    assert entries == [uncompressed + 350, uncompressed + 35]


def test_uncompressed_tensors_arrive_whole(strategies):
    trainer = make_trainer(strategies[2], "ef_sign_sgd", lambda: O.SGD(1.0))
    before = trainer.weights()
    (gradients,) = make_gradients(2, 1)
    trainer.step(gradients)
    for i, shape in enumerate(SHAPES):
        update = before[i] - trainer.weights()[i]
        total = gradients[0][i] + gradients[1][i]
        uncompressed = len(shape) < 2 or np.prod(shape) < 1024
        assert np.allclose(update, total, rtol=1e-12) == uncompressed
        assert np.any(trainer.optimizer.residual[i].numpy()) != uncompressed


def test_missing_gradients_and_empty_variables():
    shapes = [(0, 5), (40, 40), (40, 30)]
    variables = [keras.Variable(np.zeros(s, "float32")) for s in shapes]
    optimizer = tf_dgc.CompressedOptimizer(O.SGD(1.0), "diana", min_compress_size=0)
    optimizer.build(variables)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply(
            [
                tf.zeros((0, 5)),
                None,
                tf.IndexedSlices(tf.ones((1, 30)), tf.constant([3]), (40, 30)),
            ],
            variables,
        )
    assert np.flatnonzero(variables[2].numpy().any(axis=1)) == [3]
    assert not np.any(optimizer.compressor_state[1]["shift"].numpy())


def test_factor_masking_clears_sent_entries():
    variable = keras.Variable(np.zeros((40, 50), "float32"))
    gradient = np.random.default_rng(0).normal(size=(40, 50)).astype("float32")
    for masking in (True, False):
        optimizer = tf_dgc.CompressedOptimizer(
            O.SGD(1.0, momentum=0.9),
            compressors.RandomK(0.9),
            corrections=tf_dgc.Corrections(momentum=True, factor_masking=masking),
        )
        optimizer.build([variable])
        variable.assign(np.zeros((40, 50)))
        optimizer.apply([gradient], [variable])
        sent = variable.numpy() != 0
        assert np.count_nonzero(sent) == 200
        velocity = optimizer.velocity[0].numpy()
        np.testing.assert_array_equal(velocity, np.where(sent & masking, 0, gradient))


# --- in Keras -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:tf_dgc. there is one worker")
@pytest.mark.parametrize(
    ("name", "num_workers"), in_turn(["diana", "power_sgd"], [2, 1], [])
)
def test_state_survives_saving(strategies, tmp_path, name, num_workers):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 20)).astype("float32")
    data = {"x": x, "y": x.sum(axis=1, keepdims=True), "batch_size": 16, "verbose": 0}
    with strategies[num_workers].scope():
        layers = [keras.Input((20,)), keras.layers.Dense(60), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(tf_dgc.CompressedOptimizer(O.Adam(0.01), name), "mse")
    before = model.evaluate(x, data["y"], verbose=0)
    monitor = tf_dgc.callbacks.CompressionMonitor()
    history = model.fit(**data, epochs=4, callbacks=[monitor]).history
    stats = model.optimizer.stats
    assert history["bytes_per_step"] == [stats.bytes_per_step] * 4
    assert model.evaluate(x, data["y"], verbose=0) < before
    model.save(tmp_path / "model.keras")
    with strategies[num_workers].scope():
        again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == model.optimizer.get_config()
    pairs = list(zip(model.optimizer.variables, again.optimizer.variables, strict=True))
    assert sum("shift" in a.path or a.path.endswith("_q") for a, _ in pairs) > 0
    for a, b in pairs:
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6, err_msg=a.path)
    again.fit(**data)


# Methods without random choices and ties: XLA has another random generator.
@pytest.mark.filterwarnings("ignore:XLA compiles this step:RuntimeWarning")
@pytest.mark.parametrize("name", rows(["ef_sign_sgd", "power_sgd"], ["power_sgd"]))
def test_xla(name):
    weights = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50)])
        model.compile(
            tf_dgc.CompressedOptimizer(O.SGD(0.1), name), "mse", jit_compile=jit_compile
        )
        x, y = np.ones((32, 40), "float32"), np.ones((32, 50), "float32")
        model.fit(x, y, verbose=0, batch_size=8)
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-4)


def test_an_overflowing_residual_is_not_sent():
    variable = keras.Variable(np.zeros((4, 4), "float32"))
    optimizer = tf_dgc.CompressedOptimizer(
        O.SGD(1.0), compressors.TopK(0.9), min_compress_size=0
    )
    optimizer.build([variable])
    gradient = np.full((4, 4), 3e38, "float32")
    for _ in range(3):
        optimizer.apply([gradient], [variable])
        optimizer.apply([-gradient], [variable])
        optimizer.apply([gradient], [variable])
    assert np.all(np.isfinite(optimizer.residual[0].numpy()))
    assert optimizer.stats.nonfinite > 0


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [O.SGD(0.1, momentum=0.5), O.Lion(), O.Adam()])
def test_momentum_with_a_method_that_replaces_it_raises(inner):
    with pytest.raises(ValueError, match="Pass as `inner` an optimizer without"):
        tf_dgc.CompressedOptimizer(inner, "demo")


def test_bad_factor_masking_is_refused():
    with pytest.raises(ValueError, match="`factor_masking` must be True, False, or No"):
        tf_dgc.CompressedOptimizer(
            O.SGD(0.1), corrections=tf_dgc.Corrections(factor_masking="none")
        )


@pytest.mark.parametrize("compressor", ["qsgd", "none", "sign_sgd"])
def test_momentum_correction_without_a_residual_raises(compressor):
    with pytest.raises(ValueError, match="needs error feedback"):
        tf_dgc.CompressedOptimizer(
            O.SGD(0.1), compressor, corrections=tf_dgc.Corrections(momentum=True)
        )

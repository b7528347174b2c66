"""The wrappers' interface is that of Keras's optimizers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from selection import in_turn

import tf_dgc
from tf_dgc.optimizers.state import consensus_texts

O = keras.optimizers  # noqa: E741
SHAPE = (40, 50)


def dgc(sparsity=0.9):
    return tf_dgc.DGCOptimizer(O.SGD(0.5, momentum=0.9), sparsity)


def normal(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


# --- plain variables ------------------------------------------------------------------


def two_steps(optimizer, variables):
    @tf.function
    def step():
        gradients = [tf.constant(normal(v.shape, seed=1)) for v in variables]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        optimizer.apply(gradients)

    return step


WRAPPERS = {
    "dgc": dgc,
    "adamw": lambda: tf_dgc.CompressedOptimizer(O.AdamW(0.1), "top_k"),
}


@pytest.mark.parametrize(("wrapper", "num_workers"), in_turn(WRAPPERS, [2, 1], []))
def test_variables_of_tensorflow(strategies, num_workers, wrapper):
    """In a graph, with `apply_gradients` and with `apply` without variables."""
    strategy = strategies[num_workers]
    results = []
    for variable_class in (tf.Variable, keras.Variable):
        with strategy.scope():
            variables = [
                variable_class(normal(), name="a"),
                variable_class(normal((50,)), name="b"),
            ]
            optimizer = WRAPPERS[wrapper]()

        step = two_steps(optimizer, variables)
        for _ in range(2):
            strategy.run(step)
        results.append([v.numpy() for v in variables])
        assert optimizer.stats.steps == 4
    for of_tensorflow, of_keras in zip(*results, strict=True):
        np.testing.assert_array_equal(of_tensorflow, of_keras)


def test_variables_of_tensorflow_in_messages():
    variable = tf.Variable(np.zeros((3, 3), "int32"), name="mine")
    with pytest.raises(ValueError, match="variable mine of dtype int32"):
        dgc().build([variable])
    optimizer = dgc()
    optimizer.build([tf.Variable(tf.zeros((3, 3)))])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([tf.ones((3, 3))], [tf.Variable(tf.zeros((3, 3)))])


def test_a_checkpoint_with_variables_of_tensorflow(tmp_path):
    def build():
        variable, optimizer = tf.Variable(tf.zeros(SHAPE)), dgc()
        optimizer.build([variable])
        return variable, optimizer, tf.train.Checkpoint(v=variable, o=optimizer)

    variable, optimizer, saved = build()
    optimizer.apply([normal()], [variable])
    path = saved.write(str(tmp_path / "checkpoint"))
    again, other, loaded = build()
    loaded.read(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(again.numpy(), variable.numpy())
    for a, b in zip(other.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


# --- one tensor of several replicas ---------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
def test_a_tensor_shared_by_replicas_counts_once_per_replica(strategies, traced):
    """The tensor counts as if each replica had computed its own gradient, as in Keras.

    TensorFlow's reduction treats a tensor that all replicas share as one value, and
    Keras's optimizer then counts it once.
    """
    ones = tf.ones(SHAPE)

    def weights_after(make, gradient):
        with strategies[2].scope():
            variable, optimizer = keras.Variable(np.full(SHAPE, 3.0)), make()
            optimizer.build([variable])

        def step():
            optimizer.apply_gradients([(gradient(), variable)])

        strategies[2].run(tf.function(step) if traced else step)
        return float(variable.numpy()[0, 0])

    def make_stock():
        return O.SGD(1.0)

    def make_wrapped():
        return tf_dgc.DGCOptimizer(O.SGD(1.0), 0)

    def shared():
        return ones

    def separate():
        return ones + 0.0

    assert weights_after(make_stock, separate) == 1.0
    assert weights_after(make_wrapped, separate) == 1.0
    assert weights_after(make_wrapped, shared) == 1.0
    assert weights_after(make_stock, shared) == 2.0


# --- names and configs ----------------------------------------------------------------


@pytest.mark.parametrize("inner", ["adam", "Adam", O.serialize(O.Adam(0.25))])
def test_inner_by_name_or_config(inner):
    for wrap in (tf_dgc.DGCOptimizer, tf_dgc.CompressedOptimizer):
        optimizer = wrap(inner)
        assert type(optimizer.inner_optimizer) is O.Adam
    if isinstance(inner, dict):
        assert float(optimizer.learning_rate) == 0.25
        assert inner == O.serialize(O.Adam.from_config(inner["config"]))


class Terse(O.SGD):
    """Leaves most settings out of its config."""

    def __init__(self, learning_rate=0.5, **settings):
        super().__init__(learning_rate, **settings)

    def get_config(self):
        return {"learning_rate": float(self.learning_rate.numpy())}


def test_an_optimizer_whose_config_lacks_settings():
    optimizer = tf_dgc.DGCOptimizer(Terse(clipnorm=2.0), 0.9)
    assert optimizer.clipnorm == 2.0
    assert optimizer.get_config()["inner"]["config"] == {"learning_rate": 0.5}
    texts = consensus_texts(optimizer.consensus_config(), {}, [])
    assert texts["optimizer"]["inner"]["config"] == {"learning_rate": 0.5}


# --- printing -------------------------------------------------------------------------


def test_an_optimizer_prints_its_settings():
    warmup = tf_dgc.schedules.WarmupSparsity(10, 0.99, [0.5])
    optimizer = tf_dgc.DGCOptimizer(
        O.SGD(0.25, momentum=0.9, clipnorm=2.0), warmup, seed=3
    )
    assert repr(optimizer) == (
        "DGCOptimizer(SGD(learning_rate=0.25, momentum=0.9, clipnorm=2), sparsity="
        "WarmupSparsity(warmup_steps=10, final_sparsity=0.99, stages=[0.5]), seed=3)"
    )
    schedule = O.schedules.CosineDecay(0.1, 10)
    optimizer = tf_dgc.CompressedOptimizer(O.Adam(schedule), "random_k")
    assert str(optimizer) == (
        "CompressedOptimizer(Adam(learning_rate=CosineDecay(...)), "
        "compressor=RandomK(sparsity=0.99, unbiased=False))"
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_optimizer_prints_its_current_rate_while_tracing(strategies, num_workers):
    with strategies[num_workers].scope():
        optimizer = tf_dgc.DGCOptimizer(O.SGD(0.25))
    optimizer.learning_rate = 0.5
    seen = []
    strategies[num_workers].run(tf.function(lambda: seen.append(repr(optimizer))))
    assert set(seen) == {"DGCOptimizer(SGD(learning_rate=0.5))"}


# --- loading without this package -----------------------------------------------------


def test_loading_without_tf_dgc(monkeypatch, tmp_path):
    """An error with the optimizer, but `compile=False` works (docs/limits.md)."""
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50)])
    model.compile(dgc(), "mse")
    model.fit(normal((8, 40)), normal((8, 50)), verbose=0)
    model.save(tmp_path / "model.keras")
    registered = keras.saving.get_custom_objects()
    monkeypatch.delitem(registered, "tf_dgc>DGCOptimizer")
    with pytest.raises(TypeError, match="Could not locate class 'DGCOptimizer'"):
        keras.models.load_model(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])


# --- one row for two replicas ---------------------------------------------------------


def test_fewer_rows_than_replicas(strategies):
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50)])
        model.compile(dgc(), "mse", metrics=["mae"])
    x, y = normal((16, 40)), normal((16, 50))
    row, target = x[:1], y[:1]
    expected = np.mean((model(row).numpy() - target) ** 2)
    loss = model.evaluate(row, target, verbose=0)[0]
    assert loss == pytest.approx(expected, rel=1e-5)
    history = model.fit(x, y, validation_data=(row, target), verbose=0).history
    assert np.isfinite(history["val_loss"])
    assert model.predict(row, verbose=0).shape == (1, 50)
    model.fit(row, target, verbose=0)
    assert all(np.isfinite(w).all() for w in model.get_weights())

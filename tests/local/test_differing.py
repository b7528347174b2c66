"""What is seen, saved and loaded of a model whose workers are within a round."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients, record_collectives

import tf_dgc
from tf_dgc.local import synchronizer
from tf_dgc.multiworker import consensus_weights

O = keras.optimizers  # noqa: E741

X = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
Y = X.mean(axis=1, keepdims=True)
PERIOD = 3


def make_model(strategy, scaled=False):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        optimizer = tf_dgc.diloco(keras.optimizers.Adam(0.1), PERIOD)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer, "mse", run_eagerly=True)
    return model


def fit(model, steps, **settings):
    model.fit(
        X[: 16 * steps], Y[: 16 * steps], batch_size=16, verbose=0, shuffle=False,
        **settings,
    )  # fmt: skip


def copies(model, variables=None):
    """Return `values[variable][replica]`."""
    local = model.distribute_strategy.experimental_local_results
    variables = model.trainable_variables if variables is None else variables
    return [[c.numpy() for c in local(v._value)] for v in variables]


def anchor(model):
    return [replicas[0] for replicas in copies(model, model.optimizer.anchor)]


def assert_equal(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def within(strategies):
    """Return a model of two workers, one step into its second round."""
    model = make_model(strategies[2])
    fit(model, PERIOD + 1)
    (kernel, other), _ = copies(model)
    assert not np.array_equal(kernel, other)
    assert not np.array_equal(kernel, anchor(model)[0])
    return model


def test_evaluation_and_prediction_are_of_the_anchor(within, monkeypatch):
    before, (kernel, bias) = copies(within), anchor(within)
    expected = X @ kernel + bias
    sent = record_collectives(monkeypatch)
    np.testing.assert_allclose(within.predict(X, verbose=0), expected, rtol=1e-5)
    first, _ = np.split(within.predict_on_batch(X), 2)  # one of each replica
    np.testing.assert_allclose(first, expected, rtol=1e-5)
    loss = within.evaluate(X, Y, batch_size=32, verbose=0)
    np.testing.assert_allclose(loss, np.mean((expected - Y) ** 2), rtol=1e-5)
    assert not sent
    assert_equal(copies(within), before)
    with within.optimizer.consensus_weights(), within.optimizer.consensus_weights():
        assert_equal(copies(within), [[w, w] for w in anchor(within)])
    assert_equal(copies(within), before)


@pytest.mark.parametrize("where", ["on_test_batch_end", "on_predict_batch_end"])
def test_an_error_restores_the_weights(within, where):
    before, seen = copies(within), []

    def fail(batch, logs):
        seen.extend(copies(within))
        raise KeyError

    callback = keras.callbacks.Callback()
    setattr(callback, where, fail)
    loop, data = within.evaluate, (X, Y)
    if "predict" in where:
        loop, data = within.predict, (X,)
    with pytest.raises(KeyError):
        loop(*data, verbose=0, callbacks=[callback])
    assert_equal(seen, [[w, w] for w in anchor(within)])
    assert_equal(copies(within), before)
    assert not within.optimizer._swapped_weights.own_values


def test_weights_that_are_set_begin_a_round(strategies):
    model = make_model(strategies[2])
    fit(model, PERIOD + 2)
    rounds = model.optimizer.stats.steps
    given = [np.full((5, 1), 0.5, "float32"), np.zeros(1, "float32")]
    model.set_weights(given)
    assert_equal(model.get_weights(), given)
    np.testing.assert_allclose(model.predict(X, verbose=0), X @ given[0], rtol=1e-5)
    fit(model, PERIOD - 1)
    assert_equal(anchor(model), given)
    assert model.optimizer.stats.steps == rounds
    fit(model, 1)
    assert model.optimizer.stats.steps == rounds + 1


@pytest.mark.slow
def test_the_best_weights_are_those_that_were_measured(strategies):
    """All workers restore the anchor, by which the validation loss was."""
    model = make_model(strategies[2])
    worst = keras.callbacks.EarlyStopping(
        mode="max", patience=1, restore_best_weights=True
    )
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(logs["val_loss"])
    )
    fit(
        model, 4, epochs=4, validation_data=(X, Y), validation_batch_size=32,
        callbacks=[note, worst],
    )  # fmt: skip
    assert len(seen) == 2
    assert model.optimizer._weights_differ() is False
    assert_equal(copies(model), [[w, w] for w in model.get_weights()])
    found = model.evaluate(X, Y, batch_size=32, verbose=0)
    np.testing.assert_allclose(found, max(seen), rtol=1e-6)


@pytest.mark.parametrize("more", [0, 1])
def test_moving_averages_of_the_anchor_are_what_is_seen(strategies, more):
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        optimizer = tf_dgc.LocalOptimizer(
            *(keras.optimizers.SGD(0.5), 2),
            outer=keras.optimizers.SGD(1.0, use_ema=True),
        )
        model.compile(optimizer, "mse", run_eagerly=True)
    fit(model, 2 + more)
    averages = optimizer.outer_optimizer._model_variables_moving_average
    assert_equal(copies(model), copies(model, averages))
    assert_equal(model.get_weights(), [a for a, _ in copies(model, averages)])
    outputs = X @ averages[0].numpy() + averages[1].numpy()
    np.testing.assert_allclose(model.predict(X, verbose=0), outputs, rtol=1e-4)


def test_what_would_be_lost_is_refused(within, tmp_path):
    store = {}
    within.optimizer.save_own_variables(store)
    store = {name: np.array(value) for name, value in store.items()}
    weights = within.get_weights()
    for lost in (
        lambda: fit(within, 1),
        lambda: within.set_weights(weights),
        lambda: within.optimizer.load_own_variables(store),
        within.optimizer.consensus,
    ):
        with (
            pytest.raises(RuntimeError, match="would be lost here"),
            within.optimizer.consensus_weights(),
        ):
            lost()


@pytest.mark.slow
def test_files_hold_the_anchor_and_all_to_go_on(within, strategies, tmp_path):
    before, middle = copies(within), anchor(within)
    within.save(tmp_path / "model.keras")
    within.save_weights(tmp_path / "model.weights.h5")
    tf_dgc.saving.save_model(within, tmp_path / "ours.keras")
    assert_equal(copies(within), before)
    for name in ("model", "ours"):
        path = tmp_path / f"{name}.keras"
        plain = keras.models.load_model(path, compile=False)
        assert_equal(plain.get_weights(), middle)
        with strategies[2].scope():
            again = keras.models.load_model(path)
        assert_equal(copies(again), before)
        assert_equal(anchor(again), middle)
        # Its first loop, of which nothing was known before.
        given = again.predict(X, verbose=0)
        np.testing.assert_allclose(given, plain.predict(X, verbose=0), rtol=1e-6)
        assert_equal(copies(again), before)
    plain.load_weights(tmp_path / "model.weights.h5")
    assert_equal(plain.get_weights(), middle)


@pytest.mark.slow
def test_within_fit(strategies, tmp_path):
    """Validation and callbacks that save see the anchor, and training goes on."""
    saved = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kernel, bias = anchor(self.model)
            saved.append([kernel, bias])
            loss = np.mean((X @ kernel + bias - Y) ** 2)
            np.testing.assert_allclose(logs["val_loss"], loss, rtol=1e-5)

    def paths(epoch):
        return tmp_path / f"{epoch}.keras"

    model, quiet = (make_model(strategies[2]) for _ in range(2))
    checkpoint = keras.callbacks.ModelCheckpoint(paths("{epoch}"))
    settings = {"epochs": 2, "validation_data": (X, Y), "validation_batch_size": 32}
    fit(model, 4, callbacks=[Look(), checkpoint], **settings)
    fit(quiet, 4, epochs=2)
    assert_equal(copies(model), copies(quiet))
    for epoch, weights in enumerate(saved):
        loaded = keras.models.load_model(paths(epoch + 1), compile=False)
        assert_equal(loaded.get_weights(), weights)


@pytest.mark.slow
def test_a_backup_within_a_round(strategies, tmp_path):
    """Training goes on bit for bit."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == PERIOD:
                raise KeyError

    def backup():
        return tf_dgc.callbacks.BackupAndRestore(
            tmp_path, save_freq=PERIOD + 1, delete_checkpoint=False
        )

    whole, stopped, again = (make_model(strategies[2]) for _ in range(3))
    fit(whole, 4, epochs=2)
    with pytest.raises(KeyError):
        fit(stopped, 4, epochs=2, callbacks=[backup(), Stop()])
    fit(again, 4, epochs=2, callbacks=[backup()])
    assert_equal(copies(again), copies(whole))


def test_at_a_consensus_nothing_is_changed(strategies):
    model = make_model(strategies[2], scaled=True)
    optimizer = model.optimizer.inner_optimizer
    with optimizer.consensus_weights():  # nor before the first step
        pass
    fit(model, PERIOD)
    with optimizer.consensus_weights():
        assert not optimizer._swapped_weights.own_values
    fit(model, 1)
    before = copies(model)
    with tf_dgc.multiworker.consensus_weights.consensus_weights(model, "save"):
        assert optimizer._swapped_weights.own_values
    assert_equal(copies(model), before)


def test_a_save_that_cannot_see_the_anchor_is_refused(strategies, tmp_path):
    model = make_model(strategies[2])

    def step():
        model.optimizer.apply([v * 0 + 1 for v in model.trainable_variables])

    with strategies[2].scope():
        model.optimizer.build(model.trainable_variables)
    strategies[2].run(step)
    with pytest.raises(ValueError, match=r"call `optimizer.consensus\(\)` on every"):
        model.save(tmp_path / "model.keras")
    tf_dgc.saving.save_model(model, tmp_path / "ours.keras")
    model.optimizer.consensus()
    model.save(tmp_path / "model.keras")


def saved_model(model, path):
    model.serve = tf.function(
        lambda x: model(x), input_signature=[tf.TensorSpec((None, 5))]
    )
    tf.saved_model.save(model, str(path), signatures=model.serve)


SAVES = [saved_model, lambda m, p: keras.saving.save_model(m, p.with_suffix(".h5"))]


@pytest.mark.parametrize("save", SAVES)
def test_other_files_hold_the_anchor_within_agreed_alone(strategies, tmp_path, save):
    model = make_model(strategies[2])
    fit(model, PERIOD + 1)
    kernel, bias = anchor(model)
    with pytest.raises(ValueError, match=r"call `optimizer.consensus\(\)` on every"):
        save(model, tmp_path / "own")
    with model.optimizer.consensus_weights():
        save(model, tmp_path / "model")
    if save is saved_model:
        serve = tf.saved_model.load(tmp_path / "model").signatures["serving_default"]
        (found,) = serve(tf.constant(X)).values()
        np.testing.assert_allclose(found, X @ kernel + bias, rtol=1e-5)
    else:
        loaded = keras.models.load_model(tmp_path / "model.h5", compile=False)
        assert_equal(loaded.get_weights(), [kernel, bias])


# --- consensus distance --------------------------------------------------------------


def make_tracking(tracks=True):
    return tf_dgc.LocalOptimizer(
        "sgd", 2, diagnostics=tf_dgc.Diagnostics(track_consensus_distance=tracks)
    )


@pytest.mark.parametrize("num_workers", [1, 3])
def test_drift_is_the_largest_distance_from_the_mean(strategies, num_workers):
    weights = initial_weights("float32")
    trainer = Trainer(strategies[num_workers], make_tracking, weights)
    assert trainer.optimizer.consensus_distance == 0
    one, other = make_gradients(num_workers, 2, "float32")
    one[0][0] *= 3
    trainer.step(one)
    trainer.step(other)
    moved = [
        np.concatenate([0.01 * num_workers * (a + b).ravel() for a, b in pairs])
        for pairs in (zip(*both, strict=True) for both in zip(one, other, strict=True))
    ]
    expected = max(np.linalg.norm(m - np.mean(moved, axis=0)) for m in moved)
    np.testing.assert_allclose(trainer.optimizer.consensus_distance, expected, rtol=0.1)
    stats = trainer.optimizer.stats
    plain = Trainer(strategies[num_workers], lambda: make_tracking(False), weights)
    for gradients in (one, other):
        plain.step(gradients)
    assert plain.optimizer.consensus_distance is None
    extra = stats.bytes_per_step - plain.optimizer.stats.bytes_per_step
    assert extra == synchronizer.DISTANCE_BYTES
    for a, b in zip(trainer.weights(), plain.weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_sketch_has_the_length_of_what_it_is_of():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(150, 41)).astype("float32") * rng.pareto(3, (150, 41))
    lengths = [
        float(tf.norm(synchronizer.sketch(tf.constant(values, tf.float32), [0, seed])))
        for seed in range(20)
    ]
    np.testing.assert_allclose(lengths, np.linalg.norm(values), rtol=0.12)
    np.testing.assert_allclose(np.mean(lengths), np.linalg.norm(values), rtol=0.02)


def test_points_that_are_not_finite_have_no_distance():
    points = [[3.0, 0.0], [np.nan, 1.0], [-3.0, 8.0]]
    assert synchronizer.largest_distance(tf.constant(points)) == 5


@pytest.fixture(scope="module")
def nested(strategies):
    """Return a model with a submodel, within a round, and what the submodel should say.

    And the anchor of the submodel's weights.
    """
    with strategies[2].scope():
        keras.utils.set_random_seed(0)
        encoder = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(3)], name="encoder"
        )
        inputs = keras.Input((5,))
        model = keras.Model(inputs, keras.layers.Dense(1)(encoder(inputs)))
        model.compile(tf_dgc.diloco(O.Adam(0.1), PERIOD), "mse", run_eagerly=True)
        model.encoder = encoder
    fit(model, PERIOD + 1)
    kernel, bias = (
        replicas[0] for replicas in copies(model, model.optimizer.anchor[:2])
    )
    one, other = copies(model)[0]
    assert not np.array_equal(one, other)
    return model, X @ kernel + bias, [kernel, bias]


def test_a_submodel_sees_the_anchor(nested, tmp_path):
    """As the model itself does, from its first use on."""
    model, expected, anchor = nested
    before = copies(model)
    encoder = model.encoder
    np.testing.assert_allclose(encoder.predict_on_batch(X)[:64], expected, rtol=1e-4)
    np.testing.assert_allclose(encoder.predict(X, verbose=0), expected, rtol=1e-4)
    assert_equal(encoder.get_weights(), anchor)
    encoder.save(tmp_path / "encoder.keras")
    saved = keras.models.load_model(tmp_path / "encoder.keras", compile=False)
    assert_equal(saved.get_weights(), anchor)
    with model.distribute_strategy.scope():
        encoder.compile(loss="mse")
    loss = encoder.evaluate(X, np.zeros((64, 3)), batch_size=32, verbose=0)
    np.testing.assert_allclose(loss, np.mean(expected**2), rtol=1e-4)
    assert_equal(copies(model), before)


def test_a_model_that_shares_layers_sees_the_anchor(nested):
    """Also one that is made of them later."""
    model, expected, anchor = nested
    before = copies(model)
    with model.distribute_strategy.scope():
        features = keras.Model(model.inputs, model.layers[-1].input)
    np.testing.assert_allclose(features.predict(X, verbose=0), expected, rtol=1e-4)
    assert_equal(features.get_weights(), anchor)
    assert_equal(copies(model), before)


def test_a_submodel_within_consensus_weights(nested):
    """What is set there would be lost; else it is a move of this worker."""
    model, _, anchor = nested
    encoder = model.encoder
    with (
        model.optimizer.consensus_weights(),
        pytest.raises(RuntimeError, match="To set weights would be lost here"),
    ):
        encoder.set_weights(anchor)
    before = copies(model)
    rounds = model.optimizer.stats.steps
    encoder.set_weights([anchor[0] + 1, anchor[1]])
    assert_equal(copies(model)[0], [anchor[0] + 1] * 2)
    assert_equal(copies(model)[2:], before[2:])
    assert_equal(encoder.get_weights(), anchor)
    fit(model, PERIOD - 1)
    assert model.optimizer.stats.steps == rounds + 1


def test_a_model_without_weights_of_the_optimizer_is_left_alone(nested):
    model, _, _ = nested
    with model.distribute_strategy.scope():
        other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    kernel, bias = other.get_weights()
    predicted = other.predict(X, verbose=0)
    np.testing.assert_allclose(predicted, X @ kernel + bias, rtol=1e-4)
    assert consensus_weights._optimizers_of(other) == []


@pytest.mark.parametrize("hold", [lambda o: [o], lambda o: (o,), lambda o: {"own": o}])
def test_optimizers_that_a_model_holds_together(within, hold, monkeypatch):
    """As those that are its attributes, they are asked before it evaluates."""
    own = within.optimizer
    monkeypatch.setattr(within, "optimizer", None)
    monkeypatch.setattr(within, "optimizers", hold(own), raising=False)
    assert consensus_weights._local_optimizers(within) == [own]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("delay", [0, 1])
def test_weights_of_a_file_without_a_state_begin_a_round(
    strategies, tmp_path, number, delay
):
    """Keras asks the optimizer to load of such a file, too."""

    def make(rate):
        with strategies[number].scope():
            optimizer = tf_dgc.local_sgd(O.SGD(rate), PERIOD, delay=delay)
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
            model.compile(optimizer, "mse", run_eagerly=True)
        return model

    plain = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    plain.layers[0].kernel.assign(np.full((5, 1), 100.0))
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = make(1e-6)
    fit(model, 2)
    with pytest.warns(UserWarning, match="there is none"):
        model.load_weights(tmp_path / "plain.weights.h5")
    np.testing.assert_array_equal(copies(model)[0], np.full((number, 5, 1), 100.0))
    np.testing.assert_array_equal(model.get_weights()[0], np.full((5, 1), 100.0))
    fit(model, 2 * PERIOD)
    model.optimizer.consensus()
    np.testing.assert_allclose(copies(model)[0], np.full((number, 5, 1), 100.0), 0.1)

"""Evaluation, saving and loading of a model whose workers are within a round."""

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


def local_copies(model, variables=None):
    """Return `values[variable][replica]`."""
    local_values = model.distribute_strategy.experimental_local_results
    variables = model.trainable_variables if variables is None else variables
    return [[c.numpy() for c in local_values(v._value)] for v in variables]


def anchor(model):
    return [replicas[0] for replicas in local_copies(model, model.optimizer.anchor)]


def check_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def model(strategies):
    """Return a model of two workers, one step into its second round."""
    model = make_model(strategies[2])
    fit(model, PERIOD + 1)
    (kernel, other), _ = local_copies(model)
    assert not np.array_equal(kernel, other)
    assert not np.array_equal(kernel, anchor(model)[0])
    return model


def test_evaluation_and_prediction_use_the_anchor(model, monkeypatch):
    before = local_copies(model)
    kernel, bias = anchor(model)
    expected = X @ kernel + bias
    sent = record_collectives(monkeypatch)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-5)
    first, _ = np.split(model.predict_on_batch(X), 2)  # one half per replica
    np.testing.assert_allclose(first, expected, rtol=1e-5)
    loss = model.evaluate(X, Y, batch_size=32, verbose=0)
    np.testing.assert_allclose(loss, np.mean((expected - Y) ** 2), rtol=1e-5)
    assert not sent
    check_equal(local_copies(model), before)
    with model.optimizer.consensus_weights(), model.optimizer.consensus_weights():
        check_equal(local_copies(model), [[w, w] for w in anchor(model)])
    check_equal(local_copies(model), before)


@pytest.mark.parametrize("hook", ["on_test_batch_end", "on_predict_batch_end"])
def test_weights_are_restored_after_an_error(model, hook):
    before = local_copies(model)
    weights_in_loop = []

    def fail(batch, logs):
        weights_in_loop.extend(local_copies(model))
        raise KeyError

    callback = keras.callbacks.Callback()
    setattr(callback, hook, fail)
    loop, data = model.evaluate, (X, Y)
    if "predict" in hook:
        loop, data = model.predict, (X,)
    with pytest.raises(KeyError):
        loop(*data, verbose=0, callbacks=[callback])
    check_equal(weights_in_loop, [[w, w] for w in anchor(model)])
    check_equal(local_copies(model), before)
    assert not model.optimizer._swapped_weights.own_values


def test_set_weights_start_a_round(strategies):
    model = make_model(strategies[2])
    fit(model, PERIOD + 2)
    rounds = model.optimizer.stats.steps
    weights = [np.full((5, 1), 0.5, "float32"), np.zeros(1, "float32")]
    model.set_weights(weights)
    check_equal(model.get_weights(), weights)
    np.testing.assert_allclose(model.predict(X, verbose=0), X @ weights[0], rtol=1e-5)
    fit(model, PERIOD - 1)
    check_equal(anchor(model), weights)
    assert model.optimizer.stats.steps == rounds
    fit(model, 1)
    assert model.optimizer.stats.steps == rounds + 1


@pytest.mark.slow
def test_early_stopping_restores_the_evaluated_weights(strategies):
    """All workers restore the anchor, which gave the validation loss."""
    model = make_model(strategies[2])
    early_stopping = keras.callbacks.EarlyStopping(
        mode="max", patience=1, restore_best_weights=True
    )
    losses = []
    recorder = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: losses.append(logs["val_loss"])
    )
    fit(
        model, 4, epochs=4, validation_data=(X, Y), validation_batch_size=32,
        callbacks=[recorder, early_stopping],
    )  # fmt: skip
    assert len(losses) == 2
    assert model.optimizer._weights_differ() is False
    check_equal(local_copies(model), [[w, w] for w in model.get_weights()])
    loss = model.evaluate(X, Y, batch_size=32, verbose=0)
    np.testing.assert_allclose(loss, max(losses), rtol=1e-6)


@pytest.mark.parametrize("extra_steps", [0, 1])
def test_outer_moving_averages_replace_the_weights(strategies, extra_steps):
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        optimizer = tf_dgc.LocalOptimizer(
            keras.optimizers.SGD(0.5), 2, outer=keras.optimizers.SGD(1.0, use_ema=True)
        )
        model.compile(optimizer, "mse", run_eagerly=True)
    fit(model, 2 + extra_steps)
    averages = optimizer.outer_optimizer._model_variables_moving_average
    check_equal(local_copies(model), local_copies(model, averages))
    check_equal(model.get_weights(), [a for a, _ in local_copies(model, averages)])
    outputs = X @ averages[0].numpy() + averages[1].numpy()
    np.testing.assert_allclose(model.predict(X, verbose=0), outputs, rtol=1e-4)


def test_changes_within_consensus_weights_raise(model, tmp_path):
    store = {}
    model.optimizer.save_own_variables(store)
    store = {name: np.array(value) for name, value in store.items()}
    weights = model.get_weights()
    for change in (
        lambda: fit(model, 1),
        lambda: model.set_weights(weights),
        lambda: model.optimizer.load_own_variables(store),
        model.optimizer.consensus,
    ):
        with (
            pytest.raises(RuntimeError, match="would be lost here"),
            model.optimizer.consensus_weights(),
        ):
            change()


@pytest.mark.slow
def test_files_hold_the_anchor_and_the_state(model, strategies, tmp_path):
    before, expected = local_copies(model), anchor(model)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    tf_dgc.saving.save_model(model, tmp_path / "ours.keras")
    check_equal(local_copies(model), before)
    for name in ("model", "ours"):
        path = tmp_path / f"{name}.keras"
        plain = keras.models.load_model(path, compile=False)
        check_equal(plain.get_weights(), expected)
        with strategies[2].scope():
            loaded = keras.models.load_model(path)
        check_equal(local_copies(loaded), before)
        check_equal(anchor(loaded), expected)
        # The first loop of the loaded model.
        outputs = loaded.predict(X, verbose=0)
        np.testing.assert_allclose(outputs, plain.predict(X, verbose=0), rtol=1e-6)
        check_equal(local_copies(loaded), before)
    plain.load_weights(tmp_path / "model.weights.h5")
    check_equal(plain.get_weights(), expected)


@pytest.mark.slow
def test_validation_and_checkpoints_within_fit(strategies, tmp_path):
    """They use the anchor, and training continues unchanged."""
    anchors = []

    class AnchorRecorder(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kernel, bias = anchor(self.model)
            anchors.append([kernel, bias])
            loss = np.mean((X @ kernel + bias - Y) ** 2)
            np.testing.assert_allclose(logs["val_loss"], loss, rtol=1e-5)

    def paths(epoch):
        return tmp_path / f"{epoch}.keras"

    model, plain_model = (make_model(strategies[2]) for _ in range(2))
    checkpoint = keras.callbacks.ModelCheckpoint(paths("{epoch}"))
    settings = {"epochs": 2, "validation_data": (X, Y), "validation_batch_size": 32}
    fit(model, 4, callbacks=[AnchorRecorder(), checkpoint], **settings)
    fit(plain_model, 4, epochs=2)
    check_equal(local_copies(model), local_copies(plain_model))
    for epoch, weights in enumerate(anchors):
        loaded = keras.models.load_model(paths(epoch + 1), compile=False)
        check_equal(loaded.get_weights(), weights)


@pytest.mark.slow
def test_backup_within_a_round(strategies, tmp_path):
    """Training resumes bit for bit."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == PERIOD:
                raise KeyError

    def backup():
        return tf_dgc.callbacks.BackupAndRestore(
            tmp_path, save_freq=PERIOD + 1, delete_checkpoint=False
        )

    uninterrupted, interrupted, resumed = (make_model(strategies[2]) for _ in range(3))
    fit(uninterrupted, 4, epochs=2)
    with pytest.raises(KeyError):
        fit(interrupted, 4, epochs=2, callbacks=[backup(), Stop()])
    fit(resumed, 4, epochs=2, callbacks=[backup()])
    check_equal(local_copies(resumed), local_copies(uninterrupted))


def test_weights_are_not_swapped_at_a_consensus(strategies):
    model = make_model(strategies[2], scaled=True)
    optimizer = model.optimizer.inner_optimizer
    with optimizer.consensus_weights():  # not built yet
        pass
    fit(model, PERIOD)
    with optimizer.consensus_weights():
        assert not optimizer._swapped_weights.own_values
    fit(model, 1)
    before = local_copies(model)
    with tf_dgc.multiworker.consensus_weights.consensus_weights(model, "save"):
        assert optimizer._swapped_weights.own_values
    check_equal(local_copies(model), before)


def test_save_outside_of_keras_loops_raises(strategies, tmp_path):
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


def export_saved_model(model, path):
    model.serve = tf.function(
        lambda x: model(x), input_signature=[tf.TensorSpec((None, 5))]
    )
    tf.saved_model.save(model, str(path), signatures=model.serve)


def save_h5(model, path):
    keras.saving.save_model(model, path.with_suffix(".h5"))


@pytest.mark.parametrize("save", [export_saved_model, save_h5])
def test_other_formats_need_consensus_weights(strategies, tmp_path, save):
    model = make_model(strategies[2])
    fit(model, PERIOD + 1)
    kernel, bias = anchor(model)
    with pytest.raises(ValueError, match=r"call `optimizer.consensus\(\)` on every"):
        save(model, tmp_path / "own")
    with model.optimizer.consensus_weights():
        save(model, tmp_path / "model")
    if save is export_saved_model:
        serve = tf.saved_model.load(tmp_path / "model").signatures["serving_default"]
        (outputs,) = serve(tf.constant(X)).values()
        np.testing.assert_allclose(outputs, X @ kernel + bias, rtol=1e-5)
    else:
        loaded = keras.models.load_model(tmp_path / "model.h5", compile=False)
        check_equal(loaded.get_weights(), [kernel, bias])


# --- consensus distance ---------------------------------------------------------------


def make_tracking(tracks=True):
    return tf_dgc.LocalOptimizer(
        "sgd", 2, diagnostics=tf_dgc.Diagnostics(track_consensus_distance=tracks)
    )


@pytest.mark.parametrize("num_workers", [1, 3])
def test_consensus_distance_is_the_largest_from_the_mean(strategies, num_workers):
    weights = initial_weights("float32")
    trainer = Trainer(strategies[num_workers], make_tracking, weights)
    assert trainer.optimizer.consensus_distance == 0
    first_step, second_step = make_gradients(num_workers, 2, "float32")
    first_step[0][0] *= 3
    trainer.step(first_step)
    trainer.step(second_step)
    deltas = []
    for first, second in zip(first_step, second_step, strict=True):
        pairs = zip(first, second, strict=True)
        deltas.append(
            np.concatenate([0.01 * num_workers * (a + b).ravel() for a, b in pairs])
        )
    expected = max(np.linalg.norm(d - np.mean(deltas, axis=0)) for d in deltas)
    np.testing.assert_allclose(trainer.optimizer.consensus_distance, expected, rtol=0.1)
    stats = trainer.optimizer.stats
    plain = Trainer(strategies[num_workers], lambda: make_tracking(False), weights)
    for gradients in (first_step, second_step):
        plain.step(gradients)
    assert plain.optimizer.consensus_distance is None
    extra = stats.bytes_per_step - plain.optimizer.stats.bytes_per_step
    assert extra == synchronizer.DISTANCE_BYTES
    for a, b in zip(trainer.weights(), plain.weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_sketch_preserves_the_norm():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(150, 41)).astype("float32") * rng.pareto(3, (150, 41))
    lengths = [
        float(tf.norm(synchronizer.sketch(tf.constant(values, tf.float32), [0, seed])))
        for seed in range(20)
    ]
    np.testing.assert_allclose(lengths, np.linalg.norm(values), rtol=0.12)
    np.testing.assert_allclose(np.mean(lengths), np.linalg.norm(values), rtol=0.02)


def test_nonfinite_points_are_left_out_of_the_distance():
    points = [[3.0, 0.0], [np.nan, 1.0], [-3.0, 8.0]]
    assert synchronizer.largest_distance(tf.constant(points)) == 5


@pytest.fixture(scope="module")
def nested(strategies):
    """Return a model with a submodel within a round, and the submodel's expectations.

    These are its outputs with the anchor, and the anchor of its weights.
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
        replicas[0] for replicas in local_copies(model, model.optimizer.anchor[:2])
    )
    one, other = local_copies(model)[0]
    assert not np.array_equal(one, other)
    return model, X @ kernel + bias, [kernel, bias]


def test_submodel_uses_the_anchor(nested, tmp_path):
    """Like the model itself, from its first use on."""
    model, expected, anchor = nested
    before = local_copies(model)
    encoder = model.encoder
    np.testing.assert_allclose(encoder.predict_on_batch(X)[:64], expected, rtol=1e-4)
    np.testing.assert_allclose(encoder.predict(X, verbose=0), expected, rtol=1e-4)
    check_equal(encoder.get_weights(), anchor)
    encoder.save(tmp_path / "encoder.keras")
    saved = keras.models.load_model(tmp_path / "encoder.keras", compile=False)
    check_equal(saved.get_weights(), anchor)
    with model.distribute_strategy.scope():
        encoder.compile(loss="mse")
    loss = encoder.evaluate(X, np.zeros((64, 3)), batch_size=32, verbose=0)
    np.testing.assert_allclose(loss, np.mean(expected**2), rtol=1e-4)
    check_equal(local_copies(model), before)


def test_model_with_shared_layers_uses_the_anchor(nested):
    """Also if it is created later."""
    model, expected, anchor = nested
    before = local_copies(model)
    with model.distribute_strategy.scope():
        features = keras.Model(model.inputs, model.layers[-1].input)
    np.testing.assert_allclose(features.predict(X, verbose=0), expected, rtol=1e-4)
    check_equal(features.get_weights(), anchor)
    check_equal(local_copies(model), before)


def test_set_weights_of_a_submodel(nested):
    """This raises within `consensus_weights`; otherwise it is a local update."""
    model, _, anchor = nested
    encoder = model.encoder
    with (
        model.optimizer.consensus_weights(),
        pytest.raises(RuntimeError, match="To set weights would be lost here"),
    ):
        encoder.set_weights(anchor)
    before = local_copies(model)
    rounds = model.optimizer.stats.steps
    encoder.set_weights([anchor[0] + 1, anchor[1]])
    check_equal(local_copies(model)[0], [anchor[0] + 1] * 2)
    check_equal(local_copies(model)[2:], before[2:])
    check_equal(encoder.get_weights(), anchor)
    fit(model, PERIOD - 1)
    assert model.optimizer.stats.steps == rounds + 1


def test_unrelated_model_is_unchanged(nested):
    model, _, _ = nested
    with model.distribute_strategy.scope():
        unrelated = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    kernel, bias = unrelated.get_weights()
    outputs = unrelated.predict(X, verbose=0)
    np.testing.assert_allclose(outputs, X @ kernel + bias, rtol=1e-4)
    assert consensus_weights._optimizers_of(unrelated) == []


@pytest.mark.parametrize("hold", [lambda o: [o], lambda o: (o,), lambda o: {"own": o}])
def test_finds_optimizers_in_a_collection(model, hold, monkeypatch):
    """They are found like those that are attributes of the model."""
    optimizer = model.optimizer
    monkeypatch.setattr(model, "optimizer", None)
    monkeypatch.setattr(model, "optimizers", hold(optimizer), raising=False)
    assert consensus_weights._local_optimizers(model) == [optimizer]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("delay", [0, 1])
def test_weights_file_without_a_state_starts_a_round(
    strategies, tmp_path, num_workers, delay
):
    """Keras lets the optimizer load from such a file, too."""

    def make_model_with_rate(rate):
        with strategies[num_workers].scope():
            optimizer = tf_dgc.local_sgd(O.SGD(rate), PERIOD, delay=delay)
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
            model.compile(optimizer, "mse", run_eagerly=True)
        return model

    plain = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    plain.layers[0].kernel.assign(np.full((5, 1), 100.0))
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = make_model_with_rate(1e-6)
    fit(model, 2)
    with pytest.warns(UserWarning, match="there is none"):
        model.load_weights(tmp_path / "plain.weights.h5")
    np.testing.assert_array_equal(
        local_copies(model)[0], np.full((num_workers, 5, 1), 100.0)
    )
    np.testing.assert_array_equal(model.get_weights()[0], np.full((5, 1), 100.0))
    fit(model, 2 * PERIOD)
    model.optimizer.consensus()
    np.testing.assert_allclose(
        local_copies(model)[0], np.full((num_workers, 5, 1), 100.0), 0.1
    )

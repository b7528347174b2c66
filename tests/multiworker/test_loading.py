"""Optimizers that load files of other optimizers or of frozen models, and copies."""

import copy
import json
import pickle
import warnings

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc.multiworker import consensus
from tf_dgc.optimizers import base

X = np.random.default_rng(0).normal(size=(32, 40)).astype("float32")
Y = X[:, :6]
SEVERAL_LAYERS = 2


def sgd(**settings):
    return keras.optimizers.SGD(0.01, momentum=0.9, **settings)


def dgc(**settings):
    return tf_dgc.DGCOptimizer(sgd(**settings), 0.9, min_compress_size=0)


def local(**settings):
    return tf_dgc.LocalOptimizer(sgd(), 2, **settings)


def make_model(optimizer):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(6) for _ in range(SEVERAL_LAYERS)]
    model = keras.Sequential([keras.Input((40,)), *layers])
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def fit(model, epochs=1, callbacks=()):
    model.fit(X, Y, 16, epochs, verbose=0, shuffle=False, callbacks=list(callbacks))


def make_trained_model(optimizer):
    model = make_model(optimizer)
    fit(model)
    return model


@pytest.mark.parametrize(
    ("other", "make"),
    [
        (sgd, dgc),
        # An optimizer of as many variables.
        pytest.param(keras.optimizers.Adam, dgc, marks=pytest.mark.slow),
        (sgd, lambda: tf_dgc.CompressedOptimizer(keras.optimizers.SGD(0.1), "top_k")),
    ],
)
def test_weights_of_a_dense_run(tmp_path, other, make):
    """The state of another optimizer is skipped with a warning, as by Keras."""
    path = tmp_path / "m.weights.h5"
    dense = make_trained_model(other())
    fit(dense)
    dense.save_weights(path)
    for is_trained in (False, True):
        model = make_trained_model(make()) if is_trained else make_model(make())
        before = int(model.optimizer.iterations)
        with pytest.warns(UserWarning, match=r"not of this package, and \w+ stays"):
            model.load_weights(path)
        assert int(model.optimizer.iterations) == before
        for value, expected in zip(model.weights, dense.weights, strict=True):
            np.testing.assert_array_equal(value, expected)
        fit(model)


def test_weights_that_were_saved_before_any_step(tmp_path):
    """Nothing is loaded: iterations without the rest of the state would not match."""
    path = tmp_path / "m.weights.h5"
    make_model(dgc()).save_weights(path)
    model = make_trained_model(dgc())
    before = [v.numpy() for v in model.optimizer.variables]
    with pytest.warns(UserWarning, match="saved before any step, and this one's is"):
        model.load_weights(path)
    after = [v.numpy() for v in model.optimizer.variables]
    np.testing.assert_equal(after, before)
    new = make_model(dgc())
    new.optimizer.build(new.trainable_variables)
    new.load_weights(path)  # nothing is lost


def test_residuals_are_not_lost_silently(tmp_path):
    path = tmp_path / "m.weights.h5"
    make_trained_model(dgc()).save_weights(path)
    with pytest.raises(ValueError, match="skip_mismatch=True"):
        make_model(dgc()).load_weights(path)
    with pytest.raises(ValueError, match="Load with the settings"):
        make_trained_model(tf_dgc.DGCOptimizer(sgd(), 0.0)).load_weights(path)
    other = tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.3), 0.9)
    model = make_trained_model(other)
    fit(model)
    before = [v.numpy() for v in other.variables]
    with pytest.warns(UserWarning, match="could not be loaded"):
        model.load_weights(path, skip_mismatch=True)
    after = [v.numpy() for v in other.variables]
    np.testing.assert_equal(after, before)  # also of the inner optimizer


OTHER_STRUCTURES = {
    "averages": (lambda: dgc(), lambda: dgc(use_ema=True)),
    "no averages": (lambda: dgc(use_ema=True), lambda: dgc()),
    "moments": (
        lambda: tf_dgc.DGCOptimizer(keras.optimizers.Adam(0.01), 0.9),
        lambda: tf_dgc.DGCOptimizer(keras.optimizers.Adam(0.01, use_ema=True), 0.9),
    ),
    "outer": (
        lambda: local(),
        lambda: local(outer=sgd(use_ema=True)),
    ),
}


@pytest.mark.parametrize("case", OTHER_STRUCTURES)
def test_nothing_is_loaded_from_another_inner_optimizer(tmp_path, case):
    """Keras would skip only the inner part, so that iterations would not match."""
    make, make_other = OTHER_STRUCTURES[case]
    model, other = make_trained_model(make()), make_model(make_other())
    fit(other)
    path = tmp_path / "m.weights.h5"
    iterations = int(other.optimizer.iterations)
    fit(model)
    model.save_weights(path)
    checkpoint = tf.train.Checkpoint(o=model.optimizer).write(str(tmp_path / "c"))
    error = r"optimizer within the saved .* this has .*: its kind, `use_ema`"
    with pytest.raises(ValueError, match=error):
        other.load_weights(path)
    assert int(other.optimizer.iterations) == iterations
    with pytest.raises(ValueError, match=error):
        tf.train.Checkpoint(o=other.optimizer).read(checkpoint)


def test_a_rate_replaced_by_a_schedule_loses_nothing(tmp_path):
    """Even though the wrapper, not the SGD, has the momentum."""
    model, path = make_trained_model(dgc()), tmp_path / "m.weights.h5"
    model.save_weights(path)
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.5)
    inner = keras.optimizers.SGD(rate, momentum=0.9)
    other = make_model(tf_dgc.DGCOptimizer(inner, 0.9, min_compress_size=0))
    other.optimizer.build(other.trainable_variables)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        other.load_weights(path)
    assert int(other.optimizer.iterations) == int(model.optimizer.iterations)


def test_a_frozen_model(tmp_path):
    model = make_trained_model(dgc())
    model.trainable = False
    model.save(tmp_path / "m.keras")
    with pytest.warns(UserWarning, match="no trainable variables"):
        again = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, 32, 0))


def test_a_model_with_a_layer_frozen_after_training(tmp_path):
    model = make_trained_model(dgc())
    model.layers[0].trainable = False
    model.save(tmp_path / "m.keras")
    with pytest.raises(ValueError, match=r"were trainable when .* compile=False"):
        keras.models.load_model(tmp_path / "m.keras")
    keras.models.load_model(tmp_path / "m.keras", compile=False)


def test_local_steps_that_accumulate_resume(tmp_path):
    def make_accumulating():
        adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        return tf_dgc.LocalOptimizer(adam, 3)

    whole = make_model(make_accumulating())
    fit(whole, 4)
    folder = tmp_path / "backup"
    backup = tf_dgc.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    fit(make_model(make_accumulating()), 2, [backup])
    again = make_model(make_accumulating())
    fit(again, 4, [tf_dgc.callbacks.BackupAndRestore(folder)])
    for value, expected in zip(again.weights, whole.weights, strict=True):
        np.testing.assert_array_equal(value, expected)
    again.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert int(loaded.optimizer.iterations) == int(again.optimizer.iterations)


@pytest.mark.parametrize("dtype", ["float32", "int64", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 2)])
def test_checksums_of_all_dtypes(dtype, shape):
    values = np.ones(shape, dtype)
    store = {"0": values}
    base.mark_store(store, base.describe_state(True, 1, 1, []))
    assert base.saved_names(store) == ["0"]
    checksum = base.saved_checksum(store, "0")
    assert checksum == base.saved_checksum({"0": values.copy()}, "0")
    if values.size:
        assert checksum != base.saved_checksum({"0": values + values}, "0")


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_swapped_averages(policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = make_model(dgc(use_ema=True))
        fit(model, 1, [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
    finally:
        keras.config.set_dtype_policy("float32")
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert not hasattr(dgc(), "_model_variables_moving_average")


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_a_copy_has_the_settings(copy_of):
    optimizer = dgc()
    assert copy_of(optimizer).get_config() == optimizer.get_config()
    built = make_trained_model(dgc()).optimizer
    with pytest.warns(UserWarning, match="begins without its state"):
        again = copy_of(built)
    assert not again.built
    assert again.get_config() == built.get_config()


def test_within_an_epoch_the_first_workers_logs_decide(tmp_path, monkeypatch):
    """Workers' logs differ there, and a worker that saves alone would wait."""
    saved = []

    class Checkpoint(tf_dgc.callbacks.ModelCheckpoint):
        def write(self, path):
            saved.append(path)

    first = iter([3.0, 4.0, 2.0, 2.5])
    notes = []
    stock = consensus.exchange_texts

    def exchange_texts(strategy, note, purpose):
        if purpose != "save":
            return stock(strategy, note, purpose)
        notes.append(json.loads(note))
        return {"worker 0": json.dumps({"loss": next(first)}), "worker 1": note}

    monkeypatch.setattr(consensus, "exchange_texts", exchange_texts)
    path = str(tmp_path / "{loss:.1f}.keras")
    settings = {"monitor": "loss", "mode": "min", "save_best_only": True}
    callback = Checkpoint(path, save_freq=3, **settings)
    model = make_model(dgc())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, 6, [callback])  # of two batches
    assert len(notes) == 4 and all(note["loss"] > 0 for note in notes)
    assert saved == [str(tmp_path / f"{loss}.keras") for loss in (3.0, 2.0)]


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_saved_model_that_holds_an_optimizer_can_be_loaded(
    strategies, tmp_path, number
):
    """Only this package knows the names of the workers' saved values."""
    path = str(tmp_path / "model")
    with strategies[number].scope():
        model = make_model(dgc())
    model.run_eagerly = False
    fit(model)
    tf.saved_model.save(model, path)
    serve = tf.saved_model.load(path).signatures["serving_default"]
    (name,) = serve.structured_input_signature[1]
    (outputs,) = serve(**{name: tf.constant(X)}).values()
    np.testing.assert_allclose(outputs, model(X), rtol=1e-5)
    tf.saved_model.save(tf.train.Checkpoint(optimizer=model.optimizer), path)
    saved = tf.saved_model.load(path).optimizer._variables
    assert len(saved) == len(model.optimizer._variables)
    first = model.optimizer.residual[0]
    local = first.local_values()[0]
    assert np.any(local)
    assert any(
        tuple(v.shape) == local.shape and np.array_equal(v, local) for v in saved
    )


@pytest.mark.parametrize(
    "other",
    [
        lambda: tf_dgc.DGCOptimizer(sgd(), 0.0),
        lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.01), 0.9),
    ],
)
def test_a_checkpoint_does_not_lose_residuals(tmp_path, other):
    model = make_trained_model(
        tf_dgc.DGCOptimizer(
            sgd(), 0.9, corrections=tf_dgc.Corrections(scale_before_accumulation=False)
        )
    )
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = saved.write(str(tmp_path / "c"))
    optimizer = other()
    corrections = tf_dgc.Corrections(scale_before_accumulation=False)
    config = {**optimizer.get_config(), "corrections": corrections}
    target = make_trained_model(type(optimizer).from_config(config))
    checkpoint = tf.train.Checkpoint(model=target, optimizer=target.optimizer)
    with pytest.raises(ValueError, match="Load with the settings it was saved with"):
        checkpoint.restore(path)

"""Saving and resuming in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer
from selection import rows

import tf_dgc
from tf_dgc.multiworker import consensus, saving
from tf_dgc.multiworker.worker_variables import PerWorkerVariable

SGD = keras.optimizers.SGD
STEPS = 4  # per epoch


def make_model(strategy, seed=0, dropout=0.0, loss_scale=False, **settings):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        layers = [keras.Input((20,)), keras.layers.Dense(60, activation="relu")]
        if dropout:
            layers.append(keras.layers.Dropout(dropout))
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        optimizer = make_optimizer()
        if loss_scale:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 16.0)
        eager = {"run_eagerly": not Trainer.always_traced}
        model.compile(optimizer, "mse", metrics=["mae"], **{**eager, **settings})
    return model


def make_optimizer():
    warmup = tf_dgc.schedules.PiecewiseConstantSparsity([6], [0.75, 0.99])
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    inner = SGD(rate, momentum=0.9, nesterov=True, clipnorm=1.0)
    return tf_dgc.DGCOptimizer(inner, warmup)


def fit(model, **settings):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16 * STEPS, 20)).astype("float32")
    data = {"x": x, "y": x.sum(axis=1, keepdims=True), "batch_size": 16}
    return model.fit(**data, shuffle=False, verbose=0, **settings).history


def all_values(model):
    """Return all variables of all workers, weights and state."""
    local = model.distribute_strategy.experimental_local_results
    return [
        [copy.numpy() for copy in local(v.value)]
        for v in [*model.variables, *model.optimizer.variables]
    ]


def assert_same(model, expected):
    for copies, others in zip(all_values(model), expected, strict=True):
        for copy, other in zip(copies, others, strict=True):
            np.testing.assert_array_equal(copy, other)


class Stop(Exception):
    """Ends a run that a later one resumes."""


class StopAfter(keras.callbacks.Callback):
    def __init__(self, batches):
        super().__init__()
        self.remaining = batches

    def on_train_batch_end(self, batch, logs=None):
        self.remaining -= 1
        if not self.remaining:
            raise Stop


# --- files ----------------------------------------------------------------------------


def save_and_load(kind, strategy, model, path):
    """Return a copy of a model, saved to and loaded from a file."""
    if kind == "keras":
        saving.save_model(model, path / "model.keras")
        with strategy.scope():
            return keras.models.load_model(path / "model.keras")
    other = make_model(strategy, seed=5)
    if kind != "before built":
        with strategy.scope():
            other.optimizer.build(other.trainable_variables)
    if kind == "weights":
        saving.save_weights(model, path / "model.weights.h5")
        other.load_weights(path / "model.weights.h5")
        return other
    with saving.checkpoint_directory(strategy, path) as directory:
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        tf.train.CheckpointManager(checkpoint, directory, 1).save()
    target = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    status = target.restore(tf.train.latest_checkpoint(path))
    if kind == "checkpoint":
        status.assert_existing_objects_matched()
    return other


@pytest.fixture(scope="module")
def after_an_epoch(strategies):
    """Return a model trained for an epoch, and the values after a second epoch."""
    model, continued = (make_model(strategies[2]) for _ in range(2))
    fit(model, epochs=1)
    fit(continued, epochs=1)
    fit(continued, epochs=2, initial_epoch=1)
    return model, all_values(continued)


@pytest.mark.parametrize(
    "kind",
    rows(
        ["keras", "weights", "checkpoint", "before built"],
        ["keras", "before built"],
    ),
)
def test_resumes_bit_for_bit(strategies, after_an_epoch, tmp_path, kind):
    """Schedules, ties and residuals are those of an uninterrupted run."""
    model, expected = after_an_epoch
    other = save_and_load(kind, strategies[2], model, tmp_path)
    fit(other, epochs=2, initial_epoch=1)
    assert_same(other, expected)


@pytest.mark.slow
def test_weights_with_a_loss_scale(strategies, tmp_path):
    """Keras's wrapper also saves totals over workers, which loading ignores."""
    model, other = (make_model(strategies[2], i, loss_scale=True) for i in range(2))
    fit(model, epochs=1)
    with strategies[2].scope():
        other.optimizer.build(other.trainable_variables)
    saving.save_weights(model, tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same(other, all_values(model))


@pytest.mark.parametrize("kind", rows(["keras", "checkpoint"], ["keras"]))
def test_another_number_of_workers(strategies, tmp_path, kind):
    model = make_model(strategies[2])
    fit(model, epochs=1)
    other = save_and_load(kind, strategies[1], model, tmp_path)
    for old, new in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    for old, new in zip(
        model.optimizer.residual, other.optimizer.residual, strict=True
    ):
        before, after = (v.gather().sum(axis=0, dtype="float64") for v in (old, new))
        np.testing.assert_allclose(after, before, rtol=2**-23)
        assert new.gather().shape[0] == 1
    fit(other, epochs=1)


def test_an_optimizer_that_is_not_built(tmp_path, strategies):
    model = make_model(strategies[1])
    fit(model)
    model.save_weights(tmp_path / "model.weights.h5")
    other = make_model(strategies[1])
    with pytest.raises(ValueError, match=r"is not yet built.*optimizer\.build"):
        other.load_weights(tmp_path / "model.weights.h5")


def test_a_model_saved_before_it_was_trained(tmp_path, strategies):
    """The loaded model trains as the saved one does."""
    model = make_model(strategies[1])
    model.save(tmp_path / "model.keras")
    with strategies[1].scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    fit(model)
    fit(loaded)
    for value, expected in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_iterations_without_the_other_state_are_refused(tmp_path, strategies):
    model = make_model(strategies[1])
    model.optimizer.iterations.assign(3)
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="has 1 variables"):
        keras.models.load_model(tmp_path / "model.keras")


@pytest.mark.slow
def test_state_of_another_shape(strategies):
    model = make_model(strategies[2])
    fit(model)
    residual = model.optimizer.residual[0]
    for shape in [(20, 60), (2, 20, 61), ()]:
        with pytest.raises(ValueError, match=r"number of workers, 20, 60.*Received"):
            residual.scatter(np.zeros(shape))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(), (3, 4), (0, 5)])
def test_gather(strategies, shape, dtype):
    """Values gathered from peers equal those of this process."""
    values = np.random.default_rng(0).normal(size=(3, *shape)).astype(dtype)
    with strategies[3].scope():
        variable = PerWorkerVariable(shape, dtype, "state")
    variable.scatter(values)
    np.testing.assert_array_equal(variable.gather(), values)
    local = dict(enumerate(variable.local_values()))
    gathered = variable._copies.gather_from_peers(local)
    np.testing.assert_array_equal(gathered, values)


def test_asynchronous_checkpoints_are_refused(strategies, tmp_path):
    model = make_model(strategies[1])
    fit(model)
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
    with pytest.raises(ValueError, match="cannot be saved asynchronously"):
        checkpoint.save(str(tmp_path / "c"), options)


# --- one file, complete or not there --------------------------------------------------


def test_a_failed_save_keeps_the_previous_file(strategies, tmp_path):
    path = tmp_path / "folder" / "model.weights.h5"
    path.parent.mkdir()
    path.write_text("the last one")

    def write(unfinished):
        unfinished.write_text("half of")
        raise OSError("the disk is full")

    model = make_model(strategies[1])
    with pytest.raises(OSError, match="the disk is full"):
        saving.save(model, path, ".weights.h5", write)
    assert path.read_text() == "the last one"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("save", "path"),
    [
        (saving.save_model, "model.h5"),
        (saving.save_weights, "model.keras"),
        (saving.save_weights, "gs://bucket/model.weights.h5"),
    ],
)
def test_bad_paths_are_refused(strategies, save, path):
    with pytest.raises(ValueError, match=r"local path that ends in .*Received"):
        save(make_model(strategies[1]), path)


# --- callbacks ------------------------------------------------------------------------


@pytest.mark.parametrize("ending", rows([".keras", ".weights.h5"], [".keras"]))
def test_model_checkpoint(strategies, tmp_path, ending):
    checkpoint = tf_dgc.callbacks.ModelCheckpoint(
        tmp_path / ("{epoch}-{loss:.3f}" + ending),
        monitor="loss",
        save_best_only=True,
        save_weights_only=ending != ".keras",
    )
    model = make_model(strategies[2])
    losses = fit(model, epochs=2, callbacks=[checkpoint])["loss"]
    best = [i for i, loss in enumerate(losses) if loss == min(losses[: i + 1])]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"{i + 1}-{losses[i]:.3f}{ending}" for i in best]


def test_model_checkpoint_in_the_old_format():
    with pytest.raises(ValueError, match=r"must end in `.keras`.*Received"):
        tf_dgc.callbacks.ModelCheckpoint("model.h5")


@pytest.fixture(scope="module")
def uninterrupted(strategies):
    """Return values and history after three epochs, by number of workers."""
    models = {n: make_model(strategies[n], dropout=0.2) for n in (1, 2)}
    histories = {n: fit(model, epochs=3) for n, model in models.items()}
    return {n: (all_values(models[n]), histories[n]) for n in models}


# With 4 batches per epoch, batch 6 is in the middle of the second epoch, 8 at its end.
@pytest.mark.parametrize(
    ("num_workers", "save_freq", "stop_after", "settings"),
    [
        (2, "epoch", 6, {}),
        pytest.param(2, 3, 7, {}, marks=pytest.mark.exhaustive),
        pytest.param(1, 2, 7, {}, marks=pytest.mark.exhaustive),
        pytest.param(1, 4, 8, {}, marks=pytest.mark.exhaustive),
        pytest.param(1, 1, 1, {}, marks=pytest.mark.exhaustive),
        pytest.param(1, 2, 3, {"steps_per_execution": 2}, marks=pytest.mark.slow),
    ],
)
def test_backup_and_restore(
    strategies, uninterrupted, tmp_path, num_workers, save_freq, stop_after, settings
):
    """A resumed run equals an uninterrupted one: weights, state and metrics."""
    strategy = strategies[num_workers]
    expected, history = uninterrupted[num_workers]

    def backup():
        return tf_dgc.callbacks.BackupAndRestore(tmp_path / "backup", save_freq)

    with pytest.raises(Stop):
        callbacks = [backup(), StopAfter(stop_after)]
        fit(make_model(strategy, 0, 0.2, **settings), epochs=3, callbacks=callbacks)
    resumed = make_model(strategy, 5, 0.2, **settings)
    resumed_history = fit(resumed, epochs=3, callbacks=[backup()])
    assert_same(resumed, expected)
    for name, values in resumed_history.items():
        assert values == pytest.approx(history[name][-len(values) :], rel=1e-5), name
    assert not (tmp_path / "backup").exists()
    again = fit(resumed, epochs=1)  # from the first epoch on
    assert len(again["loss"]) == 1


def test_interrupted_twice(strategies, uninterrupted, tmp_path):
    for seed, steps in enumerate((6, 4)):
        callbacks = [tf_dgc.callbacks.BackupAndRestore(tmp_path, 1), StopAfter(steps)]
        with pytest.raises(Stop):
            model = make_model(strategies[1], seed, 0.2)
            fit(model, epochs=3, callbacks=callbacks)
    model = make_model(strategies[1], 5, 0.2)
    fit(model, epochs=3, callbacks=[tf_dgc.callbacks.BackupAndRestore(tmp_path, 1)])
    assert_same(model, uninterrupted[1][0])


def test_an_error_after_a_resume_does_not_affect_the_next_fit(strategies, tmp_path):
    """A program that catches it and calls `fit` without a backup trains all epochs."""
    model = make_model(strategies[1])
    for steps in (6, 1):  # the second time while batches are skipped
        backup = tf_dgc.callbacks.BackupAndRestore(tmp_path, 1)
        with pytest.raises(Stop):
            fit(model, epochs=3, callbacks=[backup, StopAfter(steps)])
    before = int(model.optimizer.iterations.numpy())
    assert len(fit(model, epochs=3)["loss"]) == 3
    assert int(model.optimizer.iterations.numpy()) == before + 3 * STEPS


def test_the_second_to_last_backup_is_used_if_the_last_is_damaged(strategies, tmp_path):
    model = make_model(strategies[1])
    with pytest.raises(Stop):
        callback = tf_dgc.callbacks.BackupAndRestore(tmp_path, double_checkpoint=True)
        fit(model, epochs=3, callbacks=[callback, StopAfter(10)])
    last = tmp_path / "backup-2.part-0.h5"
    last.write_bytes(last.read_bytes()[:1000])
    other = make_model(strategies[1])
    with pytest.warns(UserWarning, match=r"newer ones cannot be.*backup-2.part-0.h5"):
        history = fit(
            other, epochs=3, callbacks=[tf_dgc.callbacks.BackupAndRestore(tmp_path)]
        )
    assert len(history["loss"]) == 2
    assert not tmp_path.exists()


@pytest.mark.parametrize("directory", ["", "gs://bucket/backup"])
def test_bad_directories_are_refused(directory):
    with pytest.raises(ValueError, match=r"`backup_dir` must be a local directory"):
        tf_dgc.callbacks.BackupAndRestore(directory)


@pytest.mark.parametrize("save_freq", [0, -1, True, "batch", 1.5, None])
def test_bad_frequencies_are_refused(save_freq):
    with pytest.raises(ValueError, match=r"`save_freq` must be .*Received"):
        tf_dgc.callbacks.BackupAndRestore("backup", save_freq)


@pytest.mark.slow
def test_stock_backup_and_restore_on_one_worker(strategies, tmp_path):
    model = make_model(strategies[1])
    fit(model, epochs=2)
    with pytest.raises(Stop):
        callbacks = [keras.callbacks.BackupAndRestore(tmp_path), StopAfter(6)]
        fit(make_model(strategies[1]), epochs=2, callbacks=callbacks)
    resumed = make_model(strategies[1], seed=5)
    fit(resumed, epochs=2, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    assert_same(resumed, all_values(model))


def test_workers_that_load_a_schedule_compare_equal(tmp_path, monkeypatch):
    """Keras writes addresses of objects into configs while it loads."""
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.5, 0.9])
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(tf_dgc.DGCOptimizer(keras.optimizers.SGD(), schedule), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    descriptions = []

    def require_equal(strategy, describe, otherwise=None):
        if otherwise is None:  # else it compares the restored files
            descriptions.append(describe())

    monkeypatch.setattr(consensus, "require_equal", require_equal)
    loaded = [keras.models.load_model(tmp_path / "model.keras") for _ in range(2)]
    assert len(loaded) == len(descriptions) == 2
    assert descriptions[0] == descriptions[1]

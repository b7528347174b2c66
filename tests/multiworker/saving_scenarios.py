"""Program of the workers of test_saving_on_workers.py, started once per worker.

python saving_scenarios.py saving DIRECTORY
"""

import contextlib
import pathlib
import time
import zipfile

import h5py
import keras
import tensorflow as tf
from worker_scenarios import (
    RANK,
    STRATEGY,
    dgc,
    digest_of_local_state,
    main,
    make_data,
    make_model,
)

import tf_dgc
from tf_dgc._internals import save_hooks


def save_to_one_path(directory):
    """Save and restore by each API, with the same arguments on all workers."""
    model = make_model(dgc)
    x, y = make_data(64)
    data = {"batch_size": 16, "shuffle": False, "verbose": 0}
    checkpoint = tf_dgc.callbacks.ModelCheckpoint
    callbacks = [
        checkpoint(directory / "c-{epoch}.keras"),
        checkpoint(directory / "c-{epoch}.weights.h5", save_weights_only=True),
    ]
    model.fit(x, y, epochs=2, callbacks=callbacks, **data)
    expected = digest_of_local_state(model)
    with STRATEGY.scope():
        loaded = keras.models.load_model(directory / "c-2.keras")
    result = {"keras": digest_of_local_state(loaded) == expected}

    def make_built_model():
        other = make_model(dgc)
        with STRATEGY.scope():
            other.optimizer.build(other.trainable_variables)
        return other

    other = make_built_model()
    other.load_weights(directory / "c-2.weights.h5")
    result["weights"] = digest_of_local_state(other) == expected

    checkpoints = directory / "checkpoints"
    with tf_dgc.saving.checkpoint_directory(STRATEGY, checkpoints) as path:
        saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        tf.train.CheckpointManager(saved, path, 1).save()
    other = make_built_model()
    target = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    target.restore(tf.train.latest_checkpoint(checkpoints))
    result["checkpoint"] = digest_of_local_state(other) == expected

    try:
        other.save(directory / "shared.keras")  # which `fit` has not seen
    except ValueError as error:
        result["shared"] = str(error)
    try:
        other.load_weights(directory / f"c-{RANK % 2 + 1}.weights.h5")
    except ValueError as error:
        result["different"] = str(error)
    return result


def slow_down(owner, name):
    """Delay calls of a method on the first worker."""
    stock = getattr(owner, name)

    def delayed(*args, **kwargs):
        time.sleep(0.4)
        return stock(*args, **kwargs)

    if RANK == 0:
        setattr(owner, name, delayed)


def save_to_own_paths(directory):
    """Save to a path per worker; all workers load the first one's files."""
    own_directory = directory if RANK == 0 else directory / f"elsewhere-{RANK}"
    own_directory.mkdir(exist_ok=True)
    model = make_model(dgc)
    x, y = make_data(64)
    with STRATEGY.scope():
        model.optimizer.build(model.trainable_variables)
    slow_down(zipfile.ZipFile, "close")
    slow_down(h5py.File, "close")
    slow_down(tf.train.CheckpointManager, "_record_state")
    model.save(own_directory / "m.keras")
    with STRATEGY.scope():
        again = keras.models.load_model(directory / "m.keras")
    keras.saving.save_model(model, own_directory / "folder", zipped=False)
    keras.models.load_model(directory / "folder")
    try:
        raise ValueError("a reason to save")
    except ValueError:
        model.save_weights(own_directory / "m.weights.h5")
    again.load_weights(directory / "m.weights.h5")
    for _ in range(2):
        checkpoint = tf.train.Checkpoint(model=model)
        tf.train.CheckpointManager(checkpoint, own_directory, 1).save()
        checkpoint.restore(tf.train.latest_checkpoint(directory)).assert_consumed()
    model.fit(x, y, batch_size=16, verbose=0)
    model.save(own_directory / "trained.keras")
    keras.models.load_model(directory / "trained.keras")
    return fail_to_save(model, own_directory / "n.keras")


def fail_to_save(model, path):
    def fail(file):
        raise OSError("the disk of this worker is full")

    if RANK == 1:
        zipfile.ZipFile.close = fail
    try:
        keras.saving.save_model(model, path)
    except (OSError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        zipfile.ZipFile.close = lambda file: None


class DoesNothing(keras.callbacks.BackupAndRestore):
    """A user-defined backup."""


def use_stock_callbacks(directory):
    """Use Keras's own callbacks, with the same arguments on all workers."""
    stock = keras.callbacks
    x, y = make_data(64)
    data = {"batch_size": 16, "shuffle": False, "verbose": 0}

    def callbacks():
        return [
            stock.ModelCheckpoint(directory / "new" / "{epoch}" / "m.keras"),
            stock.ModelCheckpoint(
                directory / "m.weights.h5", save_weights_only=True, save_freq=2
            ),
            stock.BackupAndRestore(directory / "backup", delete_checkpoint=False),
        ]

    model = make_model(dgc)
    model.fit(x, y, epochs=2, callbacks=callbacks(), **data)
    model.save(directory / "m.keras")
    model.save_weights(directory / "saved.weights.h5")
    distributed = make_model(dgc)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    path = directory / "by_hand.weights.h5"
    distributed.fit(
        STRATEGY.experimental_distribute_dataset(batches),
        epochs=2,
        callbacks=[stock.ModelCheckpoint(path, save_weights_only=True)],
        verbose=0,
    )
    distributed.save(directory / "by_hand.keras")
    again = make_model(dgc)
    history = again.fit(x, y, epochs=2, callbacks=callbacks(), **data)
    result = {
        "restored": digest_of_local_state(again) == digest_of_local_state(model),
        "epochs": history.epoch,
        "files": sorted(
            str(p.relative_to(directory)) for p in directory.rglob("*.[kh]*")
        ),
        "backups": sorted(p.name for p in (directory / "backup").iterdir()),
    }
    with STRATEGY.scope():
        loaded = keras.models.load_model(directory / "new" / "2" / "m.keras")
    result["loaded"] = digest_of_local_state(loaded) == digest_of_local_state(model)
    rejected = {
        "derived": [DoesNothing(directory / "backup")],
        "legacy": [stock.ModelCheckpoint(directory / "m.h5")],
        "chief": [stock.BackupAndRestore(directory / "b")] if RANK == 0 else [],
    }
    for name, bad_callbacks in rejected.items():
        try:
            again.fit(x, y, epochs=9, callbacks=bad_callbacks, **data)
        except ValueError as error:
            result[name] = str(error)
    try:
        again.save(directory / "m.h5")
    except ValueError as error:
        result["save"] = str(error)
    return result


WRITTEN = set()


@keras.saving.register_keras_serializable("saving_scenarios")
class Witness(keras.layers.Layer):
    """Records the names of the files that this worker writes."""

    def build(self, shape):
        self.add_weight()

    def call(self, x):
        return x

    def save_own_variables(self, store):
        super().save_own_variables(store)
        saved = save_hooks.saving_of("keras")
        if saved and saved.path:
            WRITTEN.add(pathlib.Path(saved.path).name)


def use_a_stock_optimizer(directory):
    """Without compression, all workers save to one path, or only the chief does."""
    stock = keras.callbacks
    x, y = make_data(64)
    with tf_dgc.prepare(STRATEGY).scope():
        layers = [keras.Input((5,)), Witness(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.001, momentum=0.9), "mse")

    def train(*callbacks, epochs=2):
        data = {"batch_size": 16, "shuffle": False, "verbose": 0}
        return model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **data).epoch

    def backup(name, **settings):
        return stock.BackupAndRestore(directory / name, **settings)

    def weights(path, **settings):
        path = directory / path
        return stock.ModelCheckpoint(path, save_weights_only=True, **settings)

    derived = type("Derived", (stock.ModelCheckpoint,), {})
    train(
        stock.ModelCheckpoint(directory / "a.keras"),
        stock.ModelCheckpoint(directory / "old.h5"),
        derived(directory / "derived.keras"),
        weights("a.weights.h5", save_freq=2),
        backup("backup", delete_checkpoint=False),
    )
    result = {"epochs": train(backup("backup", delete_checkpoint=False), epochs=3)}
    result["backups"] = sorted(p.name for p in (directory / "backup").iterdir())
    model.save(directory / "b.keras")
    model.save_weights(directory / "b.weights.h5")
    if RANK == 0:
        model.save(directory / "chief.keras")
    chief_callbacks = [weights("chief.weights.h5")] if RANK == 0 else []
    train(*chief_callbacks, epochs=1)
    try:
        train(*([backup("some")] if RANK == 0 else []))
    except ValueError as error:
        result["some"] = str(error)
    with STRATEGY.scope():
        again = keras.models.load_model(directory / "b.keras")
    again.load_weights(directory / "b.weights.h5")
    tf_dgc.multiworker.consensus.wait_for_workers(STRATEGY, "look at the files")
    for path in directory.glob("*.keras"):
        keras.models.load_model(path)
    keras.models.load_model(directory / "old.h5", compile=False)
    result["files"] = sorted(p.name for p in directory.glob("*.*"))
    result["written"] = sorted(WRITTEN)
    return result


class Stop(Exception):
    """Ends a run that a later one resumes."""


class StopInTheThirdEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise Stop


def back_up_to_own_directories(directory):
    """Each worker sees its own files, then the other's, then both."""
    x, y = make_data(64)
    data = {"batch_size": 16, "shuffle": False, "verbose": 0}

    def train(path, *callbacks, epochs=3):
        backup = tf_dgc.callbacks.BackupAndRestore(path, delete_checkpoint=False)
        model = make_model(dgc)
        model.fit(x, y, epochs=epochs, callbacks=[backup, *callbacks], **data)
        return digest_of_local_state(model)

    uninterrupted = train(directory / f"elsewhere-{RANK}")
    with contextlib.suppress(Stop):
        train(directory / str(RANK), StopInTheThirdEpoch())
    result = {"files": sorted(p.name for p in (directory / str(RANK)).iterdir())}
    try:
        train(directory / str(1 - RANK))
    except ValueError as error:
        result["exchanged"] = str(error)
    result["resumed"] = train(directory / str(RANK)) == uninterrupted
    tf_dgc.multiworker.consensus.wait_for_workers(STRATEGY, "look at the files of both")
    together = directory / "together"
    together.mkdir(exist_ok=True)
    for path in (directory / str(RANK)).iterdir():
        (together / path.name).write_bytes(path.read_bytes())
    result["together"] = train(together) == uninterrupted
    return result


def scenario_saving(directory):
    result = {}
    for scenario in (
        save_to_one_path,
        use_stock_callbacks,
        use_a_stock_optimizer,
        back_up_to_own_directories,
        save_to_own_paths,
    ):
        folder = directory / scenario.__name__
        folder.mkdir(exist_ok=True)
        result[scenario.__name__] = scenario(folder)
    return result


if __name__ == "__main__":
    main(globals())

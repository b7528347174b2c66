"""Backups with a part per worker: files, faults, and other numbers of workers."""

import itertools
import os
import pathlib
import re
import shutil

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer
from selection import rows

import tf_dgc
from tf_dgc._internals import keras_trainer
from tf_dgc.multiworker import backup, worker_parts, worker_variables
from tf_dgc.multiworker.backup import BackupFolder, TrainingPosition

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def make_dgc():
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    return tf_dgc.DGCOptimizer(sgd, 0.9, min_compress_size=1)


def make_local():
    return tf_dgc.diloco(keras.optimizers.AdamW(0.01), 3)


def make_power():
    """Return an optimizer with factors shared by all workers and local residuals."""
    return tf_dgc.CompressedOptimizer(
        keras.optimizers.SGD(0.05), "power_sgd", min_compress_size=1
    )


def make_gossip():
    ring = tf_dgc.collectives.Gossip("ring", step_size=0.3)
    return tf_dgc.LocalOptimizer(
        "adam", 2, collective=ring, compressor="top_k", min_compress_size=1
    )


def make_model(strategy, make=make_dgc, seed=0, scaled=False, more=()):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        layers = [keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)]
        model = keras.Sequential([*layers, *more])
        optimizer = make()
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 16.0)
        model.compile(optimizer, "mse", run_eagerly=not Trainer.always_traced)
    return model


def fit(model, steps, **settings):
    data = {"batch_size": 12, "shuffle": False, "verbose": 0}
    return model.fit(X[: 12 * steps], Y[: 12 * steps], **data, **settings)


def copies(model):
    """Return all variables of all workers, weights and state."""
    local = model.distribute_strategy.experimental_local_results
    variables = [*model.variables, *model.optimizer.variables]
    return [[copy.numpy() for copy in local(v.value)] for v in variables]


def assert_same(model, expected):
    for values, others in zip(copies(model), expected, strict=True):
        for copy, other in zip(values, others, strict=True):
            np.testing.assert_array_equal(copy, other)


def open_backups(model, directory):
    """Return the folder of backups, and the last backup."""
    backups = BackupFolder(model.distribute_strategy, directory)
    return backups, backups.find()


def back_up(model, directory, keep=1):
    backups, _ = open_backups(model, directory)
    backups.write(model, TrainingPosition(1, 0, []), keep)


def restore(model, directory):
    callback = tf_dgc.callbacks.BackupAndRestore(directory)
    callback.set_model(model)
    callback.on_train_begin()
    keras_trainer.start_fit_at(model, None)


def split(directory):
    """Split the only part into one per replica, as if each were a process."""
    generations = backup.find_generations(directory)[0]
    (generation,) = generations.values()
    (worker,) = generation.workers
    workers = []
    with h5py.File(directory / worker["part"], "r") as file:
        for replica in worker["replicas"]:
            name = backup.part_name(generation.number, 100 + replica)
            with h5py.File(directory / name, "w") as part:
                part.attrs["backup"] = generation.name
                for key in file:
                    values = part.create_dataset(key, data=file[key][[replica]])
                    values.attrs.update(file[key].attrs)
            files = {name: backup.describe_file(directory / name)}
            workers.append(
                {"replicas": [replica], "part": name, "model": None, "files": files}
            )
    model = worker["model"]
    workers[0]["model"] = model
    workers[0]["files"][model] = worker["files"][model]
    (directory / worker["part"]).unlink()
    backup.write_manifest(directory, 0, generation._replace(workers=workers))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


FIRST_FILES = [
    "backup-1.manifest-0.json",
    "backup-1.model-0.weights.h5",
    "backup-1.part-0.h5",
]
SECOND_FILES = [name.replace("-1.", "-2.") for name in FIRST_FILES]


# --- the same number of workers, and others -------------------------------------------


@pytest.mark.parametrize(
    ("make", "scaled"),
    [
        *rows(
            itertools.product([make_dgc, make_local, make_gossip], [False, True]),
            [(make_dgc, False)],
        ),
        pytest.param(make_power, False, marks=pytest.mark.slow),
    ],
)
def test_each_worker_resumes_from_its_own_part(
    strategies, tmp_path, monkeypatch, make, scaled
):
    """Also within a round; weights, inner state and loss scale of each are restored.

    No worker collects the others' values or their sum, which Keras's loss scale saves.
    """
    model = make_model(strategies[2], make, scaled=scaled)
    fit(model, 4)
    if scaled:  # as after an overflow on one worker
        scale = model.optimizer.dynamic_scale.value
        strategies[2].experimental_local_results(scale)[1].assign(8.0)
    collected = []
    with monkeypatch.context() as patch:
        variable_class = worker_variables.PerWorkerVariable
        patch.setattr(variable_class, "_meet", lambda self: collected.append(self.path))
        back_up(model, tmp_path)
    assert not collected
    split(tmp_path)
    again = make_model(strategies[2], make, seed=1, scaled=scaled)
    restore(again, tmp_path)
    assert_same(again, copies(model))
    fit(model, 2)
    fit(again, 2)
    assert_same(again, copies(model))


@pytest.mark.parametrize("number", rows([1, 2, 4], [2]))
def test_another_number_takes_the_total(strategies, tmp_path, number):
    model = make_model(strategies[3])
    fit(model, 4)
    back_up(model, tmp_path)
    split(tmp_path)
    other = make_model(strategies[number], seed=1)
    restore(other, tmp_path)
    for old, new in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    states = [[*m.optimizer.residual, *m.optimizer.velocity] for m in (model, other)]
    for old, new in zip(*states, strict=True):
        before, after = (v.gather().sum(axis=0, dtype="float64") for v in (old, new))
        np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-9)
    assert any(np.any(v.gather()) for v in states[0])
    fit(other, 1)


def test_another_number_takes_the_mean_of_adams_moments(strategies, tmp_path):
    model = make_model(strategies[3], make_local)
    fit(model, 4)
    back_up(model, tmp_path)
    split(tmp_path)
    other = make_model(strategies[2], make_local, seed=1)
    restore(other, tmp_path)
    local = strategies[3].experimental_local_results
    inner = [m.optimizer.inner_optimizer.variables for m in (model, other)]
    moments = 0
    for old, new in zip(*inner, strict=True):
        if old.name.endswith(("momentum", "velocity")):
            mean = np.mean([c.numpy() for c in local(old.value)], axis=0)
            np.testing.assert_allclose(new.numpy(), mean, rtol=1e-6, atol=1e-9)
            moments += 1
    assert moments == 8


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 2)])
def test_values_of_a_part(tmp_path, dtype, shape):
    """With an equal number of workers, each reads only its own file."""
    values = np.random.default_rng(0).normal(size=(2, *shape)).astype(dtype)
    for replica in range(2):
        with worker_parts.writing_part(tmp_path / f"{replica}.h5", "name") as writer:
            place = writer.put(values[replica : replica + 1])
    paths = {replica: (tmp_path / f"{replica}.h5", 0) for replica in range(2)}
    with worker_parts.reading_part({1: paths[1]}, [1], 2, 2) as reader:
        values_read = reader.take(place)
    assert values_read.dtype == values.dtype
    np.testing.assert_array_equal(values_read[1], values[1])
    with worker_parts.reading_part(paths, [0], 1, 2) as reader:
        np.testing.assert_array_equal(reader.take(place), values)


# --- faults ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(strategies):
    model = make_model(strategies[2])
    fit(model, 1)
    return model


def test_a_backup_replaces_the_previous_one(trained, tmp_path):
    model = trained
    back_up(model, tmp_path)
    assert names(tmp_path) == FIRST_FILES
    (tmp_path / "backup-notes.txt").write_text("not of a backup")
    back_up(model, tmp_path)
    assert names(tmp_path) == [*SECOND_FILES, "backup-notes.txt"]
    back_up(model, tmp_path, keep=2)
    assert {name[:8] for name in names(tmp_path)} == {
        "backup-2",
        "backup-3",
        "backup-n",
    }


class Killed(Exception):
    """The end of the process."""


@pytest.mark.parametrize("num_files", range(4))
def test_killed_between_any_two_files(trained, tmp_path, monkeypatch, num_files):
    """The previous backup remains until the manifest of the next one exists."""
    model = trained
    back_up(model, tmp_path)
    before = copies(model)
    model.optimizer.residual[0].assign(model.optimizer.residual[0].numpy() + 1)
    after = copies(model)
    remaining = [num_files]

    def replace(source, target, stock=os.replace):
        if not remaining[0]:
            raise Killed
        remaining[0] -= 1
        stock(source, target)

    def unlink(path, missing_ok=False):
        if "unfinished" not in path.name:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", replace)
        patch.setattr(pathlib.Path, "unlink", unlink)
        back_up(model, tmp_path)
    restore(model, tmp_path)
    assert_same(model, after if num_files == 3 else before)
    back_up(model, tmp_path)
    assert len(names(tmp_path)) == 3


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_another_run(path):
    """Replace a file by that of another run."""
    other = path.parent / "other" / FIRST_FILES[FIRST_FILES.index(path.name)]
    path.write_bytes(other.read_bytes())


@pytest.fixture(scope="module")
def backups_of_two_runs(trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("backups")
    for folder in (directory / "other", directory):
        back_up(trained, folder)
    return directory


@pytest.mark.parametrize(
    ("harm", "name", "expected"),
    [
        (pathlib.Path.unlink, FIRST_FILES[2], "is not there"),
        (pathlib.Path.unlink, FIRST_FILES[1], "is not there"),
        (damage, FIRST_FILES[2], "is damaged"),
        (damage, FIRST_FILES[1], "is damaged"),
        (damage, FIRST_FILES[0], "is damaged"),
        (cut, FIRST_FILES[2], "is damaged"),
        (cut, FIRST_FILES[0], "is damaged"),
        (replace_by_another_run, FIRST_FILES[2], "belongs to another backup"),
        (replace_by_another_run, FIRST_FILES[1], "belongs to another backup"),
        (replace_by_another_run, FIRST_FILES[0], "belongs to another backup"),
    ],
)
def test_missing_damaged_and_foreign_files_are_named(
    trained, backups_of_two_runs, tmp_path, harm, name, expected
):
    shutil.copytree(backups_of_two_runs, tmp_path, dirs_exist_ok=True)
    harm(tmp_path / name)
    named = (
        "part-0.h5" if expected.startswith("belongs") and "manifest" in name else name
    )
    with pytest.raises(
        ValueError, match=rf"Restore the files .*{named}': ['\"]{expected}"
    ):
        restore(trained, tmp_path)


def test_a_manifest_with_another_number_is_refused(trained, tmp_path):
    back_up(trained, tmp_path)
    (tmp_path / FIRST_FILES[0]).rename(tmp_path / SECOND_FILES[0])
    with pytest.raises(ValueError, match=r"it describes backup 1"):
        restore(trained, tmp_path)


def test_a_backup_of_another_model(strategies, tmp_path):
    model = make_model(strategies[1])
    fit(model, 1)
    back_up(model, tmp_path)
    with pytest.raises(ValueError, match=r"other random streams or metrics"):
        restore(make_model(strategies[1], more=[keras.layers.Dropout(0.1)]), tmp_path)


def make_plain_model(layers=1, units=8, **settings):
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(units, **settings) for _ in range(layers)]
    model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(1)])
    model.compile(make_dgc(), "mse")
    return model


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"units": 9},
            ["dense_\\d+/kernel: float32 (6, 8) in the backup, float32 (6, 9) in this",
             "dense_\\d+/kernel: float32 (8, 1) in the backup, float32 (9, 1) in this"],
        ),
        (
            {"layers": 2},
            ["4 weights in the backup, 6 in this model"],
        ),
        (
            {"use_bias": False},
            ["4 weights in the backup, 3 in this model", "/bias: float32 (8,) in the"],
        ),
        (
            {"dtype": "float16"},
            ["/kernel: float32 (6, 8) in the backup, float16 (6, 8) in this model"],
        ),
    ],
)  # fmt: skip
def test_weights_of_another_model_are_named(tmp_path, change, expected):
    """The error comes before anything is loaded, even if Keras would only warn."""
    model = make_plain_model()
    fit(model, 1)
    back_up(model, tmp_path)
    other = make_plain_model(**change)
    before = other.get_weights()
    with pytest.raises(ValueError) as caught:
        restore(other, tmp_path)
    text = str(caught.value)
    assert f"The backup {str(tmp_path / FIRST_FILES[1])!r} was made by another" in text
    assert f"delete the files `backup-*` in {str(tmp_path)!r}" in text
    for line in expected:
        line = re.escape(line).replace(r"\\d\+", r"\d+")
        assert re.search(line, text), text
    assert len(text.splitlines()) < 12
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    for weight, value in zip(other.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)
    for name in FIRST_FILES:
        (tmp_path / name).unlink()
    restore(other, tmp_path)  # afresh


def test_names_of_layers_do_not_count(tmp_path):
    """Keras numbers unnamed layers, starting anew in each process."""
    model = make_plain_model(name="one")
    fit(model, 1)
    back_up(model, tmp_path)
    other = make_plain_model(name="other")
    restore(other, tmp_path)
    assert_same(other, copies(model))


def test_another_optimizer_is_named(strategies, tmp_path):
    model = make_model(strategies[1])
    fit(model, 1)
    back_up(model, tmp_path)

    def make():
        return tf_dgc.DGCOptimizer("adam", 0.9, min_compress_size=1)

    with pytest.raises(ValueError) as caught:
        restore(make_model(strategies[1], make), tmp_path)
    text = str(caught.value)
    assert "The saved DGCOptimizer has" in text
    assert re.search(r"optimizer of the backup: DGCOptimizer\(SGD\(", text)
    assert re.search(r"optimizer of this model: DGCOptimizer\(Adam\(", text)
    assert f"delete the files `backup-*` in {str(tmp_path)!r}" in text
    assert "load_weights(path" not in text
    assert len(text.splitlines()) < 12


@pytest.mark.parametrize(
    ("position", "epochs", "expected"),
    [
        (TrainingPosition(1, 0, []), 4, "epoch 2 of 4, from"),
        (TrainingPosition(1, 3, []), 4, "epoch 2 of 4, after 3 batches, from"),
        (TrainingPosition(4, 0, []), 4, "all 4 epochs are done, from"),
        (TrainingPosition(1, 0, []), None, "epoch 2, from"),
    ],
)
def test_a_line_says_where_training_resumes(
    strategies, tmp_path, capsys, position, epochs, expected
):
    model = make_model(strategies[1])
    fit(model, 1)
    backups, _ = open_backups(model, tmp_path)
    backups.write(model, position, 1)
    callback = tf_dgc.callbacks.BackupAndRestore(tmp_path)
    callback.set_model(model)
    if epochs is not None:  # outside of `fit` there are no parameters
        callback.set_params({"epochs": epochs})
    capsys.readouterr()
    callback.on_train_begin()
    keras_trainer.start_fit_at(model, None)
    line = f"tf_dgc: resumed at {expected} backup 1 in {str(tmp_path)!r}\n"
    assert capsys.readouterr().out == line


def test_another_number_of_workers_is_printed(strategies, tmp_path, capsys):
    back_up(make_fitted(strategies[2]), tmp_path)
    restore(make_model(strategies[1]), tmp_path)
    assert "written by 2 replicas\n" in capsys.readouterr().out


def make_fitted(strategy):
    model = make_model(strategy)
    fit(model, 1)
    return model


class TwoOptimizers(keras.Model):
    """Trains its second layer with a second optimizer."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(8), keras.layers.Dense(1)
        self.build((None, 6))

    def build(self, shape):
        self.one.build(shape)
        self.other.build((None, 8))
        self.built = True

    def call(self, x):
        return self.other(self.one(x))

    def compile(self, first, second):
        super().compile(first, "mse")
        self.second = second

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        one = self.one.trainable_variables
        other = self.other.trainable_variables
        gradients = tape.gradient(loss, [*one, *other])
        self.optimizer.apply(gradients[:2], one)
        self.second.apply(gradients[2:], other)
        return {"loss": loss}


@pytest.mark.parametrize("scaled", [False, True])
def test_a_second_optimizer_that_is_not_built_is_named(tmp_path, scaled):
    def start(built):
        model = TwoOptimizers()
        second = make_dgc()
        if scaled:
            second = keras.optimizers.LossScaleOptimizer(second)
        model.compile(make_dgc(), second)
        model.optimizer.build(model.one.trainable_variables)
        if built:
            model.second.build(model.other.trainable_variables)
        callback = tf_dgc.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[callback])
        return model

    with pytest.raises(ValueError, match="The model's `second` must be built before"):
        start(built=False)
    steps = int(start(built=True).second.iterations)
    assert int(start(built=True).second.iterations) == steps

"""Backups of a part per worker: files, faults, and other numbers of workers."""

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
    """Factors that all have alike, beside a residual of each."""
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
    for found, others in zip(copies(model), expected, strict=True):
        for copy, other in zip(found, others, strict=True):
            np.testing.assert_array_equal(copy, other)


def open_backups(model, directory):
    """Return them, and the last one."""
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
    """Let the only part become one of each replica, as of as many processes."""
    found = backup.find_generations(directory)[0]
    (generation,) = found.values()
    (worker,) = generation.workers
    each = []
    with h5py.File(directory / worker["part"], "r") as file:
        for replica in worker["replicas"]:
            name = backup.part_name(generation.number, 100 + replica)
            with h5py.File(directory / name, "w") as part:
                part.attrs["backup"] = generation.name
                for key in file:
                    values = part.create_dataset(key, data=file[key][[replica]])
                    values.attrs.update(file[key].attrs)
            files = {name: backup.describe_file(directory / name)}
            each.append(
                {"replicas": [replica], "part": name, "model": None, "files": files}
            )
    model = worker["model"]
    each[0]["model"] = model
    each[0]["files"][model] = worker["files"][model]
    (directory / worker["part"]).unlink()
    backup.write_manifest(directory, 0, generation._replace(workers=each))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


OF_THE_FIRST = [
    "backup-1.manifest-0.json",
    "backup-1.model-0.weights.h5",
    "backup-1.part-0.h5",
]
OF_THE_SECOND = [name.replace("-1.", "-2.") for name in OF_THE_FIRST]


# --- as many workers, and others ------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "scaled"),
    [
        *rows(
            itertools.product([make_dgc, make_local, make_gossip], [False, True]),
            [(make_dgc, False), (make_local, True)],
        ),
        pytest.param(make_power, False, marks=pytest.mark.slow),
    ],
)
def test_each_worker_goes_on_from_its_own_part(
    strategies, tmp_path, monkeypatch, make, scaled
):
    """Within a round, weights, inner state and loss scale of each included.

    Nobody is asked for what differs, nor for its sum, which Keras's loss scale saves.
    """
    model = make_model(strategies[2], make, scaled=scaled)
    fit(model, 4)
    if scaled:  # as after an overflow of one
        scale = model.optimizer.dynamic_scale.value
        strategies[2].experimental_local_results(scale)[1].assign(8.0)
    asked = []
    with monkeypatch.context() as patch:
        kind = worker_variables.PerWorkerVariable
        patch.setattr(kind, "_meet", lambda self: asked.append(self.path))
        back_up(model, tmp_path)
    assert not asked
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
    kept = [[*m.optimizer.residual, *m.optimizer.velocity] for m in (model, other)]
    for old, new in zip(*kept, strict=True):
        before, after = (v.gather().sum(axis=0, dtype="float64") for v in (old, new))
        np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-9)
    assert any(np.any(v.gather()) for v in kept[0])
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
    """Of as many workers each reads its own, from its own file alone."""
    values = np.random.default_rng(0).normal(size=(2, *shape)).astype(dtype)
    for replica in range(2):
        with worker_parts.writing_part(tmp_path / f"{replica}.h5", "name") as writer:
            place = writer.put(values[replica : replica + 1])
    paths = {replica: (tmp_path / f"{replica}.h5", 0) for replica in range(2)}
    with worker_parts.reading_part({1: paths[1]}, [1], 2, 2) as reader:
        found = reader.take(place)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found[1], values[1])
    with worker_parts.reading_part(paths, [0], 1, 2) as reader:
        np.testing.assert_array_equal(reader.take(place), values)


# --- faults ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(strategies):
    model = make_model(strategies[2])
    fit(model, 1)
    return model


def test_a_backup_replaces_the_one_before(trained, tmp_path):
    model = trained
    back_up(model, tmp_path)
    assert names(tmp_path) == OF_THE_FIRST
    (tmp_path / "backup-notes.txt").write_text("not of a backup")
    back_up(model, tmp_path)
    assert names(tmp_path) == [*OF_THE_SECOND, "backup-notes.txt"]
    back_up(model, tmp_path, keep=2)
    assert {name[:8] for name in names(tmp_path)} == {
        "backup-2",
        "backup-3",
        "backup-n",
    }


class Killed(Exception):
    """The end of the process."""


@pytest.mark.parametrize("done", range(4))
def test_killed_between_any_two_files(trained, tmp_path, monkeypatch, done):
    """There is always a whole backup: the one before until the manifest is there."""
    model = trained
    back_up(model, tmp_path)
    before = copies(model)
    model.optimizer.residual[0].assign(model.optimizer.residual[0].numpy() + 1)
    after = copies(model)
    left = [done]

    def replace(source, target, stock=os.replace):
        if not left[0]:
            raise Killed
        left[0] -= 1
        stock(source, target)

    def unlink(path, missing_ok=False):
        if "unfinished" not in path.name:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", replace)
        patch.setattr(pathlib.Path, "unlink", unlink)
        back_up(model, tmp_path)
    restore(model, tmp_path)
    assert_same(model, after if done == 3 else before)
    back_up(model, tmp_path)
    assert len(names(tmp_path)) == 3


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def take_another(path):
    """Put the same file of another run in its place."""
    other = path.parent / "other" / OF_THE_FIRST[OF_THE_FIRST.index(path.name)]
    path.write_bytes(other.read_bytes())


@pytest.fixture(scope="module")
def backups_of_two_runs(trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("backups")
    for each in (directory / "other", directory):
        back_up(trained, each)
    return directory


@pytest.mark.parametrize(
    ("harm", "name", "said"),
    [
        (pathlib.Path.unlink, OF_THE_FIRST[2], "is not there"),
        (pathlib.Path.unlink, OF_THE_FIRST[1], "is not there"),
        (damage, OF_THE_FIRST[2], "is damaged"),
        (damage, OF_THE_FIRST[1], "is damaged"),
        (damage, OF_THE_FIRST[0], "is damaged"),
        (cut, OF_THE_FIRST[2], "is damaged"),
        (cut, OF_THE_FIRST[0], "is damaged"),
        (take_another, OF_THE_FIRST[2], "belongs to another backup"),
        (take_another, OF_THE_FIRST[1], "belongs to another backup"),
        (take_another, OF_THE_FIRST[0], "belongs to another backup"),
    ],
)
def test_what_is_missing_damaged_or_foreign_is_named(
    trained, backups_of_two_runs, tmp_path, harm, name, said
):
    shutil.copytree(backups_of_two_runs, tmp_path, dirs_exist_ok=True)
    harm(tmp_path / name)
    named = "part-0.h5" if said.startswith("belongs") and "manifest" in name else name
    with pytest.raises(ValueError, match=rf"Restore the files .*{named}': ['\"]{said}"):
        restore(trained, tmp_path)


def test_a_manifest_by_another_name(trained, tmp_path):
    back_up(trained, tmp_path)
    (tmp_path / OF_THE_FIRST[0]).rename(tmp_path / OF_THE_SECOND[0])
    with pytest.raises(ValueError, match=r"it is that of backup 1"):
        restore(trained, tmp_path)


def test_a_backup_of_another_model(strategies, tmp_path):
    model = make_model(strategies[1])
    fit(model, 1)
    back_up(model, tmp_path)
    with pytest.raises(ValueError, match=r"other random streams or metrics"):
        restore(make_model(strategies[1], more=[keras.layers.Dropout(0.1)]), tmp_path)


def widened(layers=1, units=8, **settings):
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(units, **settings) for _ in range(layers)]
    model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(1)])
    model.compile(make_dgc(), "mse")
    return model


@pytest.mark.parametrize(
    ("change", "said"),
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
def test_weights_of_another_model_are_named(tmp_path, change, said):
    """Before anything is loaded; also where Keras would load it, or only warn."""
    model = widened()
    fit(model, 1)
    back_up(model, tmp_path)
    other = widened(**change)
    before = other.get_weights()
    with pytest.raises(ValueError) as caught:
        restore(other, tmp_path)
    text = str(caught.value)
    assert f"The backup {str(tmp_path / OF_THE_FIRST[1])!r} was made by another" in text
    assert f"delete the files `backup-*` in {str(tmp_path)!r}" in text
    for line in said:
        line = re.escape(line).replace(r"\\d\+", r"\d+")
        assert re.search(line, text), text
    assert len(text.splitlines()) < 12
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    for weight, value in zip(other.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)
    for name in OF_THE_FIRST:
        (tmp_path / name).unlink()
    restore(other, tmp_path)  # afresh


def test_names_of_layers_do_not_count(tmp_path):
    """Keras numbers those without one, in each process from the first."""
    model = widened(name="one")
    fit(model, 1)
    back_up(model, tmp_path)
    other = widened(name="other")
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
    ("position", "epochs", "said"),
    [
        (TrainingPosition(1, 0, []), 4, "epoch 2 of 4, from"),
        (TrainingPosition(1, 3, []), 4, "epoch 2 of 4, after 3 batches, from"),
        (TrainingPosition(4, 0, []), 4, "all 4 epochs are done, from"),
        (TrainingPosition(1, 0, []), None, "epoch 2, from"),
    ],
)
def test_a_line_says_where_training_goes_on(
    strategies, tmp_path, capsys, position, epochs, said
):
    model = make_model(strategies[1])
    fit(model, 1)
    backups, _ = open_backups(model, tmp_path)
    backups.write(model, position, 1)
    callback = tf_dgc.callbacks.BackupAndRestore(tmp_path)
    callback.set_model(model)
    if epochs is not None:  # else, without `fit`, there are no parameters
        callback.set_params({"epochs": epochs})
    capsys.readouterr()
    callback.on_train_begin()
    keras_trainer.start_fit_at(model, None)
    line = f"tf_dgc: resumed at {said} backup 1 in {str(tmp_path)!r}\n"
    assert capsys.readouterr().out == line


def test_other_numbers_of_workers_are_told(strategies, tmp_path, capsys):
    back_up(make_fitted(strategies[2]), tmp_path)
    restore(make_model(strategies[1]), tmp_path)
    assert "written by 2 replicas\n" in capsys.readouterr().out


def make_fitted(strategy):
    model = make_model(strategy)
    fit(model, 1)
    return model


class TwoOptimizers(keras.Model):
    """Trains its second layer by an optimizer of its own."""

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
        own = self.one.trainable_variables
        others = self.other.trainable_variables
        gradients = tape.gradient(loss, [*own, *others])
        self.optimizer.apply(gradients[:2], own)
        self.second.apply(gradients[2:], others)
        return {"loss": loss}


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_of_the_model_that_is_not_built_is_named(tmp_path, scaled):
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

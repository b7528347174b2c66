"""The trainer of one process: shared by all seeds, and resumable."""

import keras
import numpy as np
import pytest
from common import resumable
from tasks import small
from training.seed_runs import run_seeds
from training.trainer import Trainer

import tf_dgc


class Largest(small.Task):
    """Which of 16 numbers is the largest?"""

    metric, batch_size = "accuracy", 4
    batch, evaluate = small.Mnist.batch, small.Mnist.evaluate

    @staticmethod
    def load(data_dir):
        x = np.random.default_rng(0).normal(size=(2, 100, 16)).astype("float32")
        return [(part, part.argmax(axis=-1)) for part in x]

    @staticmethod
    def model():
        layers = keras.Input((16,)), keras.layers.Dense(64), keras.layers.Dense(16)
        return keras.Sequential(layers)


@pytest.mark.parametrize("trains", [True, False])
def test_seeds_share_one_trainer(tmp_path, trains):
    """It is created when the first seed trains, and not for finished runs."""
    trainers = []

    def make_trainer():
        trainers.append("trainer")
        return len(trainers)

    def measure(trainer, seed, checkpoint):
        return {"value": 10 * trainer() + seed if trains else None}

    def rows(seeds):
        store = resumable.ResumableRows(
            tmp_path / "rows.jsonl", ["task", "seed"], {"of": "here"}
        )
        return run_seeds(store, {"task": "a"}, seeds, make_trainer, measure)

    first, value = rows(range(2)), 11 if trains else None
    assert len(trainers) == trains
    assert first[1] == {"of": "here", "task": "a", "seed": 1, "value": value}
    assert rows([1, 0]) == first[::-1]
    assert len(trainers) == trains


class InterruptingCheckpoint(resumable.RunCheckpoint):
    """Saves after every step, and interrupts after some steps."""

    steps_left = 5

    def is_due(self):
        if self.steps_left == 0:
            raise KeyboardInterrupt
        self.steps_left -= 1
        return True


@pytest.mark.exhaustive
@pytest.mark.parametrize("local", [False, True])
def test_interrupted_run_equals_a_whole_one(strategies, tmp_path, local):
    def make_optimizer():
        adam = keras.optimizers.Adam(0.01)
        if local:
            return tf_dgc.LocalOptimizer(adam, 1, compressor="ef_sign_sgd")
        return tf_dgc.DGCOptimizer(adam, 0.9, min_compress_size=64)

    trainer = Trainer(Largest(None), make_optimizer, strategies[2])
    expected = trainer.run(3, 8, 2)
    assert [step for step, _, _ in expected] == [2, 4, 6, 8]
    checkpoint = InterruptingCheckpoint(tmp_path / "deep" / "run.npz")
    with pytest.raises(KeyboardInterrupt):
        trainer.run(3, 8, 2, checkpoint)
    seconds = trainer.seconds
    trainer.run(4, 2, 2)  # another run in between
    assert (
        trainer.run(3, 8, 2, resumable.RunCheckpoint(tmp_path / "run.npz")) == expected
    )
    assert trainer.seconds > 0.5 * seconds
    checkpoint.forget()
    assert resumable.RunCheckpoint(tmp_path / "run.npz").load() is None

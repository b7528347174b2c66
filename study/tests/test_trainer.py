"""A trainer of one process: one for all seeds, and a killed run goes on."""

import keras
import numpy as np
import pytest
from common import resumable
from tasks import small
from training import seeded
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
def test_seeds_have_one_trainer(tmp_path, trains):
    """Which is made when the first one trains, and not for what is done."""
    made = []

    def make():
        made.append("trainer")
        return len(made)

    def measure(trainer, seed, saved):
        return {"value": 10 * trainer() + seed if trains else None}

    def rows(seeds):
        done = resumable.ResumableRows(
            tmp_path / "rows.jsonl", ["task", "seed"], {"of": "here"}
        )
        return seeded.rows(done, {"task": "a"}, seeds, make, measure)

    first, value = rows(range(2)), 11 if trains else None
    assert len(made) == trains
    assert first[1] == {"of": "here", "task": "a", "seed": 1, "value": value}
    assert rows([1, 0]) == first[::-1]
    assert len(made) == trains


class Killed(resumable.RunCheckpoint):
    """Saved after every step; the process ends after some."""

    left = 5

    def is_due(self):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return True


@pytest.mark.exhaustive
@pytest.mark.parametrize("local", [False, True])
def test_a_run_that_is_killed_goes_on(strategies, tmp_path, local):
    """With the same bits, momentum and residuals and all."""

    def make():
        adam = keras.optimizers.Adam(0.01)
        if local:
            return tf_dgc.LocalOptimizer(adam, 1, compressor="ef_sign_sgd")
        return tf_dgc.DGCOptimizer(adam, 0.9, min_compress_size=64)

    trainer = Trainer(Largest(None), make, strategies[2])
    expected = trainer.run(3, 8, 2)
    assert [step for step, _, _ in expected] == [2, 4, 6, 8]
    saved = Killed(tmp_path / "deep" / "run.npz")
    with pytest.raises(KeyboardInterrupt):
        trainer.run(3, 8, 2, saved)
    spent = trainer.seconds
    trainer.run(4, 2, 2)  # something else in between
    assert (
        trainer.run(3, 8, 2, resumable.RunCheckpoint(tmp_path / "run.npz")) == expected
    )
    assert trainer.seconds > 0.5 * spent
    saved.forget()
    assert resumable.RunCheckpoint(tmp_path / "run.npz").load() is None

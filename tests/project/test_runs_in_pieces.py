"""Runs of benchmarks in pieces: what is done is not done again."""

import json
import math

import keras
import numpy as np
import pytest
from common import pieces, seeded, tasks, training

import tf_dgc

KEYS = ["method", "seed"]


def test_rows_are_run_once(tmp_path):
    path, calls = tmp_path / "deep" / "rows.jsonl", []

    def measure(_):
        calls.append(1)
        return {"value": len(calls)}

    for _ in range(2):
        done = pieces.Pieces(path, KEYS, {"commit": "abc"})
        found = [done.row({"method": "dense", "seed": s}, measure) for s in (0, 1)]
        assert [row["value"] for row in found] == [1, 2]
        assert done.rows == found == pieces.read([path])
    assert found[0] == {"commit": "abc", "method": "dense", "seed": 0, "value": 1}


def test_what_another_process_has_done_is_not_done_again(tmp_path):
    path, key = tmp_path / "rows.jsonl", {"method": "dense", "seed": 0}
    one, other = (pieces.Pieces(path, KEYS, {"by": name}) for name in "ab")
    for done in (one, other):
        assert done.row(key, lambda _: {})["by"] == "a"
    assert one.rows == other.rows == pieces.read([path])


def test_a_line_that_was_torn_is_run_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = pieces.Pieces(path, KEYS, {})
    for seed in (0, 1):
        done.row({"method": "dense", "seed": seed}, lambda _: {})
    path.write_bytes(path.read_bytes()[:-10])
    done = pieces.Pieces(path, KEYS, {})
    assert [row["seed"] for row in done.rows] == [0]
    done.row({"method": "dense", "seed": 1}, lambda _: {})
    assert [row["seed"] for row in pieces.read([path])] == [0, 1]


def test_a_row_has_all_commits_of_its_run(tmp_path):
    path, key = tmp_path / "rows.jsonl", {"method": "dense", "seed": 0}

    def killed(saved):
        saved.load()
        saved.save({"a": np.ones(2)}, {"step": 1})
        raise KeyboardInterrupt

    def measure(saved):
        arrays, notes = saved.load()
        assert notes == {"step": 1}
        return {"value": float(arrays["a"].sum())}

    for commit in ("abc", "def", "def"):
        with pytest.raises(KeyboardInterrupt):
            pieces.Pieces(path, KEYS, {"commit": commit}).row(key, killed)
    row = pieces.Pieces(path, KEYS, {"commit": "123"}).row(key, measure)
    assert row == {**key, "commit": "abc", "resumed_at": ["def", "123"], "value": 2.0}
    assert pieces.read([path]) == [row]


def test_lists_are_read_too(tmp_path):
    rows = [{"seed": 0}, {"seed": 1}]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "lines.jsonl").write_text('{"seed": 2}\n')
    found = pieces.read([tmp_path / "list.json", tmp_path / "lines.jsonl"])
    assert found == [*rows, {"seed": 2}]


@pytest.mark.parametrize(
    ("optimum", "tried", "best"),
    [
        (2.0, [1, 2, 4], 2),
        (8.0, [1, 2, 4, 8, 16], 8),
        (100.0, [1, 2, 4, 8, 16], 16),
        (0.4, [0.25, 0.5, 1, 2, 4], 0.5),
    ],
)
def test_the_best_rate_is_not_at_the_edge(optimum, tried, best):
    calls = []

    def value(rate):
        calls.append(rate)
        return abs(math.log(rate / optimum))

    assert pieces.best_rate([1, 2, 4], value) == best
    assert sorted(calls) == tried


def test_a_rate_that_does_not_train_is_not_the_best():
    assert pieces.best_rate([1, 2, 4], lambda r: math.nan if r > 1 else -r) == 1
    assert pieces.best_rate([1, 2], lambda r: r, more=0) == 1


def test_the_rate_that_a_search_found():
    """The smaller one of equal ones, and never one that does not train."""
    assert pieces.chosen({4: 1.0, 2: 1.0, 1: math.nan, 8: None}) == 2
    assert pieces.chosen({1: math.inf}) is pieces.chosen({}) is None


def test_rates_at_the_edge_are_marked():
    found = {rate: pieces.edge(rate, {1, 2, 4}) for rate in (1, 2, 4, 8)}
    assert found == {1: "yes", 2: None, 4: "yes", 8: None}
    assert pieces.edge(1, {1}) is None


class Largest(tasks.Task):
    """Which of 16 numbers is the largest?"""

    metric, batch_size = "accuracy", 4
    batch, evaluate = tasks.Mnist.batch, tasks.Mnist.evaluate

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
        done = pieces.Pieces(tmp_path / "rows.jsonl", ["task", "seed"], {"of": "here"})
        return seeded.rows(done, {"task": "a"}, seeds, make, measure)

    first, value = rows(range(2)), 11 if trains else None
    assert len(made) == trains
    assert first[1] == {"of": "here", "task": "a", "seed": 1, "value": value}
    assert rows([1, 0]) == first[::-1]
    assert len(made) == trains


class Killed(pieces.Saved):
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

    trainer = training.Trainer(Largest(None), make, strategies[2])
    expected = trainer.run(3, 8, 2)
    assert [step for step, _, _ in expected] == [2, 4, 6, 8]
    saved = Killed(tmp_path / "deep" / "run.npz")
    with pytest.raises(KeyboardInterrupt):
        trainer.run(3, 8, 2, saved)
    spent = trainer.seconds
    trainer.run(4, 2, 2)  # something else in between
    assert trainer.run(3, 8, 2, pieces.Saved(tmp_path / "run.npz")) == expected
    assert trainer.seconds > 0.5 * spent
    saved.forget()
    assert pieces.Saved(tmp_path / "run.npz").load() is None

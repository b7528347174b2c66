"""Which optimizers train behind compression? Every one of Keras's, on two tasks.

    python benchmarks/inner.py --data_dir ~/tensorflow_datasets --json inner.json

Trains the tasks of `convergence.py` with each optimizer by itself, at each of three
learning rates, and at the best of them within `DGCOptimizer` and with other methods:
what an optimizer's rule makes of a sum of which most is left out for a while, or is
rounded. Rates decay by a cosine; nothing else is set. It can be run in pieces by
`--optimizers`, each with a `--json` of its own, and `--from_json a.json,b.json` reports
them together.
"""

import json
import os
import pathlib
import statistics

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from absl import app, flags, logging
from common import method_settings, reporting, tasks, training

import tf_dgc

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_OPTIMIZERS = flags.DEFINE_list("optimizers", [], "Names of them; empty for all.")
_METHODS = flags.DEFINE_list("methods", [], "Names of methods; empty for all.")
_TASKS = flags.DEFINE_list("tasks", list(tasks.TASKS), "Tasks.")
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of a run.", lower_bound=5)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "A file for all runs.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for the tables, .md.")

FACTORS = (1 / 3, 1, 3)
"""Learning rates of the optimizer by itself, in units of its usual one."""

SEED_OF_RATES = 100
"""Seed of the runs by which the rate is chosen, no run that counts."""

optimizers = keras.optimizers


def _mixed(rate):
    """Return SGD for what has one dimension, and Adam for all else."""
    adam = optimizers.Adam(rate)
    small = optimizers.SGD(_Scaled(rate, 30.0), 0.9)
    return optimizers.MultiOptimizer(
        [optimizers.OptimizerMap(small, lambda v: len(v.shape) < 2)],
        default_optimizer=adam,
    )


# How an optimizer is made with a learning rate, and which rate is usual.
INNER = {
    "SGD": (optimizers.SGD, 0.3),
    "SGD momentum": (lambda rate: optimizers.SGD(rate, 0.9), 0.1),
    "SGD Nesterov": (lambda rate: optimizers.SGD(rate, 0.9, nesterov=True), 0.1),
    "NovoGrad": (tf_dgc.NovoGrad, 0.02),
    "Adam": (optimizers.Adam, 2e-3),
    "AdamW": (optimizers.AdamW, 2e-3),
    "Adam AMSGrad": (lambda rate: optimizers.Adam(rate, amsgrad=True), 2e-3),
    "Nadam": (optimizers.Nadam, 2e-3),
    "Adamax": (optimizers.Adamax, 4e-3),
    "RMSprop": (optimizers.RMSprop, 1e-3),
    "Adagrad": (optimizers.Adagrad, 0.03),
    "Adadelta": (optimizers.Adadelta, 1.0),
    "Lamb": (optimizers.Lamb, 1e-2),
    "Lion": (optimizers.Lion, 3e-4),
    "Ftrl": (optimizers.Ftrl, 0.1),
    "Adafactor": (optimizers.Adafactor, 1e-2),
    "Muon": (optimizers.Muon, 1e-3),
    "MultiOptimizer": (_mixed, 2e-3),
}

METHODS = {
    "uniform_8bit": method_settings.method("uniform_8bit")[0],
    "power_sgd": method_settings.method("power_sgd")[0],
    "ef_sign_sgd": method_settings.method("ef_sign_sgd")[0],
    "dgc": method_settings.method("dgc")[0],
}

COLUMNS = [
    ("optimizer", "optimizer", ""),
    ("rate", "rate", ".2g"),
    ("dense", "dense", ".4f"),
    *((name, name, "+.4f") for name in METHODS),
]


class _Decay(optimizers.schedules.LearningRateSchedule):
    """A cosine from what a variable says, so that one trace serves all rates."""

    def __init__(self, peak, steps):
        self._peak = peak
        self._one = optimizers.schedules.CosineDecay(1.0, steps)

    def __call__(self, step):
        return self._peak * self._one(step)


class _Scaled(optimizers.schedules.LearningRateSchedule):
    def __init__(self, schedule, factor):
        self._schedule = schedule
        self._factor = factor

    def __call__(self, step):
        return self._factor * self._schedule(step)


class Comparison:
    """All runs of a task with one optimizer.

    Args:
        task: a `tasks.Task`.
        strategy: of `training.make_strategy`.
        name: of the optimizer, in `INNER`.
    """

    def __init__(self, task, strategy, name):
        self._task = task
        self._strategy = strategy
        self._name = name

    def rows(self, methods):
        """Return one row per method and seed, those without a method first."""
        dense = self._trainer(lambda inner, _: inner)
        rate = self._best_rate(dense)
        found = self._row("dense", dense, rate)
        for method in methods:
            logging.info("%s: %s, %s", self._task.name, self._name, method)
            found += self._row(method, self._trainer(METHODS[method]), rate)
        return found

    def _trainer(self, wrap):
        make, _ = INNER[self._name]
        steps = _STEPS.value
        self._peak = tf.Variable(0.0)
        decay = _Decay(self._peak, steps)
        trainer = training.Trainer(
            self._task, lambda: wrap(make(decay), steps), self._strategy
        )
        return trainer, self._peak

    def _best_rate(self, dense):
        trainer, peak = dense
        _, usual = INNER[self._name]
        found = {}
        for factor in FACTORS:
            peak.assign(factor * usual)
            found[factor * usual] = self._end(trainer, SEED_OF_RATES)
        choose = max if self._task.higher_is_better else min
        return choose(found, key=found.get)

    def _end(self, trainer, seed):
        return trainer.run(seed, _STEPS.value, _STEPS.value)[-1][2]

    def _row(self, method, made, rate):
        trainer, peak = made
        peak.assign(rate)
        return [
            {
                "task": self._task.name,
                "metric": self._task.metric,
                "optimizer": self._name,
                "method": method,
                "rate": rate,
                "steps": _STEPS.value,
                "workers": trainer.num_workers,
                "seed": seed,
                "value": self._end(trainer, seed),
            }
            for seed in range(_SEEDS.value)
        ]


def train():
    """Return the rows of all runs that the flags ask for."""
    strategy = training.make_strategy(_WORKERS.value)  # before data are read
    rows = []
    for task in [tasks.TASKS[name](_DATA_DIR.value) for name in _TASKS.value]:
        for name in _OPTIMIZERS.value or INNER:
            comparison = Comparison(task, strategy, name)
            rows += comparison.rows(_METHODS.value or METHODS)
            keras.backend.clear_session()
            if _JSON.value:
                reporting.write(rows, _JSON.value, reporting.provenance())
    return rows


def summaries(rows):
    """Return a row per optimizer: means over seeds, and how far methods are off."""
    found = {}
    for row in rows:
        line = found.setdefault(row["optimizer"], {**row, "values": {}})
        line["values"].setdefault(row["method"], []).append(row["value"])
    for line in found.values():
        means = {name: statistics.mean(v) for name, v in line.pop("values").items()}
        line["dense"] = means.pop("dense")
        line.update({name: mean - line["dense"] for name, mean in means.items()})
    return list(found.values())


def main(_):
    """Run what the flags ask for, and report."""
    tf.get_logger().setLevel("ERROR")
    paths = _FROM_JSON.value
    texts = [pathlib.Path(p).read_text() for p in paths]
    rows = [row for text in texts for row in json.loads(text)] or train()
    origin = {} if paths else reporting.provenance()
    tables = []
    for name in dict.fromkeys(row["task"] for row in rows):
        shown = summaries(row for row in rows if row["task"] == name)
        first = shown[0]
        title = f"{name}: {first['metric']} after {first['steps']} steps, "
        title += f"{first['workers']} workers; by itself, and what methods add"
        reporting.report(shown, COLUMNS, title, origin=origin)
        tables += [f"### {title}", reporting.markdown(shown, COLUMNS)]
        tables += [reporting.setting(shown, origin)]
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    app.run(main)

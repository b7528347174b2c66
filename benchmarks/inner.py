"""Which optimizers train behind compression? Every one of Keras's, on two tasks.

    python benchmarks/inner.py --data_dir ~/tensorflow_datasets --json inner.json

Trains the tasks of `convergence.py` with each optimizer by itself, at each of three
learning rates, and at the best of them within `DGCOptimizer` and with other methods:
what an optimizer's rule makes of a sum of which most is left out for a while, or is
rounded. Rates decay by a cosine; nothing else is set. A row is appended to `--json`
when a run ends, so the same command goes on where it was killed, and does only what is
not done; `--optimizers` and `--tasks` choose a piece. `--from_json a.jsonl,b.jsonl`
reports files together, without training.
"""

import functools
import os
import pathlib
import statistics

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from absl import app, flags
from common import method_settings, pieces, progress, reporting, tasks, training

import tf_dgc
from tf_dgc.optimizers import unsuited

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_OPTIMIZERS = flags.DEFINE_list("optimizers", [], "Names of them; empty for all.")
_METHODS = flags.DEFINE_list("methods", [], "Names of methods; empty for all.")
_TASKS = flags.DEFINE_list("tasks", list(tasks.TASKS), "Tasks.")
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of a run.", lower_bound=5)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "A file for all runs, a line each.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for the tables, .md.")

FACTORS = (1 / 3, 1, 3)
"""Learning rates of the optimizer by itself, in units of its usual one."""

SEED_OF_RATES = 100
"""Seed of the runs by which the rate is chosen, no run that counts."""
KEYS = ["task", "optimizer", "method", "rate", "steps", "workers", "seed"]

optimizers = keras.optimizers


def _mixed(rate):
    """Return one Adam for what has one dimension, and another for all else."""
    small = optimizers.OptimizerMap(optimizers.Adam(rate), lambda v: len(v.shape) < 2)
    return optimizers.MultiOptimizer([small], default_optimizer=optimizers.Adam(rate))


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


class Comparison:
    """All runs of a task with one optimizer.

    Args:
        task: a `tasks.Task`.
        strategy: of `training.make_strategy`.
        name: of the optimizer, in `INNER`.
        done: a `pieces.Pieces`.
    """

    def __init__(self, task, strategy, name, done):
        self._task = task
        self._strategy = strategy
        self._name = name
        self._done = done

    def run(self, methods):
        """Choose the rate, and run the optimizer by itself and with methods."""
        usual = INNER[self._name][1]
        rates = [factor * usual for factor in FACTORS]
        best = pieces.best_rate(rates, self._badness, more=0)
        for method in progress.track(["dense", *methods], "methods", str):
            self._runs(method, best, range(_SEEDS.value))

    def _badness(self, rate):
        sign = -1 if self._task.higher_is_better else 1
        return sign * self._runs("dense", rate, [SEED_OF_RATES])[0]["value"]

    def _runs(self, method, rate, seeds):
        @functools.cache
        def trainer():  # it is traced once, and not at all if nothing is to be done
            return self._trainer(method, rate)

        def measure(seed):
            value = trainer().run(seed, steps, steps)[-1][2]
            return {"metric": self._task.metric, "value": value}

        steps = _STEPS.value
        return [
            self._done.row(
                {
                    "task": self._task.name,
                    "optimizer": self._name,
                    "method": method,
                    "rate": rate,
                    "steps": steps,
                    "workers": self._strategy.num_replicas_in_sync,
                    "seed": seed,
                },
                lambda _, seed=seed: measure(seed),
            )
            for seed in seeds
        ]

    def _trainer(self, method, rate):
        steps, make = _STEPS.value, INNER[self._name][0]

        def make_optimizer():
            inner = make(optimizers.schedules.CosineDecay(rate, steps))
            if method == "dense":
                return inner
            # What is warned of is wanted here, and Adams are corrected.
            corrects = unsuited.reason(inner) is None
            return METHODS[method](inner, steps, adam_correction=corrects)

        keras.backend.clear_session()
        return training.Trainer(self._task, make_optimizer, self._strategy)


def train():
    """Run what is not done, and return all rows of the file."""
    strategy = training.make_strategy(_WORKERS.value)  # before data are read
    done = pieces.Pieces(_JSON.value, KEYS, reporting.provenance())
    given = [tasks.TASKS[name](_DATA_DIR.value) for name in _TASKS.value]
    for task in progress.track(given, "tasks", lambda task: task.name):
        for name in progress.track(_OPTIMIZERS.value or INNER, "optimizers", str):
            Comparison(task, strategy, name, done).run(_METHODS.value or METHODS)
    return done.rows


def summaries(rows):
    """Return a row per optimizer: means over seeds, and how far methods are off."""
    found = {}
    for row in rows:
        if row["seed"] == SEED_OF_RATES:
            continue
        line = found.setdefault(row["optimizer"], {**row, "values": {}})
        line["values"].setdefault(row["method"], []).append(row["value"])
    for line in found.values():
        means = {name: statistics.mean(v) for name, v in line.pop("values").items()}
        line["dense"] = means.pop("dense")
        line.update({name: mean - line["dense"] for name, mean in means.items()})
    return list(found.values())


def _setting(row):
    return tuple(row[name] for name in ("task", "metric", "steps", "workers"))


def main(_):
    """Run what the flags ask for, and report."""
    tf.get_logger().setLevel("ERROR")
    paths = _FROM_JSON.value
    rows = pieces.read(paths) if paths else train()
    tables = []
    for setting in dict.fromkeys(map(_setting, rows)):
        shown = summaries(row for row in rows if _setting(row) == setting)
        if not shown:  # only rates have been tried
            continue
        task, metric, steps, workers = setting
        title = f"{task}: {metric} after {steps} steps, {workers} workers; "
        title += "by itself, and what methods add"
        reporting.report(shown, COLUMNS, title, origin={})
        tables += [f"### {title}", reporting.markdown(shown, COLUMNS)]
        tables += [reporting.setting(shown, {})]
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    app.run(main)

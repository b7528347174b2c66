"""Measures the cost of delayed means in local SGD.

    python study/delays.py --data_dir ~/tensorflow_datasets --json delays.jsonl
    python study/delays.py --from_json delays.jsonl

Trains the tasks of `convergence.py` on four workers of this process with local SGD and
momentum. Every few steps the workers average their weights, or apply Nesterov momentum
to the mean parameter delta. The mean is applied at once, a quarter of a round later, or
a whole round later; or four fragments of the model are synchronized in turn, each a
quarter of a round later. Runs end with a consensus. A line is appended to `--json` when
a run ends.
"""

import functools
import itertools
import json
import os
import pathlib
import statistics

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import benchmarks_path  # noqa: F401
import keras
import tensorflow as tf
from absl import app, flags
from common import progress, reporting, resumable
from tasks import small
from training.trainer import Trainer, make_strategy

import tf_dgc

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of TensorFlow Datasets.")
_TASKS = flags.DEFINE_list("tasks", list(small.TASKS), "Tasks.")
_PERIODS = flags.DEFINE_list(
    "periods", ["8", "32"], "Steps of a round, divisible by 4."
)
_OUTERS = flags.DEFINE_list("outers", ["mean"], "Outer optimizers: mean, nesterov.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 320, "Steps of a run.", lower_bound=1)
_WORKERS = flags.DEFINE_integer("workers", 4, "Workers.", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "File for the rows, one line per run.")
_FROM_JSON = flags.DEFINE_string(
    "from_json", None, "File of rows to report without training."
)

COLUMNS = [
    ("task", "task", ""),
    ("period", "H", ""),
    ("outer", "outer", ""),
    ("way", "the mean comes", ""),
    ("value", "reached", ".4f"),
    ("spread", "+-", ".4f"),
    ("difference", "to waiting", "+.4f"),
]
OUTERS = {
    "mean": lambda: None,
    "nesterov": lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True),
}


def delay_settings(period):
    """Return the optimizer's arguments for each kind of delay, by name.

    Args:
        period: steps of a round.
    """
    quarter = max(1, period // 4)
    return {
        "at once": {},
        "a quarter later": {"delay": quarter},
        "a round later": {"delay": period},
        "in 4 parts, a quarter later": {"delay": quarter, "fragments": 4},
    }


class DelayedTrainer(Trainer):
    """A trainer that begins without pending means, and ends with a consensus."""

    def train_to_consensus(self, seed, steps):
        """Train, and return the metric of the consensus.

        Args:
            seed: seed of the weights and of the data.
            steps: number of steps.
        """
        if self.optimizer.background:
            self.optimizer.background.finish()
            self.optimizer.background.forget()
        self.run(seed, steps, steps)
        self.optimizer.consensus()
        return self.task.evaluate(self._predict)


def make_optimizer(task, period, outer, settings):
    """Return local SGD with the task's learning rate and a cosine decay."""
    rate = keras.optimizers.schedules.CosineDecay(task.learning_rate, _STEPS.value)
    inner = keras.optimizers.SGD(rate, 0.9, global_clipnorm=task.clipnorm)
    return tf_dgc.LocalOptimizer(inner, period, outer=OUTERS[outer](), **settings)


def train():
    """Yield a row of each run."""
    strategy = make_strategy(_WORKERS.value)
    grid = itertools.product(_TASKS.value, _OUTERS.value, _PERIODS.value)
    for task_name, outer, period in progress.track(grid, "settings", ", ".join):
        yield from _train_all_delays(task_name, outer, int(period), strategy)


def _train_all_delays(task_name, outer, period, strategy):
    task = small.TASKS[task_name](_DATA_DIR.value)
    by_name = delay_settings(period)
    for delay in progress.track(by_name, "delays", str):
        make = functools.partial(make_optimizer, task, period, outer, by_name[delay])
        trainer = DelayedTrainer(task, make, strategy)
        for seed in progress.track(range(_SEEDS.value), "seeds"):
            value = trainer.train_to_consensus(seed, _STEPS.value)
            yield {
                "task": task_name,
                "period": period,
                "outer": outer,
                "way": delay,
                "seed": seed,
                "steps": _STEPS.value,
                "value": value,
                "workers": _WORKERS.value,
            }


def summaries(rows):
    """Return a row per setting: median over seeds, and half of the range."""
    key = ("task", "outer", "period", "steps", "workers", "way")
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in key), {})[row["seed"]] = row
    result = []
    for names, runs in groups.items():
        undelayed = groups.get((*names[:-1], "at once"), {})
        values = [run["value"] for run in runs.values()]
        differences = [
            run["value"] - undelayed[seed]["value"]
            for seed, run in runs.items()
            if seed in undelayed
        ]
        result.append(
            {
                **next(iter(runs.values())),
                "value": statistics.median(values),
                "spread": (max(values) - min(values)) / 2,
                "difference": statistics.median(differences) if differences else None,
            }
        )
    return result


def main(_):
    """Train or read rows, and report."""
    tf.get_logger().setLevel("ERROR")
    rows = resumable.read_rows([_FROM_JSON.value]) if _FROM_JSON.value else []
    for row in [] if _FROM_JSON.value else train():
        rows.append(row)
        if _JSON.value:
            with pathlib.Path(_JSON.value).open("a") as file:
                file.write(json.dumps(row) + "\n")
    origin = {} if _FROM_JSON.value else reporting.provenance()
    reporting.report(summaries(rows), COLUMNS, "delays", origin=origin)


if __name__ == "__main__":
    app.run(main)

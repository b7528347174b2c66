"""What it costs that a mean comes later: local steps with delays and parts.

    python study/delays.py --data_dir ~/tensorflow_datasets --json delays.jsonl
    python study/delays.py --from_json delays.jsonl

Trains the tasks of `convergence.py` on four workers of this process, by local SGD with
momentum and a plain mean, or Nesterov's momentum on it, every few steps. The mean is
waited for, or comes a quarter of a round or a whole one later, or that of each of four
parts of the model in turn, a quarter of a round later. The end is a consensus. `--json`
gets a line as a run ends.
"""

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

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_TASKS = flags.DEFINE_list("tasks", list(small.TASKS), "Tasks.")
_PERIODS = flags.DEFINE_list("periods", ["8", "32"], "Steps of a round, by 4.")
_OUTERS = flags.DEFINE_list("outers", ["mean"], "Outer optimizers: mean, nesterov.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 320, "Steps of a run.", lower_bound=1)
_WORKERS = flags.DEFINE_integer("workers", 4, "Workers.", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "A file for a line of each run.")
_FROM_JSON = flags.DEFINE_string("from_json", None, "Runs to report, without training.")

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


def ways(period):
    """Return the settings of each way, by its name.

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
    """A trainer that begins with nothing under way, and ends with a consensus."""

    def reach(self, seed, steps):
        """Return what a run comes to.

        Args:
            seed: of the weights and of the data.
            steps: of the run.
        """
        if self.optimizer.background:
            self.optimizer.background.finish()
            self.optimizer.background.forget()
        self.run(seed, steps, steps)
        self.optimizer.consensus()
        return self.task.evaluate(self._predict)


def make_optimizer(task, period, outer, settings):
    """Return local SGD with the task's rate and a cosine decay of it."""
    rate = keras.optimizers.schedules.CosineDecay(task.learning_rate, _STEPS.value)
    inner = keras.optimizers.SGD(rate, 0.9, global_clipnorm=task.clipnorm)
    made = OUTERS[outer]()
    return tf_dgc.LocalOptimizer(inner, period, outer=made, **settings)


def train():
    """Yield a row of each run."""
    strategy = make_strategy(_WORKERS.value)
    asked = itertools.product(_TASKS.value, _OUTERS.value, _PERIODS.value)
    for name, outer, given in progress.track(asked, "settings", ", ".join):
        task, period = small.TASKS[name](_DATA_DIR.value), int(given)
        chosen = ways(period)
        for way in progress.track(chosen, "ways", str):
            asks = task, period, outer, chosen[way]
            trainer = DelayedTrainer(
                task, lambda asks=asks: make_optimizer(*asks), strategy
            )
            for seed in progress.track(range(_SEEDS.value), "seeds"):
                value = trainer.reach(seed, _STEPS.value)
                yield {
                    **{"task": name, "period": period, "outer": outer, "way": way},
                    **{"seed": seed, "steps": _STEPS.value, "value": value},
                    "workers": _WORKERS.value,
                }


def summaries(rows):
    """Return one row of each way: medians over seeds, and half of the range."""
    key = ("task", "outer", "period", "steps", "workers", "way")
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in key), {})[row["seed"]] = row
    result = []
    for names, runs in groups.items():
        waiting = groups.get((*names[:-1], "at once"), {})
        values = [run["value"] for run in runs.values()]
        pairs = [
            (r["value"], waiting[s]["value"]) for s, r in runs.items() if s in waiting
        ]
        result.append(
            {
                **next(iter(runs.values())),
                "value": statistics.median(values),
                "spread": (max(values) - min(values)) / 2,
                "difference": statistics.median(a - b for a, b in pairs)
                if pairs
                else None,
            }
        )
    return result


def main(_):
    """Run what the flags ask for, and report."""
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

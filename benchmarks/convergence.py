"""Do they train? Every method on the same tasks, with dense training as the control.

    python benchmarks/convergence.py --data_dir ~/tensorflow_datasets --json runs.json

Trains a small convolutional network on MNIST and a character LSTM on tiny Shakespeare
with every registered method on four workers of this process, three seeds each; then
the ablation of Deep Gradient Compression, which adds one correction after the other to
sending the largest entries. `--quick` is one task, one seed and fewer steps.

Bytes are what one worker handed to the collectives, counted. `bytes to target` is how
many it had handed over when it was first as good as the dense run at its end, but for
the task's tolerance. `extra ms` is what a worker's step takes longer than a dense one.

All of it takes hours. It can be run in pieces by `--tasks` and `--methods`, each with a
`--json` of its own; `--from_json a.json,b.json` reports them together, runs of a method
in a later file instead of those before.
"""

import itertools
import json
import os
import pathlib
import statistics

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from absl import app, flags
from common import method_settings, progress, reporting, tasks, training

from tf_dgc import compressors

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_QUICK = flags.DEFINE_bool("quick", False, "MNIST, one seed, few steps.")
_METHODS = flags.DEFINE_list("methods", [], "Names of methods; empty for all.")
_TASKS = flags.DEFINE_list("tasks", list(tasks.TASKS), "Tasks.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 500, "Steps of a run.", lower_bound=1)
_WORKERS = flags.DEFINE_integer("workers", 4, "Workers.", lower_bound=2)
_ABLATION = flags.DEFINE_bool(
    "ablation", None, "The ablation of DGC as well; with all methods by default."
)
_JSON = flags.DEFINE_string("json", None, "A file for all runs.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for the tables, .md.")
_PLOT = flags.DEFINE_string("plot", None, "A file for a picture, .svg or .png.")

EVALUATIONS = 10  # during a run
COLUMNS = [
    ("method", "method", ""),
    ("value", "reached", ".4f"),
    ("spread", "+-", ".4f"),
    ("difference", "to dense", "+.4f"),
    ("bytes_per_step", "bytes/step", ",.0f"),
    ("ratio", "ratio", ",.1f"),
    ("bytes_to_target", "bytes to target", ",.0f"),
    ("compress_ms", "extra ms", ".1f"),
]


class Comparison:
    """All runs of a task.

    Args:
        task: a `tasks.Task`.
        strategy: of `training.make_strategy`.
        steps: of a run.
        seeds: of the runs.
    """

    def __init__(self, task, strategy, steps, seeds):
        self._task = task
        self._strategy = strategy
        self._steps = steps
        self._seeds = seeds
        self._dense = training.Trainer(task, lambda: self._sgd({}), strategy)
        self._dense_curves = self._curves(self._dense)
        self.rows = [
            self._row("dense", seed, curve, curve, None)
            for seed, curve in zip(seeds, self._dense_curves, strict=True)
        ]

    def add(self, name, make_optimizer, settings):
        """Train with an optimizer around the task's SGD.

        Args:
            name: of the method.
            make_optimizer: called with an inner optimizer and the number of steps.
            settings: see `method_settings.Inner`.
        """
        trainer = training.Trainer(
            self._task,
            lambda: make_optimizer(self._sgd(settings), self._steps),
            self._strategy,
        )
        curves = self._curves(trainer)
        extra_ms = training.extra_ms(trainer, self._dense)
        for seed, curve, dense in zip(
            self._seeds, curves, self._dense_curves, strict=True
        ):
            self.rows.append(self._row(name, seed, curve, dense, extra_ms))

    def _sgd(self, settings):
        rate = self._task.learning_rate * settings.get("rate", 1.0)
        momentum = settings.get("momentum", 0.9)
        clipnorm = settings.get("global_clipnorm", self._task.clipnorm)
        decay = keras.optimizers.schedules.CosineDecay(rate, self._steps)
        return keras.optimizers.SGD(decay, momentum, global_clipnorm=clipnorm)

    def _curves(self, trainer):
        every = max(1, self._steps // EVALUATIONS)
        seeds = progress.track(self._seeds, "seeds")
        return [trainer.run(seed, self._steps, every) for seed in seeds]

    def _row(self, method, seed, curve, dense, extra_ms):
        steps, sent, value = curve[-1]
        dense_value = dense[-1][2]
        if sent is None:  # the stock optimizer, which counts nothing
            sent = self._steps * self._dense_bytes
            curve = [(at, at * self._dense_bytes, v) for at, _, v in curve]
        reached = [b for _, b, v in curve if self._task.reached(v, dense_value)]
        return {
            "method": method,
            "task": self._task.name,
            "seed": seed,
            "workers": self._strategy.num_replicas_in_sync,
            "steps": steps,
            "metric": self._task.metric,
            "value": value,
            "dense_value": dense_value,
            "bytes_per_step": sent / steps,
            "dense_bytes_per_step": self._dense_bytes,
            "bytes_to_target": min(reached, default=None),
            "compress_ms": extra_ms,
            "curve": curve,
        }

    @property
    def _dense_bytes(self):
        """Return what an all-reduce is handed: every gradient as float32."""
        return 4 * self._dense.num_parameters


def summaries(rows):
    """Return one row per method and task: medians over seeds, and the spread."""
    result = []
    for _, group in _by_method(rows):
        runs = list(group)
        values = [r["value"] for r in runs]
        to_target = [r["bytes_to_target"] for r in runs]
        sent = statistics.median(r["bytes_per_step"] for r in runs)
        differences = [r["value"] - r["dense_value"] for r in runs]
        result.append(
            {
                **runs[0],
                "value": statistics.median(values),
                "spread": (max(values) - min(values)) / 2,
                "difference": statistics.median(differences),
                "bytes_per_step": sent,
                "ratio": runs[0]["dense_bytes_per_step"] / sent,
                "bytes_to_target": None
                if None in to_target
                else statistics.median(to_target),
            }
        )
    return result


def _by_method(rows):
    return itertools.groupby(rows, lambda row: (row["task"], row["method"]))


def compare(task, strategy, steps, seeds):
    """Return the rows of all methods on a task, those of the ablation last."""
    comparison = Comparison(task, strategy, steps, seeds)
    chosen = _METHODS.value or [*compressors.METHODS, *method_settings.DGC]
    todo = [(name, *method_settings.method(name)) for name in chosen]
    if _ABLATION.value or (_ABLATION.value is None and not _METHODS.value):
        todo += method_settings.ablation(task.clipnorm)
    for name, make_optimizer, settings in progress.track(
        todo, "methods", lambda method: method[0]
    ):
        comparison.add(name, make_optimizer, settings)
    return comparison.rows


def train():
    """Return the rows of all runs that the flags ask for."""
    steps, seeds, names = _STEPS.value, range(_SEEDS.value), _TASKS.value
    if _QUICK.value:
        steps, seeds, names = min(steps, 150), range(1), names[:1]
    strategy = training.make_strategy(_WORKERS.value)
    return [
        row
        for name in progress.track(names, "tasks", str)
        for row in compare(tasks.TASKS[name](_DATA_DIR.value), strategy, steps, seeds)
    ]


def read(paths):
    """Return the rows of several files, the last ones of each method and task."""
    found = {}
    for path in paths:
        for key, group in _by_method(json.loads(pathlib.Path(path).read_text())):
            found[key] = list(group)
    # Then the ablation, as it was run.
    names = ["dense", *compressors.METHODS, *method_settings.DGC]
    rank = {name: i for i, name in enumerate(names)}
    order = sorted(found, key=lambda key: (key[0], rank.get(key[1], len(names))))
    return [row for key in order for row in found[key]]


def main(_):
    """Run what the flags ask for, and report."""
    tf.get_logger().setLevel("ERROR")
    rows = read(_FROM_JSON.value) if _FROM_JSON.value else train()
    # Rows that are read say of themselves where they come from.
    origin = {} if _FROM_JSON.value else reporting.provenance()
    tables = []
    for name, group in itertools.groupby(rows, lambda row: row["task"]):
        shown = summaries(group)
        first = shown[0]
        title = f"{name}: {first['metric']} after {first['steps']} steps, "
        title += f"{first['workers']} workers"
        reporting.report(shown, COLUMNS, title, origin=origin)
        tables += [f"### {title}", reporting.markdown(shown, COLUMNS)]
        tables += [reporting.setting(shown, origin)]
    if _JSON.value:
        reporting.write(rows, _JSON.value, origin)
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text("\n\n".join(tables) + "\n")
    if _PLOT.value:
        from common import pictures

        pictures.draw(summaries(rows), _PLOT.value)


if __name__ == "__main__":
    app.run(main)

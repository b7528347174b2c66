"""Do they train? Every method on the same tasks, with dense training as the control.

    python study/convergence.py --data_dir ~/tensorflow_datasets --json runs.jsonl

Trains a small convolutional network on MNIST and a character LSTM on tiny Shakespeare
with every registered method on four workers of this process, three seeds each; then
the ablation of Deep Gradient Compression, which adds one correction after the other to
sending the largest entries. `--quick` is one task, one seed and fewer steps.

The table has means over seeds with their standard deviation, and the mean difference
to the dense runs of the same seeds with half of its 95 % interval by Student. Bytes
are what one worker handed to the collectives, counted. `bytes to target` is how many it
had handed over, in the median of seeds, when it was first as good as the dense run of
its seed at the end, but for the task's tolerance; blank if any was not.

All of it takes hours. A row is appended to `--json` when a run ends; the same command
does only what is not done, and `--tasks` and `--methods` choose a piece. A method whose
name has ` when sent` behind it takes the learning rate of the step in which an entry is
sent (`scale_before_accumulation=False` of `Corrections`). `--from_json` reports rows
without training.
"""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import benchmarks_path  # noqa: F401
import keras
import tensorflow as tf
from absl import app, flags
from common import method_settings, progress, reporting, resumable
from experiments import convergence
from tasks import small
from training import seeded
from training.trainer import Trainer, make_strategy

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_QUICK = flags.DEFINE_bool("quick", False, "MNIST, one seed, few steps.")
_METHODS = flags.DEFINE_list("methods", [], "Names of methods; empty for all.")
_TASKS = flags.DEFINE_list("tasks", list(small.TASKS), "Tasks.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of a run.", lower_bound=5)
_WORKERS = flags.DEFINE_integer("workers", 4, "Workers.", lower_bound=2)
_ABLATION = flags.DEFINE_bool(
    "ablation", None, "The ablation of DGC as well; with all methods by default."
)
_JSON = flags.DEFINE_string("json", None, "A file for all runs, a line each.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for the tables, .md.")
_PLOT = flags.DEFINE_string("plot", None, "A file for a picture, .svg or .png.")

EVALUATIONS = 10  # during a run
KEYS = ["task", "method", "steps", "workers", "seed"]


class Comparison:
    """Runs of a task.

    Args:
        task: a `small.Task`.
        strategy: of `trainer.make_strategy`.
        done: a `resumable.ResumableRows`.
        steps: of a run.
        seeds: of the runs.
    """

    def __init__(self, task, strategy, done, steps, seeds):
        self._task, self._strategy, self._done = task, strategy, done
        self._steps, self._seeds = steps, seeds

    def add(self, name, make_optimizer, settings):
        """Train with an optimizer around the task's SGD.

        Args:
            name: of the method.
            make_optimizer: called with an inner optimizer and the number of steps.
            settings: what differs for the SGD, see `method_settings.INNER`.
        """

        def make():
            return make_optimizer(self._sgd(settings), self._steps)

        key = {
            "task": self._task.name,
            "method": name,
            "steps": self._steps,
            "workers": self._strategy.num_replicas_in_sync,
        }
        seeded.rows(
            self._done,
            key,
            progress.track(self._seeds, "seeds"),
            lambda: Trainer(self._task, make, self._strategy),
            lambda trainer, seed, saved: self._run(trainer(), seed, saved),
        )

    def _sgd(self, settings):
        rate = self._task.learning_rate * settings.get("rate", 1.0)
        momentum = settings.get("momentum", 0.9)
        clipnorm = settings.get("global_clipnorm", self._task.clipnorm)
        decay = keras.optimizers.schedules.CosineDecay(rate, self._steps)
        return keras.optimizers.SGD(decay, momentum, global_clipnorm=clipnorm)

    def _run(self, trainer, seed, saved):
        every = max(1, self._steps // EVALUATIONS)
        curve = trainer.run(seed, self._steps, every, saved)
        dense = 4 * trainer.num_parameters  # what an all-reduce of float32 is handed
        # The stock optimizer counts nothing.
        curve = [(at, at * dense if b is None else b, v) for at, b, v in curve]
        return {
            "metric": self._task.metric,
            "value": curve[-1][2],
            "bytes_per_step": curve[-1][1] / self._steps,
            "dense_bytes_per_step": dense,
            "curve": curve,
        }


def train():
    """Run what is not done, and return all rows of the file."""
    steps, seeds, names = _STEPS.value, range(_SEEDS.value), _TASKS.value
    if _QUICK.value:
        steps, seeds, names = min(steps, 150), range(1), names[:1]
    strategy = make_strategy(_WORKERS.value)  # before data are read
    done = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    for name in progress.track(names, "tasks", str):
        task = small.TASKS[name](_DATA_DIR.value)
        comparison = Comparison(task, strategy, done, steps, seeds)
        for method in progress.track(_asked(task), "methods", lambda each: each[0]):
            comparison.add(*method)
    return done.rows


def _asked(task):
    """Return (name, how its optimizer is made, what differs for its SGD) of methods."""
    chosen = _METHODS.value or method_settings.NAMES
    asked = [("dense", lambda sgd, steps: sgd, {})]
    asked += [(name, *method_settings.method(name)) for name in chosen]
    if _ABLATION.value or (_ABLATION.value is None and not _METHODS.value):
        asked += method_settings.ablation(task.clipnorm)
    return asked


def main(_):
    """Run what the flags ask for, and report."""
    tf.get_logger().setLevel("ERROR")
    paths = _FROM_JSON.value
    tables = convergence.tables(resumable.read_rows(paths) if paths else train())
    reporting.report_all(tables, _MARKDOWN.value)
    if _PLOT.value:
        from experiments import pictures

        pictures.draw([line for _, lines, _ in tables for line in lines], _PLOT.value)


if __name__ == "__main__":
    app.run(main)

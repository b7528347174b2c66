"""Which methods train? Compares every method with dense training on the same tasks.

    python study/convergence.py --data_dir ~/tensorflow_datasets --json runs.jsonl

Trains a small convolutional network on MNIST and a character LSTM on tiny Shakespeare
with every registered method on four workers of this process, with three seeds. Then it
runs the ablation of Deep Gradient Compression, which adds one correction after the
other to top-k. `--quick` is one task, one seed and fewer steps.

The table has means over seeds with their standard deviation, and the mean difference
to the dense runs of the same seeds with half of its 95 % interval (Student). Bytes are
counted: those that one worker passed to the collectives. `bytes to target` is the
median over seeds of the bytes until a run was as good as its dense run at the end, up
to the task's tolerance; blank if any run never was.

All runs take hours. A row is appended to `--json` when a run ends; the same command
does only the missing runs, and `--tasks` and `--methods` select some of them. A method
with the suffix ` when sent` scales entries by the learning rate of the step that sends
them (`scale_before_accumulation=False` of `Corrections`). `--from_json` reports rows
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
from training.seed_runs import run_seeds
from training.trainer import Trainer, make_strategy

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of TensorFlow Datasets.")
_QUICK = flags.DEFINE_bool("quick", False, "MNIST, one seed, few steps.")
_METHODS = flags.DEFINE_list("methods", [], "Names of methods; empty for all.")
_TASKS = flags.DEFINE_list("tasks", list(small.TASKS), "Tasks.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of a run.", lower_bound=5)
_WORKERS = flags.DEFINE_integer("workers", 4, "Workers.", lower_bound=2)
_ABLATION = flags.DEFINE_bool(
    "ablation", None, "Whether to run the ablation; by default with all methods."
)
_JSON = flags.DEFINE_string("json", None, "File for the rows, one line per run.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of rows to report without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the tables, .md.")
_PLOT = flags.DEFINE_string("plot", None, "File for a picture, .svg or .png.")

EVALUATIONS = 10  # per run
KEYS = ["task", "method", "steps", "workers", "seed"]


class Comparison:
    """Runs of a task.

    Args:
        task: a `small.Task`.
        strategy: strategy of `trainer.make_strategy`.
        store: a `resumable.ResumableRows`.
        steps: number of steps of a run.
        seeds: seeds of the runs.
    """

    def __init__(self, task, strategy, store, steps, seeds):
        self._task, self._strategy, self._store = task, strategy, store
        self._steps, self._seeds = steps, seeds

    def add(self, name, make_optimizer, settings):
        """Train with an optimizer around the task's SGD.

        Args:
            name: name of the method.
            make_optimizer: called with an inner optimizer and the number of steps.
            settings: deviations of the SGD; see `method_settings.INNER`.
        """

        def make():
            return make_optimizer(self._sgd(settings), self._steps)

        key = {
            "task": self._task.name,
            "method": name,
            "steps": self._steps,
            "workers": self._strategy.num_replicas_in_sync,
        }
        run_seeds(
            self._store,
            key,
            progress.track(self._seeds, "seeds"),
            lambda: Trainer(self._task, make, self._strategy),
            lambda trainer, seed, checkpoint: self._run(trainer(), seed, checkpoint),
        )

    def _sgd(self, settings):
        rate = self._task.learning_rate * settings.get("rate", 1.0)
        momentum = settings.get("momentum", 0.9)
        clipnorm = settings.get("global_clipnorm", self._task.clipnorm)
        decay = keras.optimizers.schedules.CosineDecay(rate, self._steps)
        return keras.optimizers.SGD(decay, momentum, global_clipnorm=clipnorm)

    def _run(self, trainer, seed, checkpoint):
        every = max(1, self._steps // EVALUATIONS)
        curve = trainer.run(seed, self._steps, every, checkpoint)
        size = 4 * trainer.num_parameters  # bytes of an all-reduce of float32
        # Stock optimizers do not count bytes.
        curve = [
            (step, step * size if sent is None else sent, value)
            for step, sent, value in curve
        ]
        return {
            "metric": self._task.metric,
            "value": curve[-1][2],
            "bytes_per_step": curve[-1][1] / self._steps,
            "dense_bytes_per_step": size,
            "curve": curve,
        }


def train():
    """Do the missing runs, and return all rows of the file."""
    steps, seeds, names = _STEPS.value, range(_SEEDS.value), _TASKS.value
    if _QUICK.value:
        steps, seeds, names = min(steps, 150), range(1), names[:1]
    strategy = make_strategy(_WORKERS.value)  # before TensorFlow creates its devices
    store = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    for task_name in progress.track(names, "tasks", str):
        task = small.TASKS[task_name](_DATA_DIR.value)
        comparison = Comparison(task, strategy, store, steps, seeds)
        methods = progress.track(_methods(task), "methods", lambda method: method[0])
        for name, make_optimizer, settings in methods:
            comparison.add(name, make_optimizer, settings)
    return store.rows


def _methods(task):
    """Return (name, make_optimizer, deviations of the SGD) of each method."""
    methods = [("dense", lambda sgd, steps: sgd, {})]
    for name in _METHODS.value or method_settings.NAMES:
        methods.append((name, *method_settings.create_method(name)))
    if _ABLATION.value or (_ABLATION.value is None and not _METHODS.value):
        methods += method_settings.ablation(task.clipnorm)
    return methods


def main(_):
    """Train or read rows, and report."""
    tf.get_logger().setLevel("ERROR")
    paths = _FROM_JSON.value
    tables = convergence.tables(resumable.read_rows(paths) if paths else train())
    reporting.report_all(tables, _MARKDOWN.value)
    if _PLOT.value:
        from experiments import pictures

        pictures.draw([line for _, lines, _ in tables for line in lines], _PLOT.value)


if __name__ == "__main__":
    app.run(main)

"""Compares settings for a few hundred steps, at the bytes of DGC with its warm-up.

    python study/short_runs.py --data_dir ~/tensorflow_datasets --json runs.jsonl

Trains the tasks of `convergence.py` densely, with DGC at 99.9 % and the paper's warm-up
in the first fifth, and with schedules, settings and methods that send as many bytes in
total. `--list` shows the runs, `--runs` selects some of them. The table has means over
seeds with their standard deviation, the mean difference to the dense runs of the same
seeds with half of its 95 % interval (Student), and `gap`, the ratio of that difference
to the difference of `dgc`; the aim is below 0.5. There is no gap if the interval of
`dgc` includes 0, or with a single seed.

A row is appended to `--json` when a run ends; the same command does only the missing
runs. `--from_json` reports rows without training.
"""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import benchmarks_path  # noqa: F401
import keras
import tensorflow as tf
from absl import app, flags
from common import progress, reporting, resumable
from experiments import short_runs
from experiments.budget import Budget
from tasks import small
from training.seed_runs import run_seeds
from training.trainer import Trainer, make_strategy

_TASKS = flags.DEFINE_list("tasks", list(small.TASKS), "Tasks.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of TensorFlow Datasets.")
_RUNS = flags.DEFINE_list("runs", [], "Names of runs; empty for all.")
_LIST = flags.DEFINE_bool("list", False, "Print the names of runs and exit.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of a run.", lower_bound=20)
_WORKERS = flags.DEFINE_integer("workers", 4, "Workers.", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "File for the rows, one line per run.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of rows to report without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the tables, .md.")

POINTS = 3  # per curve
KEYS = ["task", "method", "steps", "workers", "seed"]


class Comparison:
    """Runs of a task.

    Args:
        task: a `small.Task`.
        strategy: strategy of `trainer.make_strategy`.
        store: a `resumable.ResumableRows`.
    """

    def __init__(self, task, strategy, store):
        self._task, self._strategy, self._store = task, strategy, store
        shapes = [tuple(v.shape) for v in task.model().trainable_variables]
        self._budget = Budget(shapes, _STEPS.value, _WORKERS.value)

    def add(self, name):
        """Do a run of `short_runs.RUNS` with all seeds."""
        key = {
            "task": self._task.name,
            "method": name,
            "steps": _STEPS.value,
            "workers": _WORKERS.value,
        }
        run_seeds(
            self._store,
            key,
            progress.track(map(int, _SEEDS.value), "seeds"),
            lambda: self._trainer(name),
            lambda trainer, seed, checkpoint: self._run(trainer(), seed, checkpoint),
        )

    def _trainer(self, name):
        def make_optimizer():
            task = self._task
            decay = keras.optimizers.schedules.CosineDecay(
                task.learning_rate, _STEPS.value
            )
            sgd = keras.optimizers.SGD(decay, 0.9, global_clipnorm=task.clipnorm)
            return short_runs.RUNS[name].make(sgd, self._budget, task)

        return Trainer(self._task, make_optimizer, self._strategy)

    def _run(self, trainer, seed, checkpoint):
        every = max(1, _STEPS.value // POINTS)
        curve = trainer.run(seed, _STEPS.value, every, checkpoint)
        size = 4 * trainer.num_parameters
        # Stock optimizers do not count bytes.
        curve = [
            (step, step * size if sent is None else sent, value)
            for step, sent, value in curve
        ]
        return {
            "metric": self._task.metric,
            "value": curve[-1][2],
            "bytes_per_step": curve[-1][1] / _STEPS.value,
            "seconds": trainer.seconds,
            "curve": curve,
        }


def train():
    """Do the missing runs, and return all rows of the file."""
    strategy = make_strategy(_WORKERS.value)  # before TensorFlow creates its devices
    store = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    for task_name in progress.track(_TASKS.value, "tasks", str):
        task = small.TASKS[task_name](_DATA_DIR.value)
        comparison = Comparison(task, strategy, store)
        for run_name in progress.track(_RUNS.value or short_runs.RUNS, "runs", str):
            comparison.add(run_name)
    return store.rows


def main(_):
    """Train or read rows, and report."""
    tf.get_logger().setLevel("ERROR")
    if _LIST.value:
        for name, run in short_runs.RUNS.items():
            print(f"{name}: {run.purpose}")
        return
    unknown = [name for name in _RUNS.value if name not in short_runs.RUNS]
    if unknown:
        raise app.UsageError(f"--runs has names that --list does not show: {unknown}")
    paths = _FROM_JSON.value
    tables = short_runs.tables(resumable.read_rows(paths) if paths else train())
    reporting.report_all(tables, _MARKDOWN.value)


if __name__ == "__main__":
    app.run(main)

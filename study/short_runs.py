"""What does it take to train in a few hundred steps? At the bytes that DGC takes today.

    python study/horizons.py --data_dir ~/tensorflow_datasets --json runs.jsonl

Trains the tasks of `convergence.py` densely, by DGC at 99.9 % with the paper's warm-up
in the first fifth, and by schedules, settings and methods that hand over as many bytes
in all. `--runs` chooses of what `--list` shows. The table has means over seeds with
their standard deviation, the mean difference to the dense runs of the same seeds with
half of its 95 % interval by Student, and as `gap` the share that it is of that of
`dgc`: below 0.5 is the aim. There is none where the interval of `dgc` has 0 in it, and
of a single seed.

A row is appended to `--json` when a run ends; the same command does only what is not
done. `--from_json` reports rows without training.
"""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import benchmarks_path  # noqa: F401
import keras
import tensorflow as tf
from absl import app, flags
from common import progress, reporting, resumable
from experiments import horizons
from experiments.budget import Budget
from tasks import small
from training import seeded
from training.trainer import Trainer, make_strategy

_TASKS = flags.DEFINE_list("tasks", list(small.TASKS), "Tasks.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_RUNS = flags.DEFINE_list("runs", [], "Names of runs; empty for all.")
_LIST = flags.DEFINE_bool("list", False, "Show names of runs only.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs of each.")
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of a run.", lower_bound=20)
_WORKERS = flags.DEFINE_integer("workers", 4, "Workers.", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "A file for all runs, a line each.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for the tables, .md.")

POINTS = 3  # of a curve
KEYS = ["task", "method", "steps", "workers", "seed"]


class Comparison:
    """Runs of a task.

    Args:
        task: a `small.Task`.
        strategy: of `trainer.make_strategy`.
        done: a `resumable.ResumableRows`.
    """

    def __init__(self, task, strategy, done):
        self._task, self._strategy, self._done = task, strategy, done
        shapes = [tuple(v.shape) for v in task.model().trainable_variables]
        self._budget = Budget(shapes, _STEPS.value, _WORKERS.value)

    def add(self, name):
        """Train in one way, with all seeds."""
        key = {
            "task": self._task.name,
            "method": name,
            "steps": _STEPS.value,
            "workers": _WORKERS.value,
        }
        seeded.rows(
            self._done,
            key,
            progress.track(map(int, _SEEDS.value), "seeds"),
            lambda: self._trainer(name),
            lambda trainer, seed, saved: self._run(trainer(), seed, saved),
        )

    def _trainer(self, name):
        def make_optimizer():
            task = self._task
            decay = keras.optimizers.schedules.CosineDecay(
                task.learning_rate, _STEPS.value
            )
            sgd = keras.optimizers.SGD(decay, 0.9, global_clipnorm=task.clipnorm)
            return horizons.RUNS[name].make(sgd, self._budget, task)

        return Trainer(self._task, make_optimizer, self._strategy)

    def _run(self, trainer, seed, saved):
        curve = trainer.run(seed, _STEPS.value, max(1, _STEPS.value // POINTS), saved)
        size = 4 * trainer.num_parameters
        curve = [(at, at * size if sent is None else sent, v) for at, sent, v in curve]
        return {
            "metric": self._task.metric,
            "value": curve[-1][2],
            "bytes_per_step": curve[-1][1] / _STEPS.value,
            "seconds": trainer.seconds,
            "curve": curve,
        }


def train():
    """Run what is not done, and return all rows of the file."""
    strategy = make_strategy(_WORKERS.value)  # before data are read
    done = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    for name in progress.track(_TASKS.value, "tasks", str):
        comparison = Comparison(small.TASKS[name](_DATA_DIR.value), strategy, done)
        for run in progress.track(_RUNS.value or horizons.RUNS, "runs", str):
            comparison.add(run)
    return done.rows


def main(_):
    """Run what the flags ask for, and report."""
    tf.get_logger().setLevel("ERROR")
    if _LIST.value:
        print("\n".join(f"{name}: {run.why}" for name, run in horizons.RUNS.items()))
        return
    unknown = [name for name in _RUNS.value if name not in horizons.RUNS]
    if unknown:
        raise app.UsageError(f"--runs has names that --list does not show: {unknown}")
    paths = _FROM_JSON.value
    tables = horizons.tables(resumable.read_rows(paths) if paths else train())
    reporting.report_all(tables, _MARKDOWN.value)


if __name__ == "__main__":
    app.run(main)

"""Trains with each of Keras's optimizers, with and without compression.

    python study/inner_optimizers.py --data_dir ~/tensorflow_datasets --json inner.json

Trains the tasks of `convergence.py` with each optimizer alone, in `DGCOptimizer`, and
with other methods. It shows how an update rule copes with sums whose entries are mostly
delayed, or rounded. Rates decay by a cosine, except those of ScheduleFreeAdamW and
Ftrl; `experiments/inner_optimizers.py` has all other settings.

All learning rates are searched with a seed that is not used again. An optimizer alone
uses the best of a third, once and three times its usual rate. A method then uses the
best of `--factors` times that rate, so that no method suffers from a rate that suits
dense training only (`ef_sign_sgd` with SGD, for example, needs 0.3 times its rate).
Both searches continue beyond their edge. The table has the rate of each method, and
marks rates that are still at an edge. `--factors=1`, with a file of its own, shows
instead what happens if the rate is not changed.

The table has the mean over seeds of each optimizer alone, and the mean difference of
each method to the dense run of the same seed, both with their standard deviation.

If a method rejects an optimizer, the row has the reason. A row is appended to `--json`
when a run ends, so the same command does only the missing runs; `--optimizers` and
`--tasks` select some of them. `--from_json a.jsonl,b.jsonl` reports files together,
without training.
"""

import functools
import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import benchmarks_path  # noqa: F401
import keras
import tensorflow as tf
from absl import app, flags
from common import method_settings, progress, reporting, resumable
from experiments import inner_optimizers
from experiments.inner_optimizers import INNER
from tasks import small
from training import rate_search
from training.seed_runs import run_seeds
from training.trainer import Trainer, make_strategy

import tf_dgc
from tf_dgc.optimizers import unsupported

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of TensorFlow Datasets.")
_OPTIMIZERS = flags.DEFINE_list("optimizers", [], "Names of optimizers; empty for all.")
_METHODS = flags.DEFINE_list("methods", [], "Names of methods; empty for all.")
_TASKS = flags.DEFINE_list("tasks", list(small.TASKS), "Tasks.")
_FACTORS = flags.DEFINE_list(
    "factors", ["0.3", "1", "3"], "Rates of a method, relative to the optimizer's."
)
_SEEDS = flags.DEFINE_integer("seeds", 2, "Number of seeds.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of a run.", lower_bound=5)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=2)
_JSON = flags.DEFINE_string("json", None, "File for the rows, one line per run.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of rows to report without training."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the tables, .md.")

FACTORS = (1 / 3, 1, 3)
"""Learning rates of an optimizer alone, relative to its usual one."""
MAX_FURTHER_RATES = 4
"""Maximum number of rates beyond the edge of a search."""

KEYS = ["task", "optimizer", "method", "rate", "steps", "workers", "seed"]

METHODS = {
    name: method_settings.create_method(name)[0]
    for name in ("uniform_8bit", "power_sgd", "ef_sign_sgd", "dgc")
}


class Comparison:
    """All runs of a task with one optimizer.

    Args:
        task: a `small.Task`.
        strategy: strategy of `trainer.make_strategy`.
        name: name of the optimizer in `INNER`.
        store: a `resumable.ResumableRows`.
    """

    def __init__(self, task, strategy, name, store):
        self._task = task
        self._strategy = strategy
        self._name = name
        self._store = store

    def run(self, methods):
        """Search learning rates, and run the optimizer alone and with methods."""
        usual_rate = INNER[self._name][1]
        dense_rate = self._best_rate("dense", [f * usual_rate for f in FACTORS])
        self._runs("dense", dense_rate, range(_SEEDS.value))
        factors = list(map(float, _FACTORS.value))
        for method in progress.track(methods, "methods", str):
            rate, refusal = dense_rate, self._refusal(method)
            if refusal is None and factors != [1.0]:
                rate = self._best_rate(method, [f * dense_rate for f in factors])
            self._runs(method, rate, range(_SEEDS.value), refusal)

    def _best_rate(self, method, rates):
        sign = -1 if self._task.higher_is_better else 1

        def value(rate):
            (row,) = self._runs(method, rate, [inner_optimizers.SEED_OF_RATES])
            return sign * row["value"]

        return rate_search.best_rate(rates, value, MAX_FURTHER_RATES)

    def _refusal(self, method):
        """Return why a method rejects the optimizer, or None."""
        try:
            with self._strategy.scope():
                self._optimizer(method, INNER[self._name][1])
        except ValueError as error:
            return str(error).partition(" Received:")[0]
        return None

    def _runs(self, method, rate, seeds, refusal=None):
        steps = _STEPS.value

        def make_trainer():
            make_optimizer = functools.partial(self._optimizer, method, rate)
            return Trainer(self._task, make_optimizer, self._strategy)

        def measure(trainer, seed, _):
            row = {"metric": self._task.metric, "jit_compile": self._task.jit_compile}
            if refusal is not None:
                return {**row, "value": None, "refused": refusal}
            return {**row, "value": trainer().run(seed, steps, steps)[-1][2]}

        key = {
            "task": self._task.name,
            "optimizer": self._name,
            "method": method,
            "rate": rate,
            "steps": steps,
            "workers": self._strategy.num_replicas_in_sync,
        }
        return run_seeds(self._store, key, seeds, make_trainer, measure)

    def _optimizer(self, method, rate):
        decay = keras.optimizers.schedules.CosineDecay(rate, _STEPS.value)
        inner = INNER[self._name][0](decay)
        if method == "dense":
            return inner
        # Unsupported optimizers are measured too, without Adam correction.
        corrects = unsupported.unsupported_reason(inner) is None
        return METHODS[method](
            inner, _STEPS.value, corrections=tf_dgc.Corrections(adam=corrects)
        )


def train():
    """Do the missing runs, and return all rows of the file."""
    strategy = make_strategy(_WORKERS.value)  # before TensorFlow creates its devices
    store = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    tasks = [small.TASKS[name](_DATA_DIR.value) for name in _TASKS.value]
    for task in progress.track(tasks, "tasks", lambda task: task.name):
        for name in progress.track(_OPTIMIZERS.value or INNER, "optimizers", str):
            Comparison(task, strategy, name, store).run(_METHODS.value or METHODS)
    return store.rows


def main(_):
    """Train or read rows, and report."""
    tf.get_logger().setLevel("ERROR")
    paths = _FROM_JSON.value
    rows = resumable.read_rows(paths) if paths else train()
    reporting.report_all(inner_optimizers.tables(rows, METHODS), _MARKDOWN.value)


if __name__ == "__main__":
    app.run(main)

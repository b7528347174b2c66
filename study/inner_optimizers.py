"""Which optimizers train behind compression? Every one of Keras's, on two tasks.

    python study/inner.py --data_dir ~/tensorflow_datasets --json inner.json

Trains the tasks of `convergence.py` with each optimizer by itself, then within
`DGCOptimizer` and with other methods: what an optimizer's rule makes of a sum of which
most is left out for a while, or is rounded. Rates decay by a cosine, but for those of
ScheduleFreeAdamW and Ftrl; what else is set is in `common/inner_optimizers.py`.

All rates are the best ones by a seed that does not count. An optimizer by itself has
that of a third, once and three times its usual one, and a method then that of
`--factors` times it: so no method loses by a rate that suits the dense run alone
(`ef_sign_sgd`, for one, needs 0.3 times it with SGD). Either has others beyond where it
is the last of them. The table says which rate a method took, and marks what is at the
edge still. `--factors=1`, with a file of its own, asks instead what becomes of a rate
that is kept.

The table has the mean over seeds of an optimizer by itself, and of how far a method is
from the dense run of the same seed, both with their standard deviation.

An optimizer that a method refuses has a row that says why. A row is appended to
`--json` when a run ends, so the same command goes on where it was killed, and does only
what is not done; `--optimizers` and `--tasks` choose a piece. `--from_json
a.jsonl,b.jsonl` reports files together, without training.
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
from experiments import inner
from experiments.inner import INNER
from tasks import small
from training import rate_search, seeded
from training.trainer import Trainer, make_strategy

import tf_dgc
from tf_dgc.optimizers import unsupported

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_OPTIMIZERS = flags.DEFINE_list("optimizers", [], "Names of them; empty for all.")
_METHODS = flags.DEFINE_list("methods", [], "Names of methods; empty for all.")
_TASKS = flags.DEFINE_list("tasks", list(small.TASKS), "Tasks.")
_FACTORS = flags.DEFINE_list(
    "factors", ["0.3", "1", "3"], "Rates of a method, in units of the optimizer's own."
)
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
MORE = 4
"""How often to go on beyond rates, of an optimizer by itself and with methods."""

KEYS = ["task", "optimizer", "method", "rate", "steps", "workers", "seed"]

METHODS = {
    name: method_settings.method(name)[0]
    for name in ("uniform_8bit", "power_sgd", "ef_sign_sgd", "dgc")
}


class Comparison:
    """All runs of a task with one optimizer.

    Args:
        task: a `small.Task`.
        strategy: of `trainer.make_strategy`.
        name: of the optimizer, in `INNER`.
        done: a `resumable.ResumableRows`.
    """

    def __init__(self, task, strategy, name, done):
        self._task = task
        self._strategy = strategy
        self._name = name
        self._done = done

    def run(self, methods):
        """Choose rates, and run the optimizer by itself and with methods."""
        usual = INNER[self._name][1]
        best = self._best_rate("dense", [f * usual for f in FACTORS])
        self._runs("dense", best, range(_SEEDS.value))
        factors = list(map(float, _FACTORS.value))
        for method in progress.track(methods, "methods", str):
            rate, refused = best, self._refusal(method)
            if refused is None and factors != [1.0]:
                rate = self._best_rate(method, [f * best for f in factors])
            self._runs(method, rate, range(_SEEDS.value), refused)

    def _best_rate(self, method, rates):
        sign = -1 if self._task.higher_is_better else 1
        return rate_search.best_rate(
            rates,
            lambda r: sign * self._runs(method, r, [inner.SEED_OF_RATES])[0]["value"],
            MORE,
        )

    def _refusal(self, method):
        """Return why a method takes no such optimizer; None if it does."""
        try:
            with self._strategy.scope():
                self._optimizer(method, INNER[self._name][1])
        except ValueError as error:
            return str(error).partition(" Received:")[0]
        return None

    def _runs(self, method, rate, seeds, refused=None):
        def make_trainer():
            make = functools.partial(self._optimizer, method, rate)
            return Trainer(self._task, make, self._strategy)

        def measure(trainer, seed, _):
            row = {"metric": self._task.metric, "jit_compile": self._task.jit_compile}
            if refused is not None:
                return {**row, "value": None, "refused": refused}
            return {**row, "value": trainer().run(seed, steps, steps)[-1][2]}

        steps = _STEPS.value
        key = {
            "task": self._task.name,
            "optimizer": self._name,
            "method": method,
            "rate": rate,
            "steps": steps,
            "workers": self._strategy.num_replicas_in_sync,
        }
        return seeded.rows(self._done, key, seeds, make_trainer, measure)

    def _optimizer(self, method, rate):
        decay = keras.optimizers.schedules.CosineDecay(rate, _STEPS.value)
        inner = INNER[self._name][0](decay)
        if method == "dense":
            return inner
        # What is warned of is wanted here, and Adams are corrected.
        corrects = unsupported.unsupported_reason(inner) is None
        return METHODS[method](
            inner, _STEPS.value, corrections=tf_dgc.Corrections(adam=corrects)
        )


def train():
    """Run what is not done, and return all rows of the file."""
    strategy = make_strategy(_WORKERS.value)  # before data are read
    done = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    given = [small.TASKS[name](_DATA_DIR.value) for name in _TASKS.value]
    for task in progress.track(given, "tasks", lambda task: task.name):
        for name in progress.track(_OPTIMIZERS.value or INNER, "optimizers", str):
            Comparison(task, strategy, name, done).run(_METHODS.value or METHODS)
    return done.rows


def main(_):
    """Run what the flags ask for, and report."""
    tf.get_logger().setLevel("ERROR")
    paths = _FROM_JSON.value
    tables = inner.tables(resumable.read_rows(paths) if paths else train(), METHODS)
    reporting.report_all(tables, _MARKDOWN.value)


if __name__ == "__main__":
    app.run(main)

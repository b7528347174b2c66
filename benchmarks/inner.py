"""Which optimizers train behind compression? Every one of Keras's, on two tasks.

    python benchmarks/inner.py --data_dir ~/tensorflow_datasets --json inner.json

Trains the tasks of `convergence.py` with each optimizer by itself, then within
`DGCOptimizer` and with other methods: what an optimizer's rule makes of a sum of which
most is left out for a while, or is rounded. Rates decay by a cosine, but for that of
ScheduleFreeAdamW; nothing else is set.

All rates are the best ones by a seed that does not count. An optimizer by itself has
that of a third, once and three times its usual one, and of others beyond where it is
the last of them, marked where it still is. A method then has that of `--factors` times
it: so no method loses by a rate that suits the dense run alone (`ef_sign_sgd`, for one,
needs 0.3 times it with SGD), and the table says which it took. `--factors=1` asks
instead what becomes of a rate that is kept.

An optimizer that a method refuses has a row that says why. A row is appended to
`--json` when a run ends, so the same command goes on where it was killed, and does only
what is not done; `--optimizers` and `--tasks` choose a piece. `--from_json
a.jsonl,b.jsonl` reports files together, without training.
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
from common.inner_optimizers import INNER

from tf_dgc.adaptive import unsuited

_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_OPTIMIZERS = flags.DEFINE_list("optimizers", [], "Names of them; empty for all.")
_METHODS = flags.DEFINE_list("methods", [], "Names of methods; empty for all.")
_TASKS = flags.DEFINE_list("tasks", list(tasks.TASKS), "Tasks.")
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
MORE = 2
"""How often to go on beyond them."""

SEED_OF_RATES = 100
"""Seed of the runs by which the rate is chosen, no run that counts."""
KEYS = ["task", "optimizer", "method", "rate", "steps", "workers", "seed"]

METHODS = {
    name: method_settings.method(name)[0]
    for name in ("uniform_8bit", "power_sgd", "ef_sign_sgd", "dgc")
}

COLUMNS = [
    ("optimizer", "optimizer", ""),
    ("rate", "rate", ".2g"),
    ("edge", "at the edge", ""),
    ("dense", "dense", ".4f"),
    *((name, name, "") for name in METHODS),
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
        """Choose rates, and run the optimizer by itself and with methods."""
        usual = INNER[self._name][1]
        best = self._best_rate("dense", [f * usual for f in FACTORS], MORE)
        self._runs("dense", best, range(_SEEDS.value))
        factors = list(map(float, _FACTORS.value))
        for method in progress.track(methods, "methods", str):
            rate, refused = best, self._refusal(method)
            if refused is None and factors != [1.0]:
                rate = self._best_rate(method, [f * best for f in factors], 0)
            self._runs(method, rate, range(_SEEDS.value), refused)

    def _best_rate(self, method, rates, more):
        sign = -1 if self._task.higher_is_better else 1
        return pieces.best_rate(
            rates,
            lambda r: sign * self._runs(method, r, [SEED_OF_RATES])[0]["value"],
            more,
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
        @functools.cache
        def trainer():  # it is traced once, and not at all if nothing is to be done
            keras.backend.clear_session()
            make = functools.partial(self._optimizer, method, rate)
            return training.Trainer(self._task, make, self._strategy)

        def measure(seed):
            row = {"metric": self._task.metric, "jit_compile": self._task.jit_compile}
            if refused is not None:
                return {**row, "value": None, "refused": refused}
            return {**row, "value": trainer().run(seed, steps, steps)[-1][2]}

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

    def _optimizer(self, method, rate):
        decay = keras.optimizers.schedules.CosineDecay(rate, _STEPS.value)
        inner = INNER[self._name][0](decay)
        if method == "dense":
            return inner
        # What is warned of is wanted here, and Adams are corrected.
        corrects = unsuited.reason(inner) is None
        return METHODS[method](inner, _STEPS.value, adam_correction=corrects)


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
    found, tried = {}, {}
    for row in rows:
        name, method = row["optimizer"], row["method"]
        if row["seed"] != SEED_OF_RATES:
            of_method = found.setdefault(name, {}).setdefault(method, {})
            of_method.setdefault(row["rate"], []).append(row)
        elif method == "dense":
            tried.setdefault(name, set()).add(row["rate"])
    return [_summary(by_method, tried.get(n, ())) for n, by_method in found.items()]


def _summary(by_method, tried):
    # Where there are several rates, that of most seeds, and of those the last one.
    chosen = {
        method: max(reversed(by_rate.values()), key=len)
        for method, by_rate in by_method.items()
    }
    first = chosen.pop("dense")
    dense = statistics.mean(row["value"] for row in first)
    edge = pieces.edge(first[0]["rate"], tried)
    line = {**first[0], "dense": dense, "edge": edge, "refusals": {}}
    for method, group in chosen.items():
        if why := group[0].get("refused"):
            line["refusals"].setdefault(why, []).append(method)
            line[method] = "refused"
            continue
        off = statistics.mean(row["value"] for row in group) - dense
        line[method] = f"{off:+.4f}"
        if (factor := group[0]["rate"] / first[0]["rate"]) != 1:
            line[method] += f" (rate x {factor:.2g})"
    return line


def _refusals(lines):
    """Return what is said of optimizers that methods refuse."""
    return [
        f"{line['optimizer']} is refused by {', '.join(methods)}: {why}"
        for line in lines
        for why, methods in line["refusals"].items()
    ]


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
        notes = _refusals(shown)
        for note in notes:
            print(note)
        tables += [reporting.setting(shown, {}), *notes]
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    app.run(main)

"""Does AdamW train behind compression? With every correction and its alternatives.

    python study/adam.py --data_dir ~/tensorflow_datasets --json runs.jsonl

Trains a small GPT-2 (`--task shakespeare`, and `ptb` with `--ptb_dir`), or adapts a
network to other digits (`finetune`, `lora`), on workers of this process: by stock
AdamW, by methods with Adam correction and without, and by what others do instead.
Every one of them has a learning rate of its own, the best of at least four by a seed
that does not count; rates decay by a cosine. `--runs` chooses of what `--list` shows.
Rates are searched by runs of the full length; of `--search_steps`, where that is less,
and then by what the optimizer is for a run so short: `rate after` says of how many.

A row is appended to `--json` when a run ends, and a run that is killed goes on where
it was saved last: the same command does only what is not done. `--from_json` reports
rows without training. `total ratio` has warm-up and all else in it, `then` is that of
the steps after the first fifth, and `apart` the same without tensors that are exempt.
`to dense` is the mean difference to the dense runs of the same seeds, `to control` that
to the same rule when everything is sent, each with half of its 95 % interval by
Student. `at 1/25` is the loss when a run had sent a 25th of what the dense one sends in
all: who sends more is read there in the middle of its cosine, at a high rate, which a
shorter run would not be.
"""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import benchmarks_path  # noqa: F401
import keras
import tensorflow as tf
from absl import app, flags
from common import progress, reporting, resumable
from experiments import adam
from experiments.adam import KEYS, SEED_OF_RATES
from tasks import transformer
from training import rate_search, seeded
from training.trainer import Trainer, make_strategy

_TASK = flags.DEFINE_enum("task", "shakespeare", list(transformer.TASKS), "Task.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where TensorFlow Datasets keeps it.")
_PTB_DIR = flags.DEFINE_string("ptb_dir", None, "Folder of ptb.train.txt.")
_RUNS = flags.DEFINE_list("runs", [], "Names of runs, also to show; empty for all.")
_LIST = flags.DEFINE_bool("list", False, "Show names of runs only.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 1500, "Steps of a run.", lower_bound=5)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=2)
_BATCH = flags.DEFINE_integer(
    "batch", None, "Examples of a worker; that of the task by default.", lower_bound=1
)
_RATES = flags.DEFINE_list(
    "rates", ["5e-4", "1e-3", "2e-3", "4e-3"], "Learning rates to choose from."
)
_SEARCH_STEPS = flags.DEFINE_integer(
    "search_steps", None, "Steps of a run that chooses the rate; --steps by default.", 5
)
_RATE = flags.DEFINE_float("rate", None, "Learning rate of all, instead of a search.")
_JSON = flags.DEFINE_string("json", None, "A file for all runs, a line each.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of earlier runs, to be reported without training."
)
_BUDGETS = flags.DEFINE_list(
    "budgets", ["4", "25"], "How many times less than dense runs are compared at."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "A file for the tables, .md.")
_PLOT = flags.DEFINE_string("plot", None, "A file for a picture, .svg or .png.")

POINTS = 10  # of a curve
MORE = 4  # rates beyond the edge

COLUMNS = [
    ("method", "method", ""),
    ("rate", "rate", ".2g"),
    ("searched", "rate after", ",d"),
    ("edge", "at the edge", ""),
    ("value", "loss", ".4f"),
    ("spread", "+-", ".4f"),
    ("to_dense", "to dense", "+.4f"),
    ("to_dense_half_width", "95 %", ".4f"),
    ("to_control", "to control", "+.4f"),
    ("to_control_half_width", "95 %", ".4f"),
    ("ratio", "total ratio", ",.1f"),
    ("then", "then", ",.1f"),
    ("apart", "apart", ",.0f"),
    ("minutes", "minutes", ".1f"),
    ("xla", "XLA", ""),
]


class Comparison:
    """Runs of a task.

    Args:
        task: a `small.Task`.
        strategy: of `trainer.make_strategy`.
        done: a `resumable.ResumableRows`.
    """

    def __init__(self, task, strategy, done):
        self._task, self._strategy, self._done = task, strategy, done

    def add(self, name):
        """Choose the rate of a run, and run it with all seeds."""
        rates = [_RATE.value] if _RATE.value else [float(r) for r in _RATES.value]
        rate = rates[0]
        if len(rates) > 1:
            steps = min(_STEPS.value, _SEARCH_STEPS.value or _STEPS.value)
            seeds = [SEED_OF_RATES]
            rate = rate_search.best_rate(
                rates,
                lambda rate: self._rows(name, rate, steps, seeds)[0]["value"],
                MORE,
            )
        self._rows(name, rate, _STEPS.value, range(_SEEDS.value))

    def _rows(self, name, rate, steps, seeds):
        key = {
            "task": self._task.name,
            "method": name,
            "rate": rate,
            "steps": steps,
            "workers": self._strategy.num_replicas_in_sync,
            "batch": self._task.batch_size,
        }
        return seeded.rows(
            self._done,
            key,
            progress.track(seeds, f"seeds, {rate:g}"),
            lambda: self._trainer(name, rate, steps),
            lambda trainer, seed, saved: self._run(trainer(), seed, steps, saved),
        )

    def _trainer(self, name, rate, steps):
        def make_optimizer():
            decay = keras.optimizers.schedules.CosineDecay(rate, steps)
            return adam.RUNS[name].make(keras.optimizers.AdamW(decay), steps)

        return Trainer(self._task, make_optimizer, self._strategy)

    def _run(self, trainer, seed, steps, saved):
        curve = trainer.run(seed, steps, max(1, steps // POINTS), saved)
        size = 4 * trainer.num_parameters
        return {
            "metric": self._task.metric,
            "value": curve[-1][2],
            "dense_bytes_per_step": size,
            "exempt_bytes_per_step": 4 * trainer.num_exempt,
            "jit_compile": self._task.jit_compile,
            "seconds": trainer.seconds,
            "curve": [(at, at * size if b is None else b, v) for at, b, v in curve],
        }


def train():
    """Run what is not done, and return all rows of the file."""
    strategy = make_strategy(_WORKERS.value)  # before data are read
    task = transformer.TASKS[_TASK.value](flags.FLAGS)
    task.batch_size = _BATCH.value or task.batch_size
    done = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    comparison = Comparison(task, strategy, done)
    for name in progress.track(_RUNS.value or adam.RUNS, "runs", str):
        comparison.add(name)
    return done.rows


def _columns(budgets):
    at_budgets = [(adam.budget_key(b), f"at 1/{b:g}", ".4f") for b in budgets]
    place = [key for key, _, _ in COLUMNS].index("minutes")
    return [*COLUMNS[:place], *at_budgets, *COLUMNS[place:]]


def main(_):
    """Run what the flags ask for, and report."""
    tf.get_logger().setLevel("ERROR")
    if _LIST.value:
        print("\n".join(adam.RUNS))
        return
    unknown = [name for name in _RUNS.value if name not in adam.RUNS]
    if unknown:
        raise app.UsageError(f"--runs has names that --list does not show: {unknown}")
    paths = _FROM_JSON.value
    rows = resumable.read_rows(paths) if paths else train()
    budgets = list(map(float, _BUDGETS.value))
    lines, columns = adam.summaries(rows, budgets), _columns(budgets)
    panels = {}
    for setting in dict.fromkeys(map(adam.setting, lines)):
        shown = [
            line
            for line in lines
            if adam.setting(line) == setting
            and (not _RUNS.value or line["method"] in _RUNS.value)
        ]
        if not shown:
            continue
        task, workers, steps, batch = setting
        title = f"{task}: {shown[0]['metric']} after {steps} steps, {workers} workers "
        seeds = sorted({line["seeds"] for line in shown})
        title += f"of {batch}, seeds: {', '.join(map(str, seeds))}"
        panels[title] = shown
    tables = [(title, shown, columns) for title, shown in panels.items()]
    reporting.report_all(tables, _MARKDOWN.value)
    if _PLOT.value and panels:  # none if only rates have been tried
        from experiments import pictures

        pictures.draw_curves(panels, _PLOT.value)


if __name__ == "__main__":
    app.run(main)

"""Does AdamW train with compression? Compares Adam correction and its alternatives.

    python study/adam.py --data_dir ~/tensorflow_datasets --json runs.jsonl

Trains a small GPT-2 (`--task shakespeare`, and `ptb` with `--ptb_dir`), or adapts a
network to other digits (`finetune`, `lora`), on workers of this process: with stock
AdamW, with compression with and without Adam correction, and with rival algorithms.
Each has its own learning rate, the best of at least four for a seed that is not used
again; rates decay by a cosine. `--list` shows the runs, `--runs` selects some of them.
Rate searches use runs of the full length, or of `--search_steps` if that is less;
`search steps` is their number of steps.

A row is appended to `--json` when a run ends, and a killed run resumes from its last
checkpoint. The same command does only the missing runs. `--from_json` reports rows
without training. `total ratio` is the compression ratio of a whole run, `late ratio` of
the steps after the first fifth, and `compressed tensors` the same without uncompressed
tensors. `vs. dense` is the mean difference from the dense runs of the same seeds,
`vs. control` from the same update rule without compression, each with half of its 95 %
interval (Student). `half range` is half of the range over the seeds.
`at 1/25` is the loss when a run had sent a 25th of all bytes of a dense run. Runs that
send more are then in the middle of their cosine decay, at a high rate, unlike a shorter
run.
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
from training import rate_search
from training.seed_runs import run_seeds
from training.trainer import Trainer, make_strategy

_TASK = flags.DEFINE_enum("task", "shakespeare", list(transformer.TASKS), "Task.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of TensorFlow Datasets.")
_PTB_DIR = flags.DEFINE_string("ptb_dir", None, "Folder of ptb.train.txt.")
_RUNS = flags.DEFINE_list("runs", [], "Runs to do and to report; empty for all.")
_LIST = flags.DEFINE_bool("list", False, "Print the names of runs and exit.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 1500, "Steps of a run.", lower_bound=5)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers.", lower_bound=2)
_BATCH = flags.DEFINE_integer(
    "batch", None, "Batch size per worker; the task's by default.", lower_bound=1
)
_RATES = flags.DEFINE_list(
    "rates", ["5e-4", "1e-3", "2e-3", "4e-3"], "Learning rates to choose from."
)
_SEARCH_STEPS = flags.DEFINE_integer(
    "search_steps", None, "Steps of the runs of a rate search; --steps by default.", 5
)
_RATE = flags.DEFINE_float("rate", None, "Learning rate of all runs; no search.")
_JSON = flags.DEFINE_string("json", None, "File for the rows, one line per run.")
_FROM_JSON = flags.DEFINE_list(
    "from_json", [], "Files of rows to report without training."
)
_BUDGETS = flags.DEFINE_list(
    "budgets", ["4", "25"], "Compression ratios at which losses are compared."
)
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the tables, .md.")
_PLOT = flags.DEFINE_string("plot", None, "File for a picture, .svg or .png.")

POINTS = 10  # per curve
MAX_FURTHER_RATES = 4  # beyond the edge of a search

COLUMNS = [
    ("method", "method", ""),
    ("rate", "rate", ".2g"),
    ("searched", "search steps", ",d"),
    ("edge", "edge of search", ""),
    ("value", "loss", ".4f"),
    ("spread", "half range", ".4f"),
    ("to_dense", "vs. dense", "+.4f"),
    ("to_dense_half_width", "± 95 %", ".4f"),
    ("to_control", "vs. control", "+.4f"),
    ("to_control_half_width", "± 95 %", ".4f"),
    ("ratio", "total ratio", ",.1f"),
    ("then", "late ratio", ",.1f"),
    ("apart", "compressed tensors", ",.0f"),
    ("minutes", "minutes", ".1f"),
    ("xla", "XLA", ""),
]


class Comparison:
    """Runs of a task.

    Args:
        task: a `small.Task`.
        strategy: strategy of `trainer.make_strategy`.
        store: a `resumable.ResumableRows`.
    """

    def __init__(self, task, strategy, store):
        self._task, self._strategy, self._store = task, strategy, store

    def add(self, name):
        """Search the learning rate of a run, and do it with all seeds."""
        rates = [_RATE.value] if _RATE.value else [float(r) for r in _RATES.value]
        rate = rates[0]
        if len(rates) > 1:
            steps = min(_STEPS.value, _SEARCH_STEPS.value or _STEPS.value)
            seeds = [SEED_OF_RATES]
            rate = rate_search.best_rate(
                rates,
                lambda rate: self._rows(name, rate, steps, seeds)[0]["value"],
                MAX_FURTHER_RATES,
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
        return run_seeds(
            self._store,
            key,
            progress.track(seeds, f"seeds, {rate:g}"),
            lambda: self._trainer(name, rate, steps),
            lambda trainer, seed, checkpoint: self._run(
                trainer(), seed, steps, checkpoint
            ),
        )

    def _trainer(self, name, rate, steps):
        def make_optimizer():
            decay = keras.optimizers.schedules.CosineDecay(rate, steps)
            return adam.RUNS[name].make(keras.optimizers.AdamW(decay), steps)

        return Trainer(self._task, make_optimizer, self._strategy)

    def _run(self, trainer, seed, steps, checkpoint):
        curve = trainer.run(seed, steps, max(1, steps // POINTS), checkpoint)
        size = 4 * trainer.num_parameters
        # Stock optimizers do not count bytes.
        curve = [
            (step, step * size if sent is None else sent, value)
            for step, sent, value in curve
        ]
        return {
            "metric": self._task.metric,
            "value": curve[-1][2],
            "dense_bytes_per_step": size,
            "exempt_bytes_per_step": 4 * trainer.num_uncompressed,
            "jit_compile": self._task.jit_compile,
            "seconds": trainer.seconds,
            "curve": curve,
        }


def train():
    """Do the missing runs, and return all rows of the file."""
    strategy = make_strategy(_WORKERS.value)  # before TensorFlow creates its devices
    task = transformer.TASKS[_TASK.value](flags.FLAGS)
    task.batch_size = _BATCH.value or task.batch_size
    store = resumable.ResumableRows(_JSON.value, KEYS, reporting.provenance())
    comparison = Comparison(task, strategy, store)
    for name in progress.track(_RUNS.value or adam.RUNS, "runs", str):
        comparison.add(name)
    return store.rows


def _columns(budgets):
    budget_columns = [(adam.budget_key(b), f"at 1/{b:g}", ".4f") for b in budgets]
    index = [key for key, _, _ in COLUMNS].index("minutes")
    return [*COLUMNS[:index], *budget_columns, *COLUMNS[index:]]


def main(_):
    """Train or read rows, and report."""
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
    panels = _panels(adam.summaries(rows, budgets))
    columns = _columns(budgets)
    tables = [(title, lines, columns) for title, lines in panels.items()]
    reporting.report_all(tables, _MARKDOWN.value)
    if _PLOT.value and panels:  # none if there are only rows of rate searches
        from experiments import pictures

        pictures.draw_curves(panels, _PLOT.value)


def _panels(all_lines):
    """Return the lines of the selected runs by the title of their setting."""
    groups = {}
    for line in all_lines:
        if not _RUNS.value or line["method"] in _RUNS.value:
            groups.setdefault(adam.setting(line), []).append(line)
    panels = {}
    for (task, workers, steps, batch), lines in groups.items():
        title = f"{task}: {lines[0]['metric']} after {steps} steps, {workers} workers "
        seeds = sorted({line["seeds"] for line in lines})
        title += f"of {batch}, seeds: {', '.join(map(str, seeds))}"
        panels[title] = lines
    return panels


if __name__ == "__main__":
    app.run(main)

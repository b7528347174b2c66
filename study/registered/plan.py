"""The plan: the runs and their order; `study/plan.md` has the reasons.

Pending runs are done from the top, so that even a part of the plan is informative: a
pair of each task comes first, then more seeds.
"""

import dataclasses
import json

from tasks.recipes import RECIPES

from registered import intervals
from registered.specs import Spec

STEPS = {"cifar10": 10_000, "ptb": 5_000, "mnist": 5_000, "shakespeare": 10_000}
MINUTES = {"cifar10": 20, "ptb": 30, "mnist": 1, "shakespeare": 4}  # per run
MARGINS = {  # margin of non-inferiority, and the aim
    "cifar10": (0.5, 0.2),
    "ptb": (1.0, 0.5),
}
HALF_WIDTH = 0.25  # points of accuracy; wider intervals of CIFAR-10 get more seeds
PLANNED_SEEDS = 5  # seeds of CIFAR-10 that are run whatever the interval is
SEEDS = range(10)  # all seeds that CIFAR-10 may use
# Commits of the first 19 runs. They clipped `float16` like DGC; and `dgc` scaled
# gradients by the learning rate of the step that sent them, and masked in every step.
FIRST_COMMITS = "a35c22d", "3833e68", "6b589e5"
RATE_WHEN_SENT = ", rate when sent"  # suffix of the labels of those runs of `dgc`


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that belong together.

    Attributes:
        task: name of the task.
        methods: names of methods, and labels of the ablation.
        seeds: seeds; each runs all methods before the next one begins.
        workers: number of workers; 8 workers take half of the steps for the same
            epochs.
        model: arguments of the task.
        minutes: minutes of a run, or None for the task's.
    """

    task: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    workers: int = 4
    model: dict | None = None
    minutes: int | None = None

    def specs(self):
        """Return the runs of the group, in order."""
        return [self._spec(m, seed) for seed in self.seeds for m in self.methods]

    @property
    def total_minutes(self):
        """Minutes of all its runs together."""
        minutes = self.minutes or MINUTES[self.task]
        return minutes * len(self.seeds) * len(self.methods)

    def _spec(self, label, seed):
        method, settings = method_and_settings(self.task, label)
        if self.model:
            settings = {**settings, "model": self.model}
        steps = STEPS[self.task] * 4 // self.workers
        return Spec(self.task, method, settings, self.workers, seed, steps)


UNMASKED = "dgc unmasked"
TIGHTER = "dense clipped as dgc"  # with N**-0.5 times the recipe's threshold
FOR_STEPS = "dgc_for_steps"  # the documented settings for a run of this length
QUARTER = "dgc_for_steps, 75 %"  # sends a quarter of the entries in each step
FOR_LENGTHS = FOR_STEPS, QUARTER
_WITHOUT = {"momentum_correction": False, "factor_masking": False, "warmup_epochs": 0}
_CLIPPED = {"clipnorm": 1.0}
_RATE = RECIPES["cifar10"].rate
# Method and settings of each label that is not a method with its defaults. Sign methods
# discard magnitudes and so need other learning rates; the factors are those of
# `common/method_settings.py`.
LABELS = {
    UNMASKED: ("dgc", {"method": {"factor_masking": False}}),
    TIGHTER: ("dense", {"recipe": {"clipnorm": 4**-0.5 * RECIPES["ptb"].clipnorm}}),
    QUARTER: (FOR_STEPS, {"method": {"sparsity": 0.75}}),
    "top-k alone": ("dgc", {"method": _WITHOUT}),
    "+ momentum correction": (
        "dgc",
        {"method": {"factor_masking": False, "warmup_epochs": 0}},
    ),
    "+ local clipping": (
        "dgc",
        {
            "method": {"factor_masking": False, "warmup_epochs": 0},
            "recipe": _CLIPPED,
        },
    ),
    "+ factor masking": ("dgc", {"method": {"warmup_epochs": 0}, "recipe": _CLIPPED}),
    "+ warm-up": ("dgc", {"recipe": _CLIPPED}),
    "ef_sign_sgd": ("ef_sign_sgd", {"recipe": {"rate": round(0.3 * _RATE, 6)}}),
    "sign_sgd": (
        "sign_sgd",
        {"recipe": {"rate": round(0.03 * _RATE, 6), "momentum": 0.0}},
    ),
}
# Other labels of `LABELS` are for CIFAR-10 only.
TASKS_OF_LABEL = {UNMASKED: tuple(STEPS), TIGHTER: ("ptb",), QUARTER: ("ptb",)}
ABLATION = tuple(
    label
    for label, (method, _) in LABELS.items()
    if method == "dgc" and label != UNMASKED
)
# Seeds whose results of `dense` and `dgc` had been seen when a label was added or
# changed.
SEEDS_SEEN = {
    "dgc": {"ptb": (0,), "cifar10": (0, 1, 2), "mnist": (0, 1), "shakespeare": (0, 1)},
    UNMASKED: {"ptb": (0,), "cifar10": (0, 1), "mnist": (0, 1), "shakespeare": (0, 1)},
    TIGHTER: {"ptb": (0,)},
    FOR_STEPS: {"ptb": (1, 2), "mnist": SEEDS[:5], "shakespeare": SEEDS[:5]},
    QUARTER: {"ptb": (1, 2)},
}
# Seeds whose results led to a label, and which are therefore no evidence about it.
EXCLUDED_SEEDS = {"dgc": {"ptb": (0,)}, UNMASKED: {"ptb": (0,)}}
OTHER_METHODS = (
    "power_sgd",
    "qsgd",
    "ef_sign_sgd",
    "sign_sgd",
    "adacomp",
    "stc",
    "scale_com",
)
PAIR = ("dense", "dgc")
ALL = ("dense", "dgc", "float16")
RESNET20 = {"blocks": 3, "stride": 1}

GROUPS = [
    *(Group(task, PAIR, (0,)) for task in ("mnist", "shakespeare", "cifar10")),
    Group("ptb", ("dense",), (0,)),
    *(Group(task, ALL, (1,)) for task in ("mnist", "shakespeare")),
    Group("cifar10", PAIR, (1, 2, 3, 4)),
    Group("ptb", (*PAIR, TIGHTER), (1,)),
    *(Group(task, ALL, (2, 3, 4)) for task in ("mnist", "shakespeare")),
    Group("ptb", (*PAIR, TIGHTER), (2,)),
    Group("ptb", (FOR_STEPS,), (1, 2)),
    *(Group(task, (FOR_STEPS,), (0, 1, 2, 3, 4)) for task in ("shakespeare", "mnist")),
    Group("cifar10", OTHER_METHODS, (0,)),
    Group("cifar10", ABLATION, (0,)),
    *(Group(task, ("float16",), (0,)) for task in STEPS),
    *(Group(task, PAIR, (0,), workers=8) for task in STEPS),
    Group("ptb", (QUARTER,), (1, 2)),
    Group("cifar10", (*ABLATION, *OTHER_METHODS), (1,)),
    Group("cifar10", (*ABLATION, *OTHER_METHODS), (2,)),
    Group("cifar10", PAIR, (0,), model=RESNET20, minutes=120),
    Group("ptb", (UNMASKED,), (1, 2)),
    Group("ptb", PAIR, (3, 4)),
    Group("cifar10", ("float16",), (1, 2)),
    Group("ptb", ("float16",), (1, 2)),
    Group("ptb", ("dgc", TIGHTER), (0,)),
    *(Group(task, (UNMASKED,), (0,)) for task in ("ptb", "cifar10")),
    *(Group(task, (UNMASKED,), (0, 1)) for task in ("mnist", "shakespeare")),
    Group("cifar10", (UNMASKED,), (1, 2)),
]


def method_and_settings(task, label):
    """Return the method and the settings of a label.

    Raises:
        ValueError: if the label is for other tasks.
    """
    method, settings = LABELS.get(label, (label, {}))
    tasks = TASKS_OF_LABEL.get(label, ("cifar10",))
    if settings and task not in tasks:
        raise ValueError(f"{label!r} is for {', '.join(tasks)} alone, not {task}.")
    return method, settings


def label_of(row):
    """Return the label of a row: a key of `LABELS`, or its method.

    Rows with settings that are not in the plan are labelled by method and settings.
    """
    settings = {k: v for k, v in row["settings"].items() if k != "model"}
    label = row["method"]
    if settings:
        label += f" {json.dumps(settings, sort_keys=True)}"
    for name, method_with_settings in LABELS.items():
        if method_with_settings == (row["method"], settings):
            label = name
    return label + RATE_WHEN_SENT * used_rate_when_sent(row)


def used_rate_when_sent(row):
    """Return whether gradients were scaled by the learning rate of the sending step."""
    return row["method"] == "dgc" and row["commit"].startswith(FIRST_COMMITS)


def estimated_minutes(specs):
    """Return about how many minutes these runs take."""
    by_key = {s.key: g.minutes for g in GROUPS if g.minutes for s in g.specs()}
    return sum(by_key.get(spec.key, MINUTES[spec.task]) for spec in specs)


def is_superseded(row):
    """Return whether a run deviated from the recipe and has to be repeated.

    The first runs clipped `float16` like DGC, `N**0.5` times as tightly as dense.
    """
    clips = RECIPES[row["task"]].clipnorm is not None
    first = row["commit"].startswith(FIRST_COMMITS)
    return clips and first and row["method"] == "float16"


def pending(rows):
    """Return the runs that remain, in order.

    Args:
        rows: rows of finished runs, failures included.
    """
    rows = [r for r in rows if not is_superseded(r) and not used_rate_when_sent(r)]
    done = {Spec.of(row).key for row in rows}
    split = next(i for i, group in enumerate(GROUPS) if group.workers == 8)
    specs = [spec for group in GROUPS[:split] for spec in group.specs()]
    specs += further_seeds(rows)
    specs += [spec for group in GROUPS[split:] for spec in group.specs()]
    return [spec for spec in specs if spec.key not in done]


def further_seeds(rows):
    """Return the next pair of CIFAR-10 beyond the planned ones, or nothing.

    Pairs are added one at a time until the interval is narrow. A seed with a failed run
    is not repeated; the next seed follows.
    """
    specs = Group("cifar10", PAIR, tuple(SEEDS)).specs()
    keys = {spec.key for spec in specs}
    rows = [row for row in rows if Spec.of(row).key in keys]
    done = {Spec.of(row).key for row in rows}
    missing = [spec for spec in specs if spec.key not in done]
    narrow = 100 * intervals.paired(rows, "dgc").half_width <= HALF_WIDTH
    if narrow or not missing or missing[0].seed < PLANNED_SEEDS:
        return []
    return [spec for spec in missing if spec.seed == missing[0].seed]

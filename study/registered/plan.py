"""The plan: which runs, in which order. `study/plan.md` says why.

What is not yet trained is taken up from the top, so every beginning of it says
something: a pair of each task first, then more seeds.
"""

import dataclasses
import json

from tasks.recipes import RECIPES

from registered import intervals
from registered.specs import Spec

STEPS = {"cifar10": 10_000, "ptb": 5_000, "mnist": 5_000, "shakespeare": 10_000}
MINUTES = {"cifar10": 20, "ptb": 30, "mnist": 1, "shakespeare": 4}  # of a run
MARGINS = {  # of non-inferiority, and what is aimed at
    "cifar10": (0.5, 0.2),
    "ptb": (1.0, 0.5),
}
HALF_WIDTH = 0.25  # points of accuracy, until which seeds are added on CIFAR-10
PLANNED_SEEDS = 5  # of them, whatever the interval is
SEEDS = range(10)  # at most
# Commits of the first 19 runs. `float16` was clipped as DGC is, and in `dgc` gradients
# counted by the learning rate of the step in which they were sent, masked in any step.
FIRST = "a35c22d", "3833e68", "6b589e5"
WHEN_SENT = ", rate when sent"  # behind the labels of those


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that belong together.

    Attributes:
        task: name of the task.
        methods: names of methods, and labels of the ablation.
        seeds: seeds; for each of them all methods, one after another.
        workers: number of workers. With 8, half of the steps are the same epochs.
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
        """Return what is to be run."""
        return [self._spec(m, seed) for seed in self.seeds for m in self.methods]

    @property
    def total_minutes(self):
        """Minutes of all its runs together."""
        each = self.minutes or MINUTES[self.task]
        return each * len(self.seeds) * len(self.methods)

    def _spec(self, label, seed):
        method, settings = labelled(self.task, label)
        if self.model:
            settings = {**settings, "model": self.model}
        steps = STEPS[self.task] * 4 // self.workers
        return Spec(self.task, method, settings, self.workers, seed, steps)


UNMASKED = "dgc unmasked"
TIGHTER = "dense clipped as dgc"  # whose threshold is N**-0.5 of the recipe's
FOR_STEPS = "dgc_for_steps"  # what the docs advise for the length of a run
QUARTER = "dgc_for_steps, 75 %"  # a quarter of the entries in each step
FOR_LENGTHS = FOR_STEPS, QUARTER
_WITHOUT = {"momentum_correction": False, "factor_masking": False, "warmup_epochs": 0}
_CLIPPED = {"clipnorm": 1.0}
_RATE = RECIPES["cifar10"].rate
# What a label stands for where it is not a method by its defaults: the method, and
# settings. What has no magnitude, or loses most of it, needs a rate of its own; the
# factors are those of `common/method_settings.py`.
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
# Tasks of these; all other labels are for CIFAR-10 alone.
OF_TASKS = {UNMASKED: tuple(STEPS), TIGHTER: ("ptb",), QUARTER: ("ptb",)}
ABLATION = tuple(
    label
    for label, (method, _) in LABELS.items()
    if method == "dgc" and label != UNMASKED
)
# Labels that came when runs had been seen: seeds of which `dense` and `dgc` were known,
# and those that led to them, which say nothing about them.
SEEN = {
    "dgc": {"ptb": (0,), "cifar10": (0, 1, 2), "mnist": (0, 1), "shakespeare": (0, 1)},
    UNMASKED: {"ptb": (0,), "cifar10": (0, 1), "mnist": (0, 1), "shakespeare": (0, 1)},
    TIGHTER: {"ptb": (0,)},
    FOR_STEPS: {"ptb": (1, 2), "mnist": SEEDS[:5], "shakespeare": SEEDS[:5]},
    QUARTER: {"ptb": (1, 2)},
}
LED_TO = {"dgc": {"ptb": (0,)}, UNMASKED: {"ptb": (0,)}}
OTHERS = (
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
    Group("cifar10", OTHERS, (0,)),
    Group("cifar10", ABLATION, (0,)),
    *(Group(task, ("float16",), (0,)) for task in STEPS),
    *(Group(task, PAIR, (0,), workers=8) for task in STEPS),
    Group("ptb", (QUARTER,), (1, 2)),
    Group("cifar10", (*ABLATION, *OTHERS), (1,)),
    Group("cifar10", (*ABLATION, *OTHERS), (2,)),
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


def labelled(task, label):
    """Return the method and the settings of a label.

    Raises:
        ValueError: for a label of other tasks.
    """
    method, settings = LABELS.get(label, (label, {}))
    known = OF_TASKS.get(label, ("cifar10",))
    if settings and task not in known:
        raise ValueError(f"{label!r} is for {', '.join(known)} alone, not {task}.")
    return method, settings


def label_of(row):
    """Return the label of a row, or its method where it has none of its own.

    Of settings that are not planned, method and settings: it is no planned run.
    """
    settings = {k: v for k, v in row["settings"].items() if k != "model"}
    own = row["method"], settings
    found = (label for label, wanted in LABELS.items() if wanted == own)
    other = f" {json.dumps(settings, sort_keys=True)}" if settings else ""
    label = next(found, row["method"] + other)
    return label + WHEN_SENT * is_of_rate_when_sent(row)


def is_of_rate_when_sent(row):
    """Return whether gradients counted by the rate of the step they were sent in."""
    return row["method"] == "dgc" and row["commit"].startswith(FIRST)


def minutes(specs):
    """Return about how long these runs take."""
    known = {s.key: g.minutes for g in GROUPS if g.minutes for s in g.specs()}
    return sum(known.get(spec.key, MINUTES[spec.task]) for spec in specs)


def superseded(row):
    """Return whether a run was not by the recipe, and is to be run again.

    At first `float16` was clipped as what waits is, `N**0.5` times as tightly as dense.
    """
    clipped = RECIPES[row["task"]].clipnorm is not None
    before = row["commit"].startswith(FIRST)
    return clipped and before and row["method"] == "float16"


def pending(rows):
    """Return what is still to be run, in order.

    Args:
        rows: rows of finished runs, failures included.
    """
    rows = [r for r in rows if not superseded(r) and not is_of_rate_when_sent(r)]
    done = {Spec.of(row).key for row in rows}
    after = next(i for i, group in enumerate(GROUPS) if group.workers == 8)
    first, last = (
        [spec for group in groups for spec in group.specs()]
        for groups in (GROUPS[:after], GROUPS[after:])
    )
    planned = [*first, *further_seeds(rows), *last]
    return [spec for spec in planned if spec.key not in done]


def further_seeds(rows):
    """Return pairs of CIFAR-10 beyond the planned ones, until the interval is narrow.

    They are asked for one by one: what follows depends on what was found. A seed of
    which a run has failed has had its turn; the next one is asked for.
    """
    group = Group("cifar10", PAIR, tuple(SEEDS))
    wanted = {spec.key for spec in group.specs()}
    own = [row for row in rows if Spec.of(row).key in wanted]
    ended = {Spec.of(row).key for row in own}
    missing = [spec for spec in group.specs() if spec.key not in ended]
    pairs = intervals.paired(own, "dgc")
    narrow = 100 * pairs.half_width <= HALF_WIDTH
    if narrow or not missing or missing[0].seed < PLANNED_SEEDS:
        return []
    return [spec for spec in missing if spec.seed == missing[0].seed]

"""The plan of `study/evidence.py`, and its stored rows."""

import json
import pathlib
import shlex

import evidence
import numpy as np
import pytest
from evidence_rows import row
from registered import coverage, plan, plan_page, registry, rows
from registered.specs import KEYS, Spec

from tf_dgc.schedules import for_steps

STUDY = pathlib.Path(__file__).parents[1]


def test_plan_page_has_current_tables():
    assert plan_page.tables() in (STUDY / "plan.md").read_text(encoding="utf-8")


def test_stored_rows_are_complete_and_planned():
    planned = {spec.key for group in plan.GROUPS for spec in group.specs()}
    added = plan.Group("cifar10", plan.PAIR, tuple(plan.SEEDS)).specs()
    planned |= {spec.key for spec in added}
    for stored_row in rows.read(STUDY / "runs"):
        assert list(stored_row)[: len(KEYS)] == KEYS
        assert Spec.of(stored_row).key in planned
        program, script, *arguments = shlex.split(stored_row["command"])
        # At the commits of these rows the script was in another folder.
        assert (program, pathlib.Path(script).name) == ("python", "evidence.py")
        assert arguments == Spec.of(stored_row).arguments()


def test_planned_runs_are_unique():
    specs = [spec for group in plan.GROUPS for spec in group.specs()]
    assert len({spec.key for spec in specs}) == len(specs)
    assert {spec.task for spec in specs} == set(registry.TASKS)


def test_command_reproduces_the_spec():
    spec = plan.Group("cifar10", ("+ warm-up",), (3,), workers=8).specs()[0]
    arguments = evidence._parser().parse_args(shlex.split(spec.command)[2:])
    settings = json.loads(arguments.settings)
    assert Spec.of({**vars(arguments), "settings": settings}) == spec
    assert arguments.call is evidence.one


def test_labels_of_rows():
    for label in (*plan.ABLATION, *plan.OTHER_METHODS, *plan.ALL):
        for model in (None, plan.RESNET20):
            (spec,) = plan.Group("cifar10", (label,), (0,), model=model).specs()
            assert plan.label_of(row(spec)) == label
    with pytest.raises(ValueError, match="for cifar10 alone, not ptb"):
        plan.Group("ptb", ("sign_sgd",), (0,)).specs()
    with pytest.raises(ValueError, match="for ptb alone, not cifar10"):
        plan.Group("cifar10", (plan.TIGHTER,), (0,)).specs()
    for label in (plan.TIGHTER, plan.QUARTER):
        (spec,) = plan.Group("ptb", (label,), (0,)).specs()
        assert plan.label_of(row(spec)) == label


def test_dgc_for_steps_uses_the_run_length():
    (spec,) = plan.Group("shakespeare", (plan.FOR_STEPS,), (0,)).specs()
    task = registry.TASKS["shakespeare"]("no such folder")
    optimizer = registry.make_optimizer(spec, task)
    final = optimizer.sparsity(spec.steps)
    assert float(final) == pytest.approx(for_steps(spec.steps))
    assert optimizer.corrections.factor_masking is False
    assert optimizer.value_dtype == "mxfp4"
    (spec,) = plan.Group("ptb", (plan.QUARTER,), (1,)).specs()
    optimizer = registry.make_optimizer(spec, registry.TASKS["ptb"]("no such folder"))
    assert optimizer.sparsity == 0.75
    assert optimizer.value_dtype == "mxfp4"


def test_seeds_are_added_until_the_interval_is_narrow():
    values = {0: 0.00, 1: 0.02, 2: -0.02, 3: 0.02, 4: -0.02}
    done = [
        row(spec, 0.8 + (values.get(spec.seed, 0.0) if spec.method == "dgc" else 0))
        for group in plan.GROUPS
        for spec in group.specs()
    ]
    pending = plan.pending(done)
    assert [(s.method, s.seed, s.workers) for s in pending] == [
        ("dense", 5, 4),
        ("dgc", 5, 4),
    ]
    for seed in range(5, 10):
        done += [row(spec, 0.8) for spec in plan.pending(done)]
        assert {r["seed"] for r in done[-2:]} == {seed}
    assert plan.pending(done) == []  # ten seeds at most
    narrow = [row(Spec.of(r), 0.8 + 1e-4 * r["seed"]) for r in done if r["seed"] < 5]
    assert plan.pending(narrow) == []


def test_failed_seed_is_followed_by_the_next():
    values = {0: 0.00, 1: 0.02, 2: -0.02, 3: 0.02}
    planned = [spec for group in plan.GROUPS for spec in group.specs()]
    failed = plan.Group("cifar10", ("dgc",), (4,)).specs()
    done = [
        row(spec, 0.8 + (values.get(spec.seed, 0.0) if spec.method == "dgc" else 0))
        if spec not in failed
        else row(spec, None)
        for spec in planned
    ]
    seeds = []
    while pending := plan.pending(done):
        seeds.append(pending[0].seed)
        done.append(row(pending[0], None if pending[0].seed == 5 else 0.8))
    assert seeds == [seed for seed in range(5, 10) for _ in plan.PAIR]


def test_added_seeds_precede_eight_workers():
    planned = [spec for group in plan.GROUPS for spec in group.specs()]
    done = [
        row(spec, 0.8 + (0.02 * (spec.seed % 2) if spec.method == "dgc" else 0))
        for spec in planned
        if spec.workers == 4 and not spec.settings.get("model")
    ]
    pending = [(spec.workers, spec.seed) for spec in plan.pending(done)]
    assert pending[:3] == [(4, 5), (4, 5), (8, 0)]


def test_stopping_early_lowers_coverage():
    total, early, total_early = coverage.coverage(0.01)
    assert (total, early) == (pytest.approx(0.95, abs=0.005), 1)  # after planned seeds
    assert total_early == total
    total, early, total_early = coverage.coverage(0.4)
    assert total == pytest.approx(0.933, abs=0.005)
    assert early == pytest.approx(0.34, abs=0.02)
    assert total_early == pytest.approx(0.85, abs=0.02)
    total, early, _ = coverage.coverage(10.0)
    assert (total, early) == (pytest.approx(0.95, abs=0.005), 0)


def test_epoch_has_each_example_once():
    from tasks import recipe_task

    steps = [
        recipe_task.shuffled(7, step, worker, 2, 10, 45)[0]
        for step in range(4)
        for worker in range(2)
    ]
    assert len(np.unique(np.concatenate(steps[:4]))) == 40  # one epoch
    assert len(np.unique(np.concatenate(steps[4:]))) == 40
    assert not np.array_equal(steps[0], steps[4])
    repeated, _ = recipe_task.shuffled(7, 0, 1, 2, 10, 45)
    np.testing.assert_array_equal(repeated, steps[1])

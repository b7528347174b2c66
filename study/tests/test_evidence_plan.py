"""The plan of `study/evidence.py`, and what is kept of its runs."""

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


def test_the_page_has_the_plan():
    assert plan_page.tables() in (STUDY / "plan.md").read_text(encoding="utf-8")


def test_what_is_kept_is_complete_and_of_the_plan():
    """Rows have all keys, and what they were asked for is in the plan."""
    kept = rows.read(STUDY / "runs")
    allowed = {spec.key for group in plan.GROUPS for spec in group.specs()}
    further = plan.Group("cifar10", plan.PAIR, tuple(plan.SEEDS)).specs()
    allowed |= {spec.key for spec in further}
    for found in kept:
        assert list(found)[: len(KEYS)] == KEYS
        assert Spec.of(found).key in allowed
        program, script, *arguments = shlex.split(found["command"])
        # At the commits of these rows the script was in another folder.
        assert (program, pathlib.Path(script).name) == ("python", "evidence.py")
        assert arguments == Spec.of(found).arguments()


def test_every_run_is_another_one():
    specs = [spec for group in plan.GROUPS for spec in group.specs()]
    assert len({spec.key for spec in specs}) == len(specs)
    assert {spec.task for spec in specs} == set(registry.TASKS)


def test_a_run_is_asked_for_again_by_its_command():
    spec = plan.Group("cifar10", ("+ warm-up",), (3,), workers=8).specs()[0]
    arguments = evidence._parser().parse_args(shlex.split(spec.command)[2:])
    settings = json.loads(arguments.settings)
    assert Spec.of({**vars(arguments), "settings": settings}) == spec
    assert arguments.call is evidence.one


def test_labels():
    for label in (*plan.ABLATION, *plan.OTHERS, *plan.ALL):
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


def test_settings_for_the_length_of_a_run():
    (spec,) = plan.Group("shakespeare", (plan.FOR_STEPS,), (0,)).specs()
    task = registry.TASKS["shakespeare"]("no such folder")
    optimizer = registry.make_optimizer(spec, task)
    least = optimizer.sparsity(spec.steps)
    assert float(least) == pytest.approx(for_steps(spec.steps))
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
    asked = plan.pending(done)
    assert [(s.method, s.seed, s.workers) for s in asked] == [
        ("dense", 5, 4),
        ("dgc", 5, 4),
    ]
    for seed in range(5, 10):
        done += [row(spec, 0.8) for spec in plan.pending(done)]
        assert {r["seed"] for r in done[-2:]} == {seed}
    assert plan.pending(done) == []  # ten, and no more
    narrow = [row(Spec.of(r), 0.8 + 1e-4 * r["seed"]) for r in done if r["seed"] < 5]
    assert plan.pending(narrow) == []


def test_a_seed_that_failed_is_followed_by_the_next():
    values = {0: 0.00, 1: 0.02, 2: -0.02, 3: 0.02}
    planned = [spec for group in plan.GROUPS for spec in group.specs()]
    failed = plan.Group("cifar10", ("dgc",), (4,)).specs()
    done = [
        row(spec, 0.8 + (values.get(spec.seed, 0.0) if spec.method == "dgc" else 0))
        if spec not in failed
        else row(spec, None)
        for spec in planned
    ]
    asked = []
    while todo := plan.pending(done):
        asked.append(todo[0].seed)
        done.append(row(todo[0], None if todo[0].seed == 5 else 0.8))
    assert asked == [seed for seed in range(5, 10) for _ in plan.PAIR]


def test_added_seeds_come_before_eight_workers():
    planned = [spec for group in plan.GROUPS for spec in group.specs()]
    done = [
        row(spec, 0.8 + (0.02 * (spec.seed % 2) if spec.method == "dgc" else 0))
        for spec in planned
        if spec.workers == 4 and not spec.settings.get("model")
    ]
    asked = [(spec.workers, spec.seed) for spec in plan.pending(done)]
    assert asked[:3] == [(4, 5), (4, 5), (8, 0)]


def test_stopping_when_it_is_narrow_is_not_95_per_cent():
    of_all, early, of_early = coverage.coverage(0.01)
    assert (of_all, early) == (pytest.approx(0.95, abs=0.005), 1)  # after the planned
    assert of_early == of_all
    of_all, early, of_early = coverage.coverage(0.4)
    assert of_all == pytest.approx(0.933, abs=0.005)
    assert early == pytest.approx(0.34, abs=0.02)
    assert of_early == pytest.approx(0.85, abs=0.02)
    of_all, early, _ = coverage.coverage(10.0)
    assert (of_all, early) == (pytest.approx(0.95, abs=0.005), 0)


def test_order_of_the_data():
    from tasks import recipe_task

    steps = [
        recipe_task.shuffled(7, step, worker, 2, 10, 45)[0]
        for step in range(4)
        for worker in range(2)
    ]
    assert len(np.unique(np.concatenate(steps[:4]))) == 40  # an epoch: no example twice
    assert len(np.unique(np.concatenate(steps[4:]))) == 40
    assert not np.array_equal(steps[0], steps[4])
    again, _ = recipe_task.shuffled(7, 0, 1, 2, 10, 45)
    np.testing.assert_array_equal(again, steps[1])

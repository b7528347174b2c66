"""`benchmarks/evidence.py`: the plan, what takes it up, and the report."""

import fcntl
import json
import math
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import evidence
import numpy as np
import pytest
from scipy import stats
from study import comparison, intervals, papers, plan, plan_page, registry, rows
from study.queue import Queue, give_way
from study.specs import KEYS, Spec

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs" / "evidence"


def row(spec, value=0.5, **different):
    curve = [
        {"step": s, "bytes": 100 * s, "seconds": s, "loss": 1.0, "value": value}
        for s in (5, 10)
    ]
    found = {
        **vars(spec),
        **{"metric": "accuracy", "value": value, "curve": curve},
        **{"bytes_per_worker": 1000, "seconds": 60.0, "commit": "abc" * 14},
        **{"command": spec.command, "started": "2026-01-01 00:00:00+00:00"},
    }
    return {**found, **different}


def test_the_page_has_the_plan():
    assert plan_page.tables() in (DOCS / "plan.md").read_text(encoding="utf-8")


def test_what_is_kept_is_complete_and_of_the_plan():
    """Rows have all keys, and what they were asked for is in the plan."""
    kept = rows.read(DOCS / "runs")
    allowed = {spec.key for group in plan.GROUPS for spec in group.specs()}
    further = plan.Group("cifar10", plan.PAIR, tuple(plan.SEEDS)).specs()
    allowed |= {spec.key for spec in further}
    for found in kept:
        assert list(found)[: len(KEYS)] == KEYS
        assert Spec.of(found).key in allowed
        assert found["command"] == Spec.of(found).command


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


def test_paired_differences():
    values = {"dense": [0.1, 0.5, 0.3, None], "dgc": [0.2, 0.4, 0.5, 0.6]}
    made = [
        {"method": method, "seed": seed, "value": value}
        for method, found in values.items()
        for seed, value in enumerate(found)
    ]
    found = intervals.paired(made, "dgc")
    assert found.seeds == (0, 1, 2)
    expected = stats.ttest_rel([0.2, 0.4, 0.5], [0.1, 0.5, 0.3])
    low, high = expected.confidence_interval(0.95)
    assert found.mean == pytest.approx((low + high) / 2)
    assert found.half_width == pytest.approx((high - low) / 2)
    assert not found.separates
    alone = intervals.paired(made[:1] + made[4:], "dgc")
    assert alone.half_width == math.inf
    assert not alone.separates
    assert math.isnan(intervals.paired(made[:1], "dgc").mean)


@pytest.mark.parametrize(
    ("task", "dgc", "verdict"),
    [
        ("cifar10", [0.801, 0.8, 0.8], "within the aim, 0.2"),
        ("cifar10", [0.797, 0.796, 0.797], "not inferior by 0.5"),
        ("cifar10", [0.78, 0.81, 0.8], "open"),
        ("cifar10", [0.78, 0.781, 0.78], "inferior by more than 0.5"),
        ("cifar10", [0.8], "no interval yet"),
        ("ptb", [0.8, 0.8, 0.801], "within the aim, 0.5"),
        ("ptb", [0.82, 0.821, 0.82], "inferior by more than 1.0"),
        ("mnist", [0.8, 0.8], ""),
    ],
)
def test_verdicts(task, dgc, verdict):
    specs = plan.Group(task, plan.PAIR, tuple(range(len(dgc)))).specs()
    made = [row(s, 0.8 if s.method == "dense" else dgc[s.seed]) for s in specs]
    (found,) = comparison.comparisons(made)
    assert found.verdict("dgc") == verdict
    assert found.verdict("dense") == ""


def test_the_papers_ratio():
    sizes = [(1000, 1000), (1000,)]
    expected = 4 * 1_001_000 / (6 * 1000 + 4 * 1000)
    assert papers.ratio(sizes) == pytest.approx(expected)


def test_order_of_the_data():
    from study import tasks

    steps = [
        tasks.shuffled(7, step, worker, 2, 10, 45)[0]
        for step in range(4)
        for worker in range(2)
    ]
    assert len(np.unique(np.concatenate(steps[:4]))) == 40  # an epoch: no example twice
    assert len(np.unique(np.concatenate(steps[4:]))) == 40
    assert not np.array_equal(steps[0], steps[4])
    again, _ = tasks.shuffled(7, 0, 1, 2, 10, 45)
    np.testing.assert_array_equal(again, steps[1])


# A run that ends as its seed says: with a row, by itself, or when it is told to.
PROGRAM = f"""
import os, pathlib, signal, sys, time
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from study import rows
from study.specs import Spec
given = dict(argument[2:].split("=") for argument in sys.argv[2:])
numbers = {{name: int(given[name]) for name in ("workers", "seed", "steps")}}
spec = Spec(given["task"], given["method"], {{}}, **numbers)
work = pathlib.Path(given["work"])
opened = pathlib.Path("/proc/self/fd").iterdir()
if str(work / "lock") not in map(os.path.realpath, opened):
    sys.exit("others could begin as well")
tries = work / f"tries{{spec.seed}}"
tries.write_text(tries.read_text() + "." if tries.exists() else ".")
if spec.seed == 1 and len(tries.read_text()) < 3 or spec.seed == 2:
    sys.exit("out of luck")
if spec.seed == 4:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    os.kill(os.getppid(), signal.SIGHUP)
    time.sleep(60)
made = {{**vars(spec), "value": 1.0, "started": rows.now()}}
rows.append(work / "runs", made)
"""


def test_the_queue(tmp_path):
    """It tries again, says what failed and goes on, and stops when it is told to."""
    wanted = [Spec("mnist", "dgc", {}, 4, seed, 10) for seed in range(6)]

    def pending(finished):
        done = [Spec.of(found) for found in finished]
        return [spec for spec in wanted if spec not in done]

    command = [sys.executable, "-c", PROGRAM]
    queue = Queue(tmp_path, command, pending=pending, pause=0.0)
    before = signal.getsignal(signal.SIGTERM)
    assert queue.run() is False
    assert signal.getsignal(signal.SIGTERM) == before
    found = rows.read(tmp_path / "runs")
    assert [r["seed"] for r in found] == [0, 1, 2, 3]
    assert [r["value"] for r in found] == [1.0, 1.0, None, 1.0]
    assert list(found[2]) == [*KEYS, "error"]
    assert "out of luck" in found[2]["error"]
    assert [len((tmp_path / f"tries{i}").read_text()) for i in range(4)] == [1, 3, 3, 1]
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="Somebody else runs in"):
            Queue(tmp_path, command, pending=pending).run()


def test_other_sessions_go_first():
    """Also where `nice` counts only within a session."""
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    group = pathlib.Path(f"/proc/{child.pid}/autogroup")
    try:
        if not group.exists():
            pytest.skip("this kernel does not divide processors by sessions")
        give_way(child.pid)
        assert group.read_text().split()[1:] == ["nice", "19"]
    finally:
        child.kill()
        child.wait()


def test_pause_status_and_collect(tmp_path, capsys):
    def call(*arguments):
        given = evidence._parser().parse_args([*map(str, arguments)])
        given.call(given)
        return capsys.readouterr().out

    work, out = tmp_path / "work", tmp_path / "out"
    specs = plan.GROUPS[0].specs()
    call("pause", "--work", work)
    rows.append(work / "runs", row(specs[0]))
    rows.append(work / "runs", row(specs[1], None, error="no power"))
    said = call("status", "--work", work)
    assert "done: 2, 1 of them failures" in said
    assert "paused" in said
    call("resume", "--work", work)
    assert "paused" not in call("status", "--work", work)
    collect = "collect", "--work", work, "--out", out
    assert call(*collect).startswith("2 rows are new")
    assert call(*collect).startswith("0 rows are new")
    assert rows.read(out) == rows.read(work / "runs")


@pytest.mark.slow
def test_the_report(tmp_path):
    """It has every method, what failed, and the papers' figures."""
    pytest.importorskip("matplotlib")
    from study import report

    random = np.random.default_rng(0)
    groups = [
        plan.Group("cifar10", (*plan.ALL, *plan.ABLATION, "sign_sgd"), (0, 1, 2)),
        plan.Group("cifar10", plan.PAIR, (0,), model=plan.RESNET20),
        plan.Group("ptb", plan.PAIR, (0, 1)),
    ]
    made = [row(s, random.uniform(0.8, 0.9)) for g in groups for s in g.specs()]
    failed = Spec("cifar10", "stc", {}, 4, 0, 10_000)
    made.append(row(failed, None, error="the loss is not finite"))
    report.write(made, tmp_path)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    for label in (*plan.ALL, *plan.ABLATION, "sign_sgd", "stc"):
        assert f"| {label} |" in page
    assert f"`{failed.command}`: the loss is not finite" in page
    assert "| 93.75 | 93.87 |" in page
    assert "| 72.3 | 72.24 |" in page
    assert "## cifar10 with 3 blocks, stride 1, 4 workers" in page
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.count("<table>") == 5
    for name in re.findall(r'src="(.+?)"', html):
        assert (tmp_path / name).stat().st_size > 1000
    assert len(list(tmp_path.iterdir())) == 5

"""The benchmarks run and report what their docstrings say."""

import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import programs
import psutil
import pytest

from tf_dgc import native_library
from tf_dgc._internals import tracing

STEP = pathlib.Path(__file__).parents[2] / "benchmarks" / "step.py"
KEYS = {
    "model",
    "mode",
    "workers",
    "rate",
    "median_ms",
    "p90_ms",
    "bytes_per_step",
    "collectives_per_step",
    "ratio_to_none",
    "cpu_ms",
    "gradients_ms",
    "collective_ms",
    "outside_ms",
    "tensorflow",
    "keras",
    "tf_dgc",
    "python",
    "commit",
    "processor",
    "onednn",
}


def command(*flags):
    return [sys.executable, str(STEP), "--model=tiny", *flags]


@pytest.mark.exhaustive
@pytest.mark.workers
@pytest.mark.parametrize(
    ("loop", "modes"),
    [
        ("custom", "none,dense,dgc"),
        ("fit", "none,dense"),
    ],
)
def test_step(tmp_path, loop, modes):
    """A step is one collective; Keras's loop needs one more per epoch."""
    path = tmp_path / "step.json"
    flags = [f"--modes={modes}", "--method=two_bit", "--steps=5", "--rounds=2"]
    flags += [f"--loop={loop}", f"--json={path}"]
    prefix = programs.loopback_prefix()
    finished = programs.run([*(prefix or []), *command(*flags)])
    assert finished.returncode == 0
    rows = json.loads(path.read_text())
    onednn = "on" if tracing.uses_onednn() else "off"
    assert f"Processor: {rows[0]['processor']}, oneDNN {onednn}" in finished.stdout
    for row in rows:
        assert set(row) >= KEYS
        assert (row["model"], row["workers"], row["rate"]) == ("tiny", 2, "loopback")
        assert 0 < row["median_ms"] <= row["p90_ms"]
        assert row["median_ms"] == pytest.approx(
            row["ratio_to_none"] * rows[0]["median_ms"]
        )
    none, dense, *others = rows
    assert [row["mode"] for row in rows] == [*modes.split(","), "two_bit"]
    collectives = 1.2 if loop == "fit" else 1
    assert none["collectives_per_step"] == 0
    assert {row["collectives_per_step"] for row in rows[1:]} == {collectives}
    if prefix:  # otherwise bytes of other tests' workers count too
        for row in (none, *others):
            assert row["bytes_per_step"] < dense["bytes_per_step"] / 4


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("kill_worker", [False, True])
def test_step_ends_all_workers(tmp_path, kill_worker):
    with open(tmp_path / "log", "w+") as log:
        benchmark = subprocess.Popen(command("--modes=dense"), stdout=log, stderr=log)
        try:
            workers = wait_for_children(benchmark.pid, 2)
            if kill_worker:
                workers[1].kill()
            else:
                time.sleep(1)
                benchmark.send_signal(signal.SIGTERM)
            assert benchmark.wait(150) == 1
        finally:
            benchmark.kill()
            benchmark.wait()
        log.seek(0)
        output = log.read()
    print(output[-3000:])
    expected = "Worker 1 of mode dense ended" if kill_worker else "interrupted"
    assert expected in output
    assert not any(worker.is_running() for worker in workers)


def wait_for_children(pid, count):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        children = [c for c in psutil.Process(pid).children() if is_step_worker(c)]
        if len(children) == count:
            return children
        time.sleep(0.1)
    raise AssertionError("The workers did not start")


def is_step_worker(process):
    try:
        return any("step_worker.py" in part for part in process.cmdline())
    except psutil.Error:  # a child that has already ended
        return False


@pytest.mark.skipif(os.geteuid() == 0, reason="is about users other than root")
def test_limited_rate_needs_root():
    finished = programs.run(command("--rate=1gbit"))
    assert finished.returncode == 1
    assert "which needs root" in finished.stderr


@pytest.mark.slow
def test_unknown_rate_raises():
    finished = programs.run(command("--rate=2gbit"))
    assert finished.returncode
    assert "loopback, 10gbit, 1gbit, 100mbit" in finished.stdout + finished.stderr


@pytest.mark.exhaustive
@pytest.mark.skipif(
    native_library.load_library().library is None,
    reason=native_library.load_library().reason,
)
@pytest.mark.parametrize(
    ("script", "flags", "keys", "num_rows"),
    [
        (
            "compress.py",
            ["--sizes=1e4", "--sparsities=0.99", "--threads=1", "--repeats=3"],
            "path n sparsity threads dtype median_ms p90_ms ratio_to_floor",
            4,
        ),
        (
            "wire.py",
            ["--n=1e5", "--sparsity=0.999", "--rounds=3"],
            "value_dtype n sparsity bytes_per_entry encode_ms decode_ms",
            6,
        ),
        (
            "sizes.py",
            ["--model=tiny", "--sparsity=0.99"],
            "value_dtype uncompressed_dtype entries bytes_per_step ratio",
            6,
        ),
    ],
)
def test_compress_and_wire(tmp_path, script, flags, keys, num_rows):
    path = tmp_path / "rows.json"
    finished = programs.run(
        [sys.executable, STEP.with_name(script), *flags, f"--json={path}"]
    )
    assert finished.returncode == 0
    rows = json.loads(path.read_text())
    assert len(rows) == num_rows
    for row in rows:
        assert set(row) >= set(keys.split()) | {"tensorflow", "commit"}
    if script == "wire.py":
        size = {row["value_dtype"]: row["bytes_per_entry"] for row in rows}
        assert size["sign"] < size["bfloat16"] < size["float32"] < 6
        assert size["sign"] < size["mxfp4"] < size["mxint8"] < size["bfloat16"]
    if script == "sizes.py":
        sizes = [row["bytes_per_step"] for row in rows]
        assert sizes == sorted(sizes, reverse=True)


def test_gpu_compress_without_a_gpu():
    script = STEP.with_name("gpu_compress.py")
    finished = programs.run([sys.executable, script], CUDA_VISIBLE_DEVICES="-1")
    assert finished.returncode == 1
    (sentence,) = finished.stderr.splitlines()
    assert sentence.startswith("gpu_compress.py needs ")


def test_setting_of_rows(monkeypatch):
    monkeypatch.syspath_prepend(STEP.parent)
    from common import reporting

    origin = {"processor": "P", "onednn": True}
    rows = [{"mode": "none"}, {"mode": "dgc", "onednn": True}]
    assert reporting.setting(rows, origin) == "Processor: P, oneDNN on"
    assert reporting.setting(rows, {"card": "C"}) == "C"
    slow = {**origin, "no_native_operations": "why"}
    expected = "Processor: P, oneDNN on, no native operations (why)"
    assert reporting.setting(rows, slow) == expected
    assert reporting.setting([{}], {}) == "Processor: unknown, oneDNN unknown"
    for different in ({"onednn": False}, {"processor": "Q"}):
        text = reporting.setting([*rows, different], origin)
        assert text.startswith("Times do not compare, for settings differ: ")
        assert text.endswith("oneDNN off" if "onednn" in different else "Q, oneDNN on")


@pytest.mark.exhaustive
@pytest.mark.workers
def test_soak(tmp_path):
    path = tmp_path / "soak.json"
    script = STEP.with_name("soak.py")
    flags = ["--steps=200", "--parts=4", "--limit_mb=64", f"--json={path}"]
    finished = programs.run([sys.executable, script, *flags])
    assert finished.returncode == 0
    assert "memory grew by" in finished.stdout
    rows = json.loads(path.read_text())
    assert [row["steps"] for row in rows] == [50, 100, 150, 200]
    for row in rows:
        assert 0 < row["staleness_mean"] <= row["staleness_p99"] <= row["staleness_max"]
        assert row["staleness_max"] <= row["steps"]
        assert row["keys"] <= 5


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("memory_mb", [100, 101, 109.5], "memory grew by 9.5 MB"),
        ("traces", [2, 2, 3], "traces grew from 2 to 3"),
        ("functions", [50, 51, 51], "functions grew from 50 to 51"),
        ("keys", [3, 3, 4], "keys grew from 3 to 4"),
        ("residual_norm", [1.0, 1.5, 2.5], "the residual grew to a norm of 2.5"),
        ("residual_norm", [1.0, 1.0, float("nan")], "norm of nan"),
        ("agree", [True, False, True], "did not count the same steps"),
    ],
)
def test_growth_that_soak_reports(monkeypatch, key, values, message):
    monkeypatch.syspath_prepend(STEP.parent)
    import soak

    row = {
        "memory_mb": 100.0,
        "traces": 2,
        "functions": 50,
        "keys": 3,
        "residual_norm": 1.0,
        "agree": True,
    }
    rows = [dict(row) for _ in values]
    assert soak.judge(rows, 8.0) == []
    for changed_row, value in zip(rows, values, strict=True):
        changed_row[key] = value
    (problem,) = soak.judge(rows, 8.0)
    assert message in problem


@pytest.mark.exhaustive
@pytest.mark.workers
def test_goodput(tmp_path):
    """Killed workers resume, and the weights are those of an undisturbed run."""
    path = tmp_path / "goodput.json"
    script = STEP.with_name("goodput.py")
    flags = ["--minutes=0.3", "--every=4", "--step_seconds=0.05", f"--json={path}"]
    finished = programs.run([sys.executable, script, *flags])
    assert finished.returncode == 0, finished.stderr[-3000:]
    (row,) = json.loads(path.read_text())
    assert row["faults"] >= 1
    assert row["equal"] == "yes"
    assert 0 < row["goodput"] < 1
    phases = "detection", "shutdown", "python", "imports", "build", "tracing"
    assert row["lost"] > sum(row[name] for name in phases) > 0


@pytest.mark.exhaustive
@pytest.mark.workers
def test_exchange(tmp_path):
    """Three real workers and every algorithm; a loopback does not count bytes."""
    path = tmp_path / "rows.json"
    flags = ["--workers=3", "--rate=loopback", "--sums=1e4", "--gathers=1e3"]
    flags += ["--entries=1e5:0.99", "--steps=1e5:0.99"]
    finished = programs.run(
        [
            sys.executable,
            STEP.with_name("exchange.py"),
            *flags,
            "--repeats=3",
            f"--json={path}",
        ]
    )
    assert finished.returncode == 0
    rows = json.loads(path.read_text())
    steps = rows[6 + 6 + 9 :]
    assert [row["exchange"] for row in steps[-3:]] == ["float16", "scale_com", "auto"]
    assert len(steps) == 9 + 3
    assert all(row["median_ms"] > 0 and row["rounds"] >= 2 for row in rows)
    assert all(row["model_ms"] > 0 for row in rows[: -len(steps)])
    sent = {row["exchange"]: row["payload"] for row in steps}
    assert sent["ring"] == sent["gtopk"] == pytest.approx(sent["scale_com"], rel=0.01)
    assert sent["float16"] == pytest.approx(2e5, rel=1e-3)
    assert all(row["of_a_sum"] is None for row in rows)  # not counted on a loopback
    assert "The model is off by" in finished.stdout
    assert "1024 (ms)" in finished.stdout
    assert "What `auto` would choose" in finished.stdout


def test_choices_of_auto(monkeypatch):
    """The model chooses among candidates; decoding counts in both times."""
    monkeypatch.syspath_prepend(STEP.parent)
    from common import auto_choice

    def row(name, model_ms, median_ms, kind="entries"):
        links = [0, 0, 0, 0, 1e-6, 0, 0]
        return {
            "workers": 4,
            "kind": kind,
            "payload": 1000,
            "links": links,
            "exchange": name,
            "model_ms": model_ms,
            "median_ms": median_ms,
            "p90_ms": median_ms + 1,
        }

    rows = [row("ring", 10, 10), row("gtopk", 12, 12), row("oktopk", 16, 11)]
    rows += [row("twoway", 1, 1), row("star 2", 1, 1)]  # no candidates
    rows += [row("ring", 5, 9, "sum"), row("star all", 4, 9.5, "sum")]
    entries, total = auto_choice.compare_choices(rows)
    assert (entries["chosen"], entries["best"]) == ("gtopk", "oktopk")
    assert entries["ratio"] == pytest.approx(13 / 12)
    assert entries["within"] == "yes"
    assert (total["chosen"], total["best"]) == ("star all", "ring")
    assert total["ratio"] == pytest.approx(9.5 / 9)


def test_steps_of_auto_compared_with_the_fastest(monkeypatch):
    """The fastest of its candidates, whatever the model predicts."""
    monkeypatch.syspath_prepend(STEP.parent)
    from common import algorithms, auto_choice

    from tf_dgc.collectives import Ring

    def row(name, median_ms):
        return {
            "workers": 4,
            "kind": "step",
            "payload": 9,
            "asked": "9:0",
            "exchange": name,
            "stated": "float16, ring",
            "median_ms": median_ms,
            "p90_ms": 1.2 * median_ms,
        }

    rows = [row("ring", 12), row("float16", 10), row("star all", 13), row("gtopk", 14)]
    rows += [row("twoway", 1), row("star 2", 1), row("scale_com", 1)]  # no candidates
    (fast,) = auto_choice.compare_choices([*rows, row("auto", 11)])
    assert (fast["chosen"], fast["best"]) == ("float16, ring", "float16")
    assert (fast["ratio"], fast["within"]) == (pytest.approx(1.1), "yes")
    (slow,) = auto_choice.compare_choices([*rows, row("auto", 13)])
    assert slow["within"] == "no"

    dense = algorithms.cost_of_step("auto", "float16, ring", 400, 4)
    assert dense == algorithms.cost_of_step("scale_com", "ring", 400, 4)
    assert dense == Ring().cost_of_sum(400, 4)
    assert algorithms.cost_of_step("auto", "ring", 400, 4) == Ring().cost_of_gather(
        400, 4
    )
    star = algorithms.cost_of_step("auto", "star", 400, 4)
    assert star == algorithms.cost_of_step("star all", "star", 400, 4)


@pytest.mark.exhaustive
@pytest.mark.workers
def test_server(tmp_path):
    """One of three workers is slow, which slows down only some modes."""
    path = tmp_path / "rows.json"
    flags = ["--workers=3", "--speeds=0.2", "--modes=sync,async,backup", "--step_ms=40"]
    script = STEP.with_name("server.py")
    finished = programs.run(
        [
            sys.executable,
            script,
            *flags,
            "--model=tiny",
            "--seconds=4",
            "--sparsity=0.9",
            f"--json={path}",
        ]
    )
    assert finished.returncode == 0
    sync, asynchronous, backup = json.loads(path.read_text())
    assert sync["largest_age"] == 0 < asynchronous["largest_age"]
    assert asynchronous["pushes_per_second"] > 1.3 * sync["pushes_per_second"]
    assert sum(asynchronous["ages"].values()) == sum(asynchronous["steps_of_each"])
    assert backup["late"] > 0
    assert backup["updates_per_second"] > 1.5 * sync["updates_per_second"]
    assert all(row["bytes"] > 0 for row in (sync, asynchronous, backup))


@pytest.mark.exhaustive
@pytest.mark.workers
def test_machines(tmp_path):
    """Two workers on one machine, with both collective algorithms."""
    path = tmp_path / "rows.json"
    flags = ["--machines=1x2", "--rate=loopback", "--sums=1e4", "--entries=1e5:0.99"]
    script = STEP.with_name("machines.py")
    finished = programs.run(
        [sys.executable, script, *flags, "--repeats=3", f"--json={path}"]
    )
    assert finished.returncode == 0
    rows = json.loads(path.read_text())
    names = [(row["kind"], row["exchange"]) for row in rows]
    kinds = itertools.product(["sum", "entries"], ["ring", "hierarchical"])
    assert names == list(kinds)
    assert all(row["median_ms"] > 0 for row in rows)
    assert rows[3]["payload"] < 0.6 * rows[2]["payload"]


@pytest.mark.workers
@pytest.mark.exhaustive
@pytest.mark.parametrize("backward", ["waits", "computes"])
def test_overlap(tmp_path, backward):
    path = tmp_path / "rows.json"
    flags = ["--rate=loopback", "--layers=3", "--width=64", "--methods=qsgd,dgc"]
    flags += ["--backward=20", f"--computes={backward == 'computes'}"]
    script = STEP.with_name("overlap.py")
    finished = programs.run(
        [sys.executable, script, *flags, "--repeats=3", f"--json={path}"]
    )
    assert finished.returncode == 0
    rows = json.loads(path.read_text())
    assert [row["method"] for row in rows] == ["qsgd", "dgc"]
    for row in rows:
        assert row["buckets"] > 1
        assert row["backward_ms"] > 2 * row["exchange_ms"] > row["update_ms"] > 0
        assert row["whole_ms"] > 0 and row["overlap_ms"] > 0


@pytest.mark.workers
@pytest.mark.exhaustive
def test_overlap_that_auto_chooses(tmp_path):
    """Three workers; the choice is timed in turn with the others."""
    path = tmp_path / "rows.json"
    flags = ["--rate=loopback", "--layers=3", "--width=64", "--methods=none"]
    flags += ["--workers=3", "--auto", "--repeats=3", f"--json={path}"]
    finished = programs.run([sys.executable, STEP.with_name("overlap.py"), *flags])
    assert finished.returncode == 0
    (row,) = json.loads(path.read_text())
    assert row["workers"] == 3
    assert row["auto_ms"] > 0 and row["of_faster"] > 0
    for name in ("chosen", "chosen_whole", "chosen_overlap"):
        assert "auto" not in row[name]
    assert "buckets" not in row["chosen_whole"]
    assert "of the faster" in finished.stdout


@pytest.mark.workers
@pytest.mark.exhaustive
def test_background(tmp_path):
    path = tmp_path / "rows.json"
    flags = ["--rate=loopback", "--layers=4", "--width=16", "--step=0.01"]
    flags += ["--period=4", "--repeats=1", f"--json={path}"]
    finished = programs.run([sys.executable, STEP.with_name("background.py"), *flags])
    assert finished.returncode == 0
    rows = json.loads(path.read_text())
    assert [row["way"] for row in rows] == [
        "never",
        "at once",
        "a round later",
        "in 4 parts",
    ]
    assert all(row["ms"] > 10 and row["computing"] < 1 for row in rows)
    assert rows[0]["bytes"] == 0 < 3 * rows[3]["bytes"] < rows[1]["bytes"]


def test_extrapolation_to_more_workers(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(STEP.parent)
    from common import extrapolation

    from tf_dgc.collectives import LinkSpeeds

    links = LinkSpeeds(1e-3, 1e-4, 8e-9, 5e-9, 4e-9, 1e-9)
    rows = extrapolation.extrapolate(["ring", "oktopk"], 10**6, 0.99, links)
    ring, merged, dense = rows
    assert [row["exchange"] for row in rows] == ["ring", "oktopk", "float16, ring"]
    assert ring["1024"] > 100 * ring["4"]
    assert merged["1024"] < dense["1024"] < ring["1024"]
    extrapolation.draw(rows, tmp_path / "more.svg", "more")
    assert "svg" in (tmp_path / "more.svg").read_text()[:300]


@pytest.mark.workers
@pytest.mark.slow
def test_packets(tmp_path):
    """A step of `fit` sends as many packets as one of an infinite custom loop."""
    if os.geteuid() or programs.loopback_prefix() is None:
        pytest.skip("needs root and a network namespace")
    path = tmp_path / "rows.json"
    script = STEP.with_name("packets.py")
    finished = programs.run([sys.executable, script, f"--json={path}"])
    assert finished.returncode == 0
    custom, *rows = json.loads(path.read_text())
    assert custom["packets_per_step"] > 3
    in_fit = [row for row in rows if row["loop"] == "fit"]
    assert len(in_fit) == 4
    for row in in_fit:
        assert row["ratio_to_custom"] == pytest.approx(1, abs=0.1)

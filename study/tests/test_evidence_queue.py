"""The queue of `study/evidence.py`, and its commands."""

import fcntl
import os
import pathlib
import re
import signal
import subprocess
import sys

import evidence
import pytest
from evidence_rows import row
from registered import plan, rows
from registered.queue import Queue, lower_priority
from registered.specs import KEYS, Spec

STUDY = pathlib.Path(__file__).parents[1]


# A run whose outcome depends on its seed: a row, a failure, or an interruption.
PROGRAM = f"""
import os, pathlib, signal, sys, time
sys.path.insert(0, {str(STUDY)!r})
from registered import rows
from registered.specs import Spec
flags = dict(argument[2:].split("=") for argument in sys.argv[2:])
numbers = {{name: int(flags[name]) for name in ("workers", "seed", "steps")}}
spec = Spec(flags["task"], flags["method"], {{}}, **numbers)
work = pathlib.Path(flags["work"])
open_files = pathlib.Path("/proc/self/fd").iterdir()
if str(work / "lock") not in map(os.path.realpath, open_files):
    sys.exit("others could begin as well")
tries = work / f"tries{{spec.seed}}"
tries.write_text(tries.read_text() + "." if tries.exists() else ".")
num_tries = len(tries.read_text())
if spec.seed == 1 and num_tries < 3 or spec.seed == 6:
    sys.exit("no data")
spec.checkpoint(work).parent.mkdir(exist_ok=True)
spec.checkpoint(work).write_text("")
if spec.seed == 3 and num_tries < 4:
    sys.exit(75)
if spec.seed in (2, 7, 8) and flags.get("data") != "good":
    sys.exit(f"out of luck after {{time.monotonic()}} seconds")
if spec.seed == 4:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    os.kill(os.getppid(), signal.SIGHUP)
    time.sleep(60)
row = {{**vars(spec), "value": 1.0, "started": rows.now(), "bytes_per_worker": 1}}
rows.append(work / "runs", row)
"""
COMMAND = [sys.executable, "-c", PROGRAM]


def test_queue_retries_records_failures_and_stops(tmp_path):
    pending, queue = create_queue(tmp_path, range(6))
    handler = signal.getsignal(signal.SIGTERM)
    assert queue.run() is False
    assert signal.getsignal(signal.SIGTERM) == handler
    finished = rows.read(tmp_path / "runs")
    assert [r["seed"] for r in finished] == [0, 1, 2, 3]
    assert [r["value"] for r in finished] == [1.0, 1.0, None, 1.0]
    assert list(finished[2]) == [*KEYS, "error"]
    assert "out of luck" in finished[2]["error"]
    assert [len((tmp_path / f"tries{i}").read_text()) for i in range(4)] == [1, 3, 3, 4]
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="Somebody else runs in"):
            Queue(tmp_path, COMMAND, pending=pending).run()


def test_queue_ends_if_a_run_cannot_start(tmp_path):
    """Otherwise the same cause would fail every pending run."""
    _, queue = create_queue(tmp_path, [6, 0])
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match=r"before it had saved a step[^$]*no data"):
        queue.run()
    assert signal.getsignal(signal.SIGTERM) == handler
    assert rows.read(tmp_path / "runs") == []


def test_queue_ends_if_two_runs_fail_alike(tmp_path, monkeypatch, capsys):
    _, queue = create_queue(tmp_path, [7, 8, 0])
    with pytest.raises(RuntimeError, match=r"as the run before it[^$]*out of luck"):
        queue.run()
    (failed,) = rows.read(tmp_path / "runs")
    assert (failed["seed"], failed["value"]) == (7, None)

    def create_test_queue(work, command, options, pending):
        return Queue(work, COMMAND, options, pending, pause=0.0)

    monkeypatch.setattr("registered.queue.Queue", create_test_queue)
    monkeypatch.setattr(os, "nice", lambda by: by)
    call("status", "--work", tmp_path)
    (key,) = re.findall(r"failed: (\S+),", capsys.readouterr().out)
    call("retry", key, "--work", tmp_path, "--data", "good")
    assert rows.read(tmp_path / "runs")[0] == failed
    assert [r["value"] for r in rows.read(tmp_path / "runs")] == [None, 1.0]
    with pytest.raises(SystemExit, match="has not come to its end since"):
        call("retry", key, "--work", tmp_path, "--data", "good")


def create_queue(work, seeds):
    specs = [Spec("mnist", "dgc", {}, 4, seed, 10) for seed in seeds]

    def pending(finished):
        done = [Spec.of(row) for row in finished]
        return [spec for spec in specs if spec not in done]

    return pending, Queue(work, COMMAND, pending=pending, pause=0.0)


def call(*arguments):
    parsed = evidence._parser().parse_args([*map(str, arguments)])
    parsed.call(parsed)


def test_session_gets_the_lowest_priority():
    """`nice` alone may count only within a session."""
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    group = pathlib.Path(f"/proc/{child.pid}/autogroup")
    try:
        if not group.exists():
            pytest.skip("this kernel does not divide processors by sessions")
        lower_priority(child.pid)
        assert group.read_text().split()[1:] == ["nice", "19"]
    finally:
        child.kill()
        child.wait()


def test_pause_status_and_collect(tmp_path, capsys):
    def output(*arguments):
        call(*arguments)
        return capsys.readouterr().out

    work, out = tmp_path / "work", tmp_path / "out"
    specs = plan.GROUPS[0].specs()
    call("pause", "--work", work)
    rows.append(work / "runs", row(specs[0]))
    rows.append(work / "runs", row(specs[1], None, error="no power"))
    text = output("status", "--work", work)
    assert "done: 2, 1 of them failures" in text
    assert "paused" in text
    call("resume", "--work", work)
    assert "paused" not in output("status", "--work", work)
    collect = "collect", "--work", work, "--out", out
    assert output(*collect).startswith("2 rows are new")
    assert output(*collect).startswith("0 rows are new")
    assert rows.read(out) == rows.read(work / "runs")

"""Ctrl-C, `kill` and hang-up while `tf-dgc run` runs."""

import contextlib
import io
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import psutil
import pytest

from tf_dgc.multiworker.interrupts import deliver_keyboard_interrupts
from tf_dgc.multiworker.launch import launcher, worker_processes

HEAD = (
    "import os, signal, subprocess, sys, time\nprint('pid', os.getpid(), flush=True)\n"
)
IGNORES = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
CATCHES = (
    "try:\n    print('ready', flush=True); time.sleep(600)\n"
    "except KeyboardInterrupt:\n    print('caught', flush=True)\n"
)
LONG = 100.0  # s: longer than any tested limit


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher.onednn, "advice", lambda: None)
    for name in ("_INTERRUPT_SECONDS", "_SURVIVOR_SECONDS", "_READ_SECONDS"):
        monkeypatch.setattr(launcher, name, LONG)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def run(tmp_path, body, signals):
    """Run two workers, and signal this process when both are ready.

    `signals` are pairs of seconds to wait, and number. Returns the exit code, the
    output, and the seconds from the last signal to the end.
    """
    script = tmp_path / "script.py"
    script.write_text(HEAD + body)
    output = io.StringIO()

    def interrupt():
        def both_are_ready():
            return output.getvalue().count("ready") == 2

        was_ready.append(worker_processes.wait_until(both_are_ready, 150))
        for seconds, number in signals:
            time.sleep(seconds)
            sent.append(time.monotonic())
            os.kill(os.getpid(), number)

    was_ready, sent = [], []
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    code = launcher.launch([sys.executable, str(script)], 2, output, show_all=True)
    ended = time.monotonic()
    interrupter.join()
    assert was_ready == [True]
    return code, output.getvalue(), ended - sent[-1]


def assert_gone(output):
    pids = [int(pid) for pid in output.replace("pid ", "pid=").split("pid=")[1:]
            for pid in pid.split()[:1]]  # fmt: skip
    assert len(pids) >= 2
    for pid in pids:
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_worker_gets_keyboard_interrupt(tmp_path, number):
    code, output, seconds = run(tmp_path, CATCHES, [(0, number)])
    assert code == 130
    assert output.count("[tf-dgc] interrupted: every worker gets KeyboardInter") == 1
    assert output.count("caught") == 2
    assert seconds < LONG / 2
    assert_gone(output)


def test_a_worker_that_does_not_end_is_killed_after_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_INTERRUPT_SECONDS", 1.0)
    body = IGNORES + "print('ready', flush=True); time.sleep(600)\n"
    code, output, _ = run(tmp_path, body, [(0, signal.SIGINT)])
    assert code == 130
    assert_gone(output)


def test_the_second_interrupt_kills_at_once(tmp_path, monkeypatch):
    """Child processes of the workers end, too."""
    monkeypatch.setattr(launcher, "_SAME_SECONDS", 0.0)
    body = IGNORES + "subprocess.Popen(['sleep', '600'])\n"
    body += "print('ready', flush=True); time.sleep(600)\n"
    signals = [(0, signal.SIGINT), (0.3, signal.SIGTERM)]
    code, output, seconds = run(tmp_path, body, signals)
    assert code == 130
    assert seconds < LONG / 2
    assert_gone(output)


def test_an_interrupt_that_arrives_twice_counts_once(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_SAME_SECONDS", 30.0)
    body = CATCHES + "    time.sleep(1); print('saved', flush=True)\n"
    signals = [(0, signal.SIGINT), (0, signal.SIGINT)]
    code, output, _ = run(tmp_path, body, signals)
    assert code == 130
    assert output.count("saved") == 2


def test_repeated_interrupts_count_again_after_a_time(monkeypatch):
    times = iter(100 + 0.4 * i for i in range(10))
    monkeypatch.setattr(launcher.time, "monotonic", lambda: next(times))
    with launcher.Interrupts() as interrupts:
        counts = []
        for _ in range(4):
            os.kill(os.getpid(), signal.SIGINT)
            counts.append(interrupts.count)
    assert counts == [1, 1, 2, 2]


def test_a_survivor_of_a_failure_is_interrupted_too(tmp_path):
    """Even if it ignores SIGTERM, as programs that use TensorFlow do."""
    script = tmp_path / "script.py"
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    body += "if '\"index\": 1' in os.environ['TF_CONFIG']:\n"
    body += "    while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    body += "    sys.exit(7)\n"
    catches = CATCHES.replace("; time", "; open(sys.argv[1], 'x'); time")
    script.write_text(HEAD + body + catches)
    output, start = io.StringIO(), time.monotonic()
    command = [sys.executable, str(script), str(tmp_path / "ready")]
    assert launcher.launch(command, 2, output, show_all=True) == 7
    assert time.monotonic() - start < LONG
    assert "[0] caught" in output.getvalue()
    assert_gone(output.getvalue())


WAITS = """
import json
sys.modules["sklearn"] = None  # Keras would load it
sys.settrace(None)  # of coverage: tf_dgc needs to set one
import tensorflow as tf
import tf_dgc
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
strategy = tf_dgc.multi_worker_strategy()

@tf.function
def step():
    context = tf.distribute.get_replica_context
    return strategy.run(lambda: context().all_reduce("sum", tf.constant(1.0)))

try:
    step()
    print("ready", flush=True)
    if rank == 1:
        time.sleep(600)
    step()
except KeyboardInterrupt:
    print("caught", flush=True)
    time.sleep(2 * rank)
"""


@pytest.mark.workers
@pytest.mark.slow
def test_a_worker_that_waits_for_another_one_is_interrupted_too(tmp_path, monkeypatch):
    """It waits within TensorFlow, and the other one does not end at once."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    code, output, _ = run(tmp_path, WAITS, [(1, signal.SIGINT)])
    assert code == 130
    assert output.count("[0] caught") == output.count("[1] caught") == 1
    assert "Traceback" not in output


def test_a_handler_of_the_program_is_not_replaced(monkeypatch):
    monkeypatch.setattr(signal, "set_wakeup_fd", pytest.fail)

    def handler(*_):
        pass

    before = signal.signal(signal.SIGINT, handler)
    try:
        deliver_keyboard_interrupts()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launcher.Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.count == 1
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_worker_of_a_background_job_can_be_interrupted(tmp_path):
    """A shell makes background jobs ignore Ctrl-C."""
    script = tmp_path / "script.py"
    script.write_text("import signal; print(signal.getsignal(signal.SIGINT))")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        output = io.StringIO()
        assert launcher.launch([sys.executable, str(script)], 1, output) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert "default_int_handler" in output.getvalue()


def test_a_launcher_that_hangs_up_and_one_that_is_killed(tmp_path):
    """`nohup` works for the workers too; and no worker outlives its launcher."""
    script = tmp_path / "script.py"
    script.write_text(
        HEAD + "print(repr(signal.getsignal(1)), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers", "1", str(script)]
    with (
        subprocess.Popen(
            ["nohup", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "TMPDIR": str(tmp_path)},
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        worker = psutil.Process(int(process.stdout.readline().split()[1]))
        assert "SIG_IGN" in process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        assert worker.is_running()
    worker.wait(LONG)


def test_only_groups_of_workers_not_waited_for_are_signalled(monkeypatch):
    """Once a worker was waited for, its number may belong to another process."""
    groups = []
    monkeypatch.setattr(os, "killpg", lambda group, number: groups.append(group))
    with open(os.devnull, "w") as nowhere:
        workers = [
            worker_processes.start_process(["true"], os.environ, nowhere.fileno())
            for _ in range(2)
        ]
    for worker in workers:

        def has_ended(worker=worker):
            return worker_processes.exit_code(worker) == 0

        assert worker_processes.wait_until(has_ended, LONG)
    workers[0].wait()
    assert [worker.returncode for worker in workers] == [0, None]
    assert pathlib.Path(f"/proc/{workers[1].pid}").exists()
    worker_processes.end_processes(workers)
    assert set(groups) == {workers[1].pid}
    assert [worker.returncode for worker in workers] == [0, 0]

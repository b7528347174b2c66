"""`tf-dgc run`."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tf_dgc import cli, launcher

HEAD = "import json, os, subprocess, sys, time\n"
HEAD += "task = json.loads(os.environ['TF_CONFIG'])['task']\n"


def write(tmp_path, body):
    script = tmp_path / "script.py"
    script.write_text(HEAD + body)
    return str(script)


def launch(script, num_workers, *args):
    output = io.StringIO()
    code = launcher.launch([sys.executable, script, *args], num_workers, output)
    return code, output.getvalue()


def test_every_worker_gets_its_place_and_the_arguments(tmp_path):
    script = write(tmp_path, "print(os.environ['TF_CONFIG'], sys.argv[1:])")
    code, output = launch(script, 3, "--rate", "0.1", "file")
    assert code == 0
    lines = sorted(output.splitlines())
    assert len(lines) == 3
    addresses = set()
    for rank, line in enumerate(lines):
        prefix, text = line.split(" ", 1)
        assert prefix == f"[{rank}]"
        config, end = json.JSONDecoder().raw_decode(text)
        assert text[end:] == " ['--rate', '0.1', 'file']"
        assert config["task"] == {"type": "worker", "index": rank}
        addresses.update(config["cluster"]["worker"])
    assert len(addresses) == 3


def test_all_are_ended_as_soon_as_one_fails(tmp_path):
    script = write(
        tmp_path,
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(1)\n"
        "sys.exit(7) if task['index'] == 1 else time.sleep(600)\n",
    )
    start = time.monotonic()
    code, output = launch(script, 3)
    assert code == 7
    assert time.monotonic() - start < 30
    assert "worker 1 failed with exit code 7" in output
    assert_gone(output)


def assert_gone(output):
    children = [int(pid) for pid in re.findall(r"child (\d+)", output)]
    assert children
    for pid in children:
        assert not psutil.pid_exists(pid) or (
            psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        )


def test_a_worker_that_is_killed(tmp_path):
    script = write(
        tmp_path, "os.kill(os.getpid(), 9) if task['index'] == 0 else time.sleep(600)"
    )
    code, output = launch(script, 2)
    assert code == 128 + signal.SIGKILL
    assert "worker 0 failed" in output


def test_a_worker_that_ignores_termination_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_GRACE_SECONDS", 0.5)
    script = write(
        tmp_path,
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(0.5)\n"
        "sys.exit(3) if task['index'] == 0 else time.sleep(600)\n",
    )
    assert launch(script, 2)[0] == 3


def test_restarts_until_no_worker_fails(tmp_path):
    script = write(
        tmp_path,
        "attempt = int(os.environ['TF_DGC_ATTEMPT'])\n"
        "print('attempt', attempt, 'rank', task['index'], flush=True)\n"
        "if attempt < 3: sys.exit(5) if task['index'] == 1 else time.sleep(600)\n",
    )
    output = io.StringIO()
    command = [sys.executable, script]
    assert launcher.launch(command, 2, output, max_restarts=4) == 0
    lines = output.getvalue().splitlines()
    assert lines.count("[tf-dgc] attempt 2 of 5: starting all 2 workers again") == 1
    for attempt in (1, 2, 3):
        assert f"[1] attempt {attempt} rank 1" in lines
    assert "[0] attempt 3 rank 0" in lines
    assert "attempt 4" not in output.getvalue()


def test_restarts_are_limited(tmp_path):
    script = write(tmp_path, "sys.exit(int(os.environ['TF_DGC_ATTEMPT']))")
    output = io.StringIO()
    assert launcher.launch([sys.executable, script], 1, output, max_restarts=2) == 3
    assert output.getvalue().count("failed with exit code") == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_all_workers(tmp_path, number):
    script = write(tmp_path, "print('child', os.getpid(), flush=True)\ntime.sleep(600)")
    process = subprocess.Popen(
        [sys.executable, "-m", "tf_dgc", "run", "--workers", "2", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    )
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(number)
        rest, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "interrupted" in rest
    assert_gone("".join(lines))


def test_command_line_runs_a_script(tmp_path, capfd):
    script = write(tmp_path, "print('hello', *sys.argv[1:])")
    assert cli.main(["run", "--workers", "1", script, "--help"]) == 0
    assert "[0] hello --help" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--workers", "2", "no/such.py"], "no such script: no/such.py"),
        (["run", "--workers", "0", __file__], "1 or more; received: 0"),
        (["run", "--workers", "two", __file__], "1 or more; received: two"),
        (["run", __file__], "--workers"),
        (["run", "--workers", "1", "--max-restarts", "-1", __file__], "--max-restarts"),
        ([], "COMMAND"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err

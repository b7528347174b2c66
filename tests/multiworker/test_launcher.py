"""`tf-dgc run`."""

import fcntl
import io
import json
import os
import pathlib
import re
import signal
import socket
import struct
import sys
import tempfile
import termios
import time

import psutil
import pytest
import tensorflow as tf

from tf_dgc.cli import main
from tf_dgc.multiworker import rendezvous
from tf_dgc.multiworker.launch import launcher


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher.onednn, "advice", lambda: None)
    monkeypatch.setattr(launcher, "_READ_SECONDS", 100.0)  # all, when all have ended
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


HEAD = "import json, os, subprocess, sys, time\n"
HEAD += "task = json.loads(os.environ['TF_CONFIG'])['task']\n"


def write(tmp_path, body):
    script = tmp_path / "script.py"
    script.write_text(HEAD + body)
    return str(script)


def launch(script, num_workers, *args):
    output = io.StringIO()
    command = [sys.executable, script, *args]
    code = launcher.launch(command, num_workers, output, show_all=True)
    return code, output.getvalue()


def test_every_worker_gets_its_rank_and_the_arguments(tmp_path):
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


def test_all_workers_end_as_soon_as_one_fails(tmp_path):
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
    assert time.monotonic() - start < 100
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


def run_two(tmp_path, body):
    """Run two workers; return the lines but the last one, and the last one's reason."""
    output = io.StringIO()
    command = [sys.executable, write(tmp_path, body)]
    launcher.launch(command, 2, output)
    *lines, last = output.getvalue().splitlines()
    assert "; all that the workers printed is in " in last
    return lines, last.partition("; all that")[0]


WAITS = "else:\n    print('ready', flush=True)\n    time.sleep(600)\n"


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("os.kill(os.getpid(), 9)", "worker 1 was killed (SIGKILL) by a user, or"),
        ("os.kill(os.getpid(), 11)", "worker 1 was ended by signal 11 (Segmentation"),
        ("1 / 0", "ended with exit code 1: ZeroDivisionError: division by zero. Fix"),
        ("sys.exit('the disk is full')", "exit code 1: the disk is full. Fix that"),
        ("sys.exit(7)", "worker 1 ended with exit code 7. Look at the end of its log"),
        ("sys.exit(137)", "worker 1 ended with exit code 137. Look at the end"),
    ],
)
def test_the_last_line_is_the_reason_and_what_to_do(tmp_path, ends, expected):
    """The other worker is interrupted, and shows no traceback."""
    body = f"if task['index'] == 1:\n    {ends}\n{WAITS}"
    lines, last = run_two(tmp_path, body)
    assert expected in last
    assert "tart all workers again" in last
    assert "KeyboardInterrupt" not in "".join(lines)
    assert sum("Traceback" in line for line in lines) == (ends == "1 / 0")


def test_an_error_while_an_interrupt_is_handled_is_shown(tmp_path):
    body = "if task['index'] == 1: sys.exit(7)\n"
    body += "try:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    save()\n"
    lines, _ = run_two(tmp_path, body)
    assert "NameError: name 'save' is not defined" in lines
    assert sum("Traceback" in line for line in lines) == 2


def test_the_traceback_of_the_worker_whose_error_ended_another(tmp_path):
    """The other worker knew of the error, and ended first."""
    error = (
        "tf_dgc: worker 2 (c:3) cannot go on: worker 1 (b:2) ended with ValueError: "
    )
    body = f"if task['index'] == 2: sys.exit({error!r} + 'no. Training')\n"
    body += "if task['index'] == 0: time.sleep(600)\n"
    body += "def go(): raise ValueError('no')\n"
    body += "try:\n    go()\nfinally:\n    import traceback\n"
    body += "    traceback.print_exc(); sys.stderr.flush(); time.sleep(600)\n"
    output = io.StringIO()
    launcher.launch([sys.executable, write(tmp_path, body)], 3, output)
    lines = output.getvalue().splitlines()
    first, second = (lines.index(f"[tf-dgc] worker {i} printed last:") for i in (1, 2))
    assert first < lines.index("[1] ValueError: no") < second
    assert f"exit code 1: {error}no. Fix that" in lines[-1]


LONG = "the disk is full " * 30


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("ValueError: no", "ValueError: no. Fix"),
        ("ValueError: no. Pass 1.", "ValueError: no. Pass 1. Fix"),
        (f"OSError: {LONG}", "full the disk is full ... Fix"),
        (f"OSError: {'x' * 400}", "OSError: ... Fix"),
        # What this package says: its first sentence.
        (
            "RuntimeError: tf_dgc: worker 0 (a.b:1) cannot go on: the port 1.5 is in "
            "use. Training cannot go on",
            "1: tf_dgc: worker 0 (a.b:1) cannot go on: the port 1.5 is in use. Fix",
        ),
        (
            "a.InvalidArgumentError: assertion failed: [tf_dgc:] [The schedule] [1.5] "
            "[at iteration] [3]",
            "1: tf_dgc: The schedule 1.5 at iteration 3. Fix",
        ),
    ],
)
def test_the_reason_is_short(error, reason):
    text = launcher._reason("worker 0", 1, error)
    assert reason in text
    assert len(text) < 400


@pytest.mark.slow
def test_a_worker_that_ignores_termination_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_SURVIVOR_SECONDS", 0.5)
    script = write(
        tmp_path,
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
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
    assert launcher.launch(command, 2, output, max_restarts=4, show_all=True) == 0
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


def test_the_end_of_a_failed_workers_output(tmp_path):
    script = write(
        tmp_path,
        "if task['index'] == 1:\n"
        "    print(*range(100), sep='\\n')\n"
        "    sys.exit('the disk is full')\n"
        "time.sleep(600)\n",
    )
    output = io.StringIO()
    assert launcher.launch([sys.executable, script], 2, output) == 1
    lines = output.getvalue().splitlines()
    assert lines[0].startswith("[tf-dgc] worker 1 failed with exit code 1; ending")
    printed = [line for line in lines if line.startswith("[1] ")]
    assert printed == [*(f"[1] {i}" for i in range(81, 100)), "[1] the disk is full"]
    directory = pathlib.Path(lines[-1].rpartition(" ")[2])
    log = (directory / "worker-1.log").read_text().splitlines()
    assert log == [*map(str, range(100)), "the disk is full"]


def test_only_the_first_workers_output_is_shown(tmp_path):
    """TensorFlow's log is left out; the files have everything."""
    head = "I0000 00:00:1795338391.161147    7485 coordination_service.cc:502] "
    script = write(
        tmp_path,
        f"head = {head!r}\n"
        "print('rank', task['index'])\n"
        "os.write(2, (head + 'Waiting for 1/2 tasks\\n').encode())\n"
        "print('1/2 \u2501', end='', flush=True)\n"
        "os.write(2, (head + 'Barrier passed\\n').encode())\n"
        "print('\\b' * 5 + '\\r\\x1b[1m2/2\\x1b[0m \u2501')\n"
        "print('a warning', file=sys.stderr)\n",
    )
    output = io.StringIO()
    logs = tmp_path / "logs"
    command = [sys.executable, script]
    assert launcher.launch(command, 2, output, log_dir=str(logs)) == 0
    assert output.getvalue() == "rank 0\n2/2 \u2501\na warning\n"
    for rank in (0, 1):
        assert (logs / f"worker-{rank}.log").read_text().splitlines() == [
            f"rank {rank}",
            f"{head}Waiting for 1/2 tasks",
            f"{head}Barrier passed",
            "2/2 \u2501",
            "a warning",
        ]
    assert launcher.launch(command, 2, output) == 0
    assert not list(tmp_path.glob("tf-dgc-*"))


def test_variables_that_the_user_has_set(tmp_path, monkeypatch):
    names = ("PYTHONUNBUFFERED", "PYTHONIOENCODING", "TF_CPP_MIN_LOG_LEVEL", "COLUMNS")
    names += ("MALLOC_TOP_PAD_",)
    script = write(tmp_path, f"print([os.environ.get(n) for n in {names}])")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert launch(script, 1)[1] == "[0] ['1', 'utf-8', None, None, '134217728']\n"
    for name, value in zip(names, ("", "latin-1", "0", "70", "0"), strict=True):
        monkeypatch.setenv(name, value)
    assert launch(script, 1)[1] == "[0] ['', 'latin-1', '0', '70', '0']\n"


def test_output_that_is_not_utf_8_ends_no_worker(tmp_path):
    script = write(tmp_path, "for i in range(2): print(i, '\u2501')")
    received = io.BytesIO()
    output = io.TextIOWrapper(received, "ascii")
    assert launcher.launch([sys.executable, script], 1, output) == 0
    assert received.getvalue() == b"0 ?\n1 ?\n"


def test_output_that_nobody_reads_ends_no_worker(tmp_path):
    done = tmp_path / "done"
    script = write(
        tmp_path,
        "print('x' * 1000000, flush=True)\n"
        f"print('y', flush=True); open({str(done)!r}, 'w')\n",
    )
    read, written = os.pipe()
    os.close(read)
    with open(written, "w") as output:
        assert launcher.launch([sys.executable, script], 1, output) == 0
    assert done.exists()


def test_a_terminal_is_passed_on(tmp_path):
    """The first worker gets a terminal of the same size; the others get none."""
    script = write(
        tmp_path,
        "size = os.get_terminal_size(1) if sys.stdout.isatty() else None\n"
        "sys.stdout.write(f'{task[\"index\"]} {size}\\r\\x1b[1mbar')\n",
    )
    seen, terminal = os.openpty()
    size = struct.pack("HHHH", 20, 70, 0, 0)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
    with open(terminal, "w") as output:
        assert launcher.launch([sys.executable, script], 2, output) == 0
        drawn = os.read(seen, 10000).decode()
    os.close(seen)
    assert drawn == "0 os.terminal_size(columns=70, lines=20)\r\x1b[1mbar"


@pytest.mark.parametrize("no_color", [False, True])
def test_all_workers_on_a_terminal(tmp_path, monkeypatch, no_color):
    """Ranks and output are coloured, unless NO_COLOR is set."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    script = write(
        tmp_path, "print('\\x1b[32mgreen\\x1b[0m\\x1b[2K', sys.stdout.isatty())"
    )
    seen, terminal = os.openpty()
    with open(terminal, "w") as output:
        code = launcher.launch([sys.executable, script], 1, output, show_all=True)
        printed = os.read(seen, 10000).decode()
    os.close(seen)
    assert code == 0
    colored = "\x1b[36m[0]\x1b[0m \x1b[32mgreen\x1b[0m False\r\n"
    assert printed == ("[0] green False\r\n" if no_color else colored)


def test_a_background_process_that_keeps_the_output_open(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_READ_SECONDS", 0.2)
    script = write(
        tmp_path,
        "p = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print('child', p.pid)\n",
    )
    start = time.monotonic()
    code, output = launch(script, 1)
    assert code == 0
    assert time.monotonic() - start < 90
    os.kill(int(output.split()[-1]), signal.SIGKILL)


def test_command_line_runs_a_script(tmp_path, capfd):
    script = write(tmp_path, "print('hello', *sys.argv[1:])")
    assert main.main(["run", "--workers", "1", script, "--help"]) == 0
    assert capfd.readouterr().out == "hello --help\n"
    logs = ["--log-dir", str(tmp_path / "logs")]
    options = ["--workers", "2", "--output", "all", *logs]
    assert main.main(["run", *options, script, "--output"]) == 0
    out = capfd.readouterr().out
    assert sorted(out.splitlines()) == ["[0] hello --output", "[1] hello --output"]
    assert (tmp_path / "logs" / "worker-1.log").read_text() == "hello --output\n"


def test_the_advice_is_printed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher.onednn, "advice", lambda: "set it to 1")
    output = io.StringIO()
    script = write(tmp_path, "sys.exit(os.environ['TF_DGC_ATTEMPT'] < '2')")
    assert launcher.launch([sys.executable, script], 2, output, max_restarts=1) == 0
    assert output.getvalue().startswith("[tf-dgc] set it to 1\n")
    assert output.getvalue().count("set it to 1") == 1


def test_ports_are_held_until_workers_listen():
    with launcher.reserved_ports(2) as ports:
        for port in ports:
            with pytest.raises(OSError, match="in use"), socket.socket() as other:
                other.bind(("", port))
        address = f"127.0.0.1:{ports[0]}"
        server = tf.distribute.Server({"local": [address]}, "local", 0)
        assert rendezvous._speaks(address)
        assert server.target.endswith(address)
        with rendezvous._server(ports[1]):
            pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--workers", "2", "no/such.py"], "no such script: no/such.py"),
        (["run", "--workers", "0", __file__], "1 or more; received: 0"),
        (["run", "--workers", "two", __file__], "1 or more; received: two"),
        (["run", __file__], "--workers"),
        (["run", "--workers", "1", "--output", "1", __file__], "--output"),
        (["run", "--workers", "1", "--log-dir", __file__, __file__], "--log-dir"),
        (["run", "--workers", "1", "--max-restarts", "-1", __file__], "--max-restarts"),
        ([], "COMMAND"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        main.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
def test_a_server_may_end_later_than_the_workers(tmp_path, monkeypatch, code):
    """It may have to write a checkpoint after they have left."""
    program = "import pathlib, sys, time; time.sleep(4); "
    program += f"pathlib.Path('written').touch(); sys.exit({code})"
    monkeypatch.setattr(launcher, "_SERVE", (sys.executable, "-c", program))
    monkeypatch.chdir(tmp_path)
    output = io.StringIO()
    command = [sys.executable, write(tmp_path, "pass")]
    assert launcher.launch(command, 1, output, num_servers=1) == 0
    assert (tmp_path / "written").exists()
    assert "the server has 60 s to end, too" in output.getvalue()
    assert ("server 0 ended with exit code 3" in output.getvalue()) == bool(code)


@pytest.mark.slow
def test_a_server_is_started_and_ended_with_the_workers(tmp_path, monkeypatch):
    program = "import os, time; print(os.environ['TF_CONFIG'], flush=True); "
    program += "print(os.environ['TF_DGC_SECRET'], flush=True); time.sleep(60)"
    monkeypatch.setattr(launcher, "_SERVE", (sys.executable, "-c", program))
    monkeypatch.setattr(launcher, "_SERVER_SECONDS", 1.0)  # it never ends by itself
    body = "print(os.environ['TF_CONFIG']); print(os.environ['TF_DGC_SECRET'])\n"
    body += "time.sleep(1)"
    output = io.StringIO()
    start = time.monotonic()
    code = launcher.launch(
        [sys.executable, write(tmp_path, body)],
        2,
        output,
        show_all=True,
        log_dir=str(tmp_path),
        num_servers=1,
    )
    assert code == 0
    assert time.monotonic() - start < 30
    lines_of = {}
    for line in output.getvalue().splitlines():
        mark, text = line.split(" ", 1)
        lines_of.setdefault(mark, []).append(text)
    assert "the server has 1 s to end, too" in lines_of.pop("[tf-dgc]")[0]
    configs = {mark: json.loads(lines[0]) for mark, lines in lines_of.items()}
    assert configs.keys() == {"[0]", "[1]", "[server]"}
    assert configs["[server]"]["task"] == {"type": "ps", "index": 0}
    assert [len(c["cluster"]["worker"]) for c in configs.values()] == [2] * 3
    assert len({str(c["cluster"]) for c in configs.values()}) == 1
    assert len({lines[1] for lines in lines_of.values()}) == 1
    assert configs["[0]"]["cluster"]["ps"][0] in (tmp_path / "server-0.log").read_text()


def test_a_server_that_fails_ends_all(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_SERVE", (sys.executable, "-c", "1/0"))
    output = io.StringIO()
    command = [sys.executable, write(tmp_path, "time.sleep(60)")]
    code = launcher.launch(command, 1, output, num_servers=1)
    assert code == 1
    assert "server 0 failed with exit code 1; ending the other 1" in output.getvalue()
    assert "[server] ZeroDivisionError" in output.getvalue()


def test_a_missing_program_is_named(tmp_path):
    output = io.StringIO()
    assert launcher.launch([str(tmp_path / "none")], 1, output, show_all=True) == 1
    assert f"[0] {tmp_path / 'none'}: No such file or directory" in output.getvalue()
    assert "Traceback" not in output.getvalue()

"""`tf-dgc run --hosts`: workers that another program starts, as ssh does."""

import io
import json
import os
import pathlib
import re
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import programs
import psutil
import pytest

from tf_dgc.cli import main
from tf_dgc.multiworker.launch import launcher
from tf_dgc.multiworker.launch.launcher import Hosts, wait_for_remote_workers

# Stands for ssh: a shell runs the command, with its input and output, and continues if
# the client dies.
STAND_IN = """
import os, subprocess, sys
*options, host, command = sys.argv[1:]
shell = subprocess.Popen(["cat"], stdout=subprocess.PIPE)
os.chdir("/")
there = {"PATH": os.environ["PATH"], "HOST": host}
far = subprocess.Popen(
    ["sh", "-c", command], stdin=shell.stdout, env=there, start_new_session=True
)
shell.stdout.close()
sys.exit(far.wait() % 256)
"""
HEAD = "import json, os, subprocess, sys, time\n"
HEAD += "config = json.loads(os.environ['TF_CONFIG'])\n"
HEAD += "rank = config['task']['index']\n"


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher.onednn, "advice", lambda: None)
    monkeypatch.setattr(launcher, "_READ_SECONDS", 100.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(launcher.__file__).parents[3]))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "ssh.py"
    path.write_text(STAND_IN)
    command = shlex.join([sys.executable, str(path), "-o", "BatchMode=yes"])
    return Hosts(["a", "me@b", "b"], 4000, command)


def launch(hosts, body, *args, **settings):
    pathlib.Path("script.py").write_text(HEAD + body)
    output = io.StringIO()
    command = [sys.executable, "script.py", *args]
    code = launcher.launch(
        command, len(hosts.names), output, show_all=True, hosts=hosts, **settings
    )
    return code, output.getvalue()


def test_every_worker_gets_its_rank_and_environment(hosts, monkeypatch):
    monkeypatch.setenv("TF_DGC_TIMEOUT", "7")
    monkeypatch.setenv("SECRET", "7")
    body = "names = 'HOST', 'TF_DGC_TIMEOUT', 'SECRET'\n"
    body += "environment = {name: os.environ.get(name) for name in names}\n"
    body += "print(json.dumps([config, sys.argv[1:], os.getcwd(), environment]))"
    code, output = launch(hosts, body, "it's", "--rate", "$HOME")
    assert code == 0, output
    lines = sorted(output.splitlines())
    assert [line[:4] for line in lines] == ["[0] ", "[1] ", "[2] "]
    for rank, line in enumerate(lines):
        config, args, directory, environment = json.loads(line[4:])
        assert config == {
            "cluster": {"worker": ["a:4000", "b:4000", "b:4001"]},
            "task": {"type": "worker", "index": rank},
        }
        assert args == ["it's", "--rate", "$HOME"]
        assert directory == os.getcwd()
        assert environment == {
            "HOST": hosts.names[rank], "TF_DGC_TIMEOUT": "7", "SECRET": None
        }  # fmt: skip


def test_an_address_in_brackets(hosts):
    """`TF_CONFIG` has the brackets; ssh would take them for a part of a name."""
    hosts = hosts._replace(names=["[::1]", "me@[fe80::2]"])
    code, output = launch(hosts, "print(json.dumps([config, os.environ['HOST']]))")
    assert code == 0, output
    rows = [json.loads(line[4:]) for line in sorted(output.splitlines())]
    assert [host for _, host in rows] == ["::1", "me@fe80::2"]
    addresses = ["[::1]:4000", "[fe80::2]:4000"]
    assert [config["cluster"]["worker"] for config, _ in rows] == [addresses] * 2


def test_a_relative_python_path_works_on_the_host(hosts, monkeypatch):
    """The remote shell starts in another directory."""
    package = pathlib.Path(launcher.__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.path.relpath(package) + os.pathsep)
    code, output = launch(hosts, "print(os.environ['PYTHONPATH'])")
    assert code == 0, output
    assert sorted(output.splitlines()) == [f"[{rank}] {package}" for rank in range(3)]


def test_an_interrupt_before_the_start_runs_nothing(tmp_path):
    """The launcher sends it if another host cannot be reached."""
    request = {
        "directory": str(tmp_path),
        "command": ["touch", "begun"],
        "environment": {},
        "defaults": {},
    }
    finished = subprocess.run(
        [sys.executable, "-m", "tf_dgc", "remote"],
        input=json.dumps(request) + "\n2\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert finished.returncode == 130
    assert not (finished.stderr or (tmp_path / "begun").exists())


def test_all_workers_end_as_soon_as_one_fails(hosts):
    body = "child = subprocess.Popen(['sleep', '600'])\n"
    body += "print('child', child.pid, flush=True)\n"
    body += "time.sleep(1)\n"
    body += "sys.exit(7) if rank == 1 else time.sleep(600)\n"
    start = time.monotonic()
    code, output = launch(hosts, body)
    assert code == 7
    assert "worker 1 failed with exit code 7" in output
    assert time.monotonic() - start < 60
    children = list(map(int, re.findall(r"child (\d+)", output)))
    assert len(children) == 3
    wait_until_gone(children)


def wait_until_gone(pids, seconds=30):
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_workers_end_when_the_launcher_is_killed(hosts, tmp_path):
    pathlib.Path("script.py").write_text(
        HEAD + "open(f'{rank}.pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "tf_dgc", "run", "--hosts", "a,b"]
    run = subprocess.Popen([*command, "--ssh", hosts.ssh, "script.py"])
    try:
        paths = [tmp_path / f"{rank}.pid" for rank in range(2)]
        deadline = time.monotonic() + 60
        while not all(p.exists() and p.read_text() for p in paths):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        run.kill()
        run.wait()
    wait_until_gone([int(path.read_text()) for path in paths])


def test_a_worker_is_interrupted_by_the_end_of_its_input(tmp_path):
    """The program has time for its `except KeyboardInterrupt`."""
    body = "try:\n    print('ready', flush=True)\n    time.sleep(600)\n"
    body += "except KeyboardInterrupt:\n    print('interrupted'); sys.exit(5)\n"
    pathlib.Path("script.py").write_text("import sys, time\n" + body)
    request = {
        "command": [sys.executable, "script.py"],
        "directory": str(tmp_path),
        "environment": {},
        "defaults": {"TF_DGC_X": "1"},
    }
    remote = subprocess.Popen(
        [sys.executable, "-m", "tf_dgc", "remote"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        remote.stdin.write(json.dumps(request) + "\n")
        remote.stdin.flush()
        assert remote.stdout.readline() == "ready\n"
        remote.stdin.close()
        assert remote.stdout.read() == "interrupted\n"
        assert remote.wait(60) == 5
    finally:
        remote.kill()
        remote.wait()
        remote.stdout.close()


@pytest.mark.parametrize(
    ("request_line", "message"),
    [
        ("", "it is run by `tf-dgc run --hosts`"),
        ('{"directory": "/nowhere"}\n', "the directory must be the same as there"),
    ],
)
def test_an_unusable_request_is_an_error(request_line, message):
    command = [sys.executable, "-m", "tf_dgc", "remote"]
    finished = subprocess.run(
        command, input=request_line, capture_output=True, text=True
    )
    assert finished.returncode == 1
    assert message in finished.stderr


CANNOT_END = """
import signal
print(config['cluster']['worker'], flush=True)
if os.environ['TF_DGC_ATTEMPT'] == '2':
    if rank == 0:
        print('alone:', not os.path.exists('/proc/' + open('pid').read()))
elif rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open('now', 'w').write(str(os.getpid()))
    os.rename('now', 'pid')
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            print('interrupted', flush=True)
else:
    while not os.path.exists('pid'):
        time.sleep(0.05)
    sys.exit(7)
"""


@pytest.mark.slow
def test_a_second_attempt_has_other_ports_and_no_old_workers(hosts, monkeypatch):
    """Also if a worker of the first attempt ignores signals."""
    monkeypatch.setattr(launcher, "_READ_SECONDS", 2.0)  # else it waits for its output
    code, output = launch(hosts, CANNOT_END, max_restarts=1)
    assert code == 0, output
    assert "['a:4002', 'b:4002', 'b:4003']" in output
    assert "[0] interrupted" in output
    assert "[0] alone: True" in output
    assert "may still run" not in output


def test_workers_that_may_still_run_are_named():
    """ssh may end before the program that it started."""
    messages, hurry_calls = [], []

    def process(code, stdin=True):
        return SimpleNamespace(returncode=code, stdin=stdin)

    def hurry():
        hurry_calls.append(0)
        return True

    processes = {
        "worker 0": process(137),
        "worker 1": process(-15),
        "worker 2": process(7),
    }
    wait_for_remote_workers(processes, messages.append, hurry)
    assert [line[:23] for line in messages] == ["worker 1 may still run:"]
    assert not hurry_calls
    processes = {"worker 0": process(255), "server 0": process(-15, None)}
    wait_for_remote_workers(processes, messages.append, hurry)
    assert messages[1].startswith(
        "waiting 12 s for worker 0 to end, if only the connection"
    )
    assert len(messages) == 2
    assert hurry_calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "a,,b"], "must be comma-separated names of hosts"),
        (["--hosts=-oProxyCommand=x"], "must be comma-separated names of hosts"),
        (["--hosts", "a:2,b:2"], "without ports or numbers of workers"),
        (["--hosts", "a,::1"], "such as a, me@a or [::1]"),
        (["--hosts", "a,b", "--workers", "3"], "one worker per host"),
        (["--hosts", "a,b", "--servers", "1"], "one worker per host"),
        (["--hosts", "a", "--ssh", "ssh '"], "--ssh: No closing quotation; received"),
        (["--hosts", "a", "--ssh", "nosuchssh -v"], "is no program 'nosuchssh'; rec"),
        (["--hosts", "a", "--ssh", ""], "--ssh: there is no program ''; received: ''"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["run", *arguments, __file__])
    assert message in capsys.readouterr().err


TRAIN = pathlib.Path(__file__).parents[2] / "examples" / "cluster" / "train.py"


@pytest.mark.slow
@pytest.mark.workers
def test_training(hosts, tmp_path):
    command = [sys.executable, "-m", "tf_dgc", "run", "--hosts", "127.0.0.1,127.0.0.1"]
    flags = [TRAIN, f"--directory={tmp_path / 'run'}", "--epochs=1"]
    finished = programs.run([*command, "--ssh", hosts.ssh, *flags], merged=True)
    assert finished.returncode == 0, finished.stdout
    assert "2 workers: accuracy" in finished.stdout
    assert "INFO:tensorflow" not in finished.stdout  # nor once more by absl
    assert (tmp_path / "run" / "model.keras").exists()


SSHD = "/usr/sbin/sshd"
CONFIG = """
HostKey {directory}/host
AuthorizedKeysFile {directory}/mine.pub
StrictModes no
UsePAM no
PidFile none
"""
MISSING = os.geteuid() != 0 or not os.path.exists(SSHD)


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.skipif(MISSING, reason="needs root and sshd")
def test_training_on_machines_with_sshd(tmp_path):
    """Three network namespaces: two have an sshd, and the third one starts."""
    from common import network

    for name in ("host", "mine"):
        key = ["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f"]
        subprocess.run([*key, str(tmp_path / name)], check=True)
    (tmp_path / "config").write_text(CONFIG.format(directory=tmp_path))
    tmp_path.chmod(stat.S_IRWXU)
    pathlib.Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    ssh = f"ssh -i {tmp_path / 'mine'} -o BatchMode=yes -o StrictHostKeyChecking=no "
    ssh += "-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    servers = []
    with network.connect("1gbit", 3, 1) as net:
        try:
            for machine in range(2):
                command = [SSHD, "-D", "-e", "-f", str(tmp_path / "config")]
                servers.append(subprocess.Popen(net.command(machine, command)))
            wait_for_sshd(net, ssh)
            names = ",".join(network.address(machine) for machine in range(2))
            command = [sys.executable, "-m", "tf_dgc", "run", "--hosts", names]
            flags = [TRAIN, f"--directory={tmp_path / 'run'}", "--epochs=1"]
            command = net.command(2, [*command, "--ssh", ssh, *map(str, flags)])
            finished = programs.run(command, merged=True)
            assert net.sent_by_each()[1] > 100_000
        finally:
            for server in servers:
                server.terminate()
                server.wait()
    assert finished.returncode == 0, finished.stdout
    assert "2 workers: accuracy" in finished.stdout


def wait_for_sshd(net, ssh):
    from common import network

    deadline = time.monotonic() + 30
    for machine in range(2):
        command = [*shlex.split(ssh), network.address(machine), "true"]
        while subprocess.run(net.command(2, command), check=False).returncode:
            assert time.monotonic() < deadline
            time.sleep(0.2)

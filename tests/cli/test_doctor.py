"""`tf-dgc doctor`: checks of `TF_CONFIG` and of other machines."""

import json
import platform
import shlex
import socket
import sys

import pytest

from tf_dgc.cli import cluster_checks, doctor, main
from tf_dgc.multiworker.launch import launcher

# Stands for ssh. A shell may print a greeting before the command's output.
STAND_IN = """
import subprocess, sys, time
*options, host, command = sys.argv[1:]
assert options == ["-o", "BatchMode=yes"], options
if host == "denied":
    sys.stderr.write("Warning: known hosts\\nPermission denied (publickey).\\n")
    sys.exit(255)
if host == "slow":
    time.sleep(20)
if host == "bare":
    command = command.replace(sys.executable, "/no/such/python")
if host == "moved":
    command = command.replace(sys.argv[0].rpartition("/")[0], "/no/such/directory")
finished = subprocess.run(["sh", "-c", command], cwd="/", stdout=subprocess.PIPE)
text = finished.stdout.decode()
if host == "old":
    import platform
    text = text.replace(platform.python_version(), "3.9.1")
print("Welcome to", host)
print("nothing" if host == "odd" else text, end="")
sys.exit(finished.returncode)
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ssh.py"
    path.write_text(STAND_IN)
    return shlex.join([sys.executable, str(path), "-o", "BatchMode=yes"])


@pytest.fixture
def free_port():
    (port,) = launcher.free_ports(1)
    return port


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def set_cluster(monkeypatch, *addresses, index=0):
    task = {"type": "worker", "index": index}
    config = {"cluster": {"worker": addresses}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_hosts(ssh, monkeypatch):
    monkeypatch.setattr(cluster_checks, "_COMMAND_SECONDS", 8.0)
    names = ["a", "me@b", "denied", "slow", "bare", "moved", "old", "odd", "a"]
    checks = {c.name: c for c in cluster_checks.check_hosts(names, ssh)}
    assert list(checks) == names[:-1]
    assert [n for n, check in checks.items() if not check.is_problem] == ["a", "me@b"]
    assert "with the same versions" in checks["a"].text
    version = platform.python_version()
    for name, text in (
        ("denied", "denied (publickey). Allow it without a password: `ssh-copy-id d"),
        ("slow", "no answer within 8 s"),
        ("bare", f"{sys.executable} fails there: "),
        ("moved", "there is no directory "),
        ("old", f"Python is 3.9.1 there, and {version} here"),
        ("odd", "the command failed: "),
    ):
        assert text in checks[name].text, checks[name]


@pytest.mark.parametrize(("host", "code"), [("a", 0), ("denied", 1)])
def test_command_with_hosts(ssh, monkeypatch, capsys, host, code):
    monkeypatch.setenv("TF_DGC_NATIVE", "0")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(doctor, "report", lambda state: [])
    assert main.main(["doctor", "--hosts", host, "--ssh", ssh]) == code
    output = capsys.readouterr().out
    assert "TF_CONFIG           not set" in output
    assert (f"{host:<19} PROBLEM: " in output) == bool(code)


def test_wrong_ssh_raises(capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["doctor", "--hosts", "a", "--ssh", "no-such-program"])
    assert "there is no program 'no-such-program'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"cluster": {}}'])
def test_malformed_tf_config(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    (check,) = cluster_checks.check_tf_config()
    assert check.is_problem
    assert f"Received: {text}" in check.text


@pytest.mark.parametrize("text", ["", " ", "{}"])
def test_no_cluster(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    (check,) = cluster_checks.check_tf_config()
    assert not check.is_problem


def test_one_worker_needs_no_port(monkeypatch, listener):
    set_cluster(monkeypatch, f"localhost:{listener}")
    (check,) = cluster_checks.check_tf_config()
    assert (check.text, check.is_problem) == ("one process, which trains alone", False)


def test_cluster(monkeypatch, free_port, listener):
    addresses = [f"127.0.0.1:{port}" for port in (free_port, listener, 1)]
    set_cluster(monkeypatch, *addresses)
    head, *checks = cluster_checks.check_tf_config()
    assert (head.name, head.text) == ("TF_CONFIG", "3 tasks; this is worker 0")
    assert [(c.name, c.text, c.is_problem) for c in checks] == [
        ("  worker 0", f"{addresses[0]}, this task: its port is free", False),
        ("  worker 1", f"{addresses[1]} answers", False),
        (
            "  worker 2",
            f"{addresses[2]} does not answer, or has not started yet",
            False,
        ),
    ]


def test_own_port_is_in_use(monkeypatch, free_port, listener, capsys):
    set_cluster(monkeypatch, f"127.0.0.1:{free_port}", f"127.0.0.1:{listener}", index=1)
    _, _, own = cluster_checks.check_tf_config()
    assert own.is_problem
    assert f"port {listener} cannot be used here: Address already in use" in own.text
    monkeypatch.setenv("TF_DGC_NATIVE", "0")
    monkeypatch.setattr(doctor, "report", lambda state: [])
    assert doctor.main() == 1
    assert "  worker 1          PROBLEM: port " in capsys.readouterr().out


def test_unknown_host(monkeypatch, free_port):
    resolve = socket.getaddrinfo

    def fail(host, *args, **kwargs):
        if host == "typo":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    set_cluster(monkeypatch, f"127.0.0.1:{free_port}", "typo:4000")
    _, _, other = cluster_checks.check_tf_config()
    assert other.is_problem
    assert "typo:4000: the host has no address here (Name or service" in other.text

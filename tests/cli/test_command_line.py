"""The command line loads TensorFlow only when a command needs it."""

import ast
import importlib.util
import json
import operator
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

import tf_dgc
from tf_dgc.cli import main
from tf_dgc.multiworker.launch import launcher

LIMIT = 5.0  # CPU seconds; 0.1 is usual, and loading TensorFlow takes more
ENTRY = "import sys; from tf_dgc.cli.main import main; sys.exit(main())"
HEAVY = ("tensorflow", "keras", "numpy")


@pytest.fixture
def command(tmp_path):
    """The script that pip writes for the entry point."""
    script = tmp_path / "tf-dgc"
    script.write_text(ENTRY.replace("; ", "\n"))
    return [str(script)]


def run(arguments, tmp_path):
    """Run Python; return its exit code, its output and the modules that it imported."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        env=environment | {"PYTHONPATH": os.path.dirname(tf_dgc.__path__[0])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", result.stderr, re.M))
    errors = re.sub(r"^import time:.*\n", "", result.stderr, flags=re.M)
    return result.returncode, result.stdout + errors, imported


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, "doctor"),
        (["--version"], 0, f"tf_dgc {tf_dgc.__version__}"),
        (["run", "--help"], 0, "--max-restarts"),
        (["run", "--workers", "2", "script.py"], 0, "hello"),
        (["methods"], 0, "power_sgd"),
        (["collectives"], 0, "gtopk"),
    ],
)
def test_answers_without_tensorflow(command, tmp_path, module, arguments, code, text):
    (tmp_path / "script.py").write_text("print('hello')")
    before = os.times()
    program = ["-m", "tf_dgc"] if module else command
    exit_code, output, imported = run([*program, *arguments], tmp_path)
    after = os.times()
    assert exit_code == code, output
    assert text in output
    assert "argparse" in imported
    assert imported.isdisjoint(HEAVY)
    seconds = sum(after[2:4]) - sum(before[2:4])  # of finished children
    assert seconds < LIMIT


@pytest.mark.parametrize("code", [0, 1])
def test_report_without_tensorflow(command, tmp_path, code):
    epoch = {"epoch": 0, "logs": {"loss": 1.0}, "steps": 1}
    run_record = {
        "format": 1,
        "model": "m",
        "workers": 1,
        "versions": {},
        "methods": {},
        "variables": [],
        "epochs": [epoch],
    }
    (tmp_path / "run.json").write_text("{" if code else json.dumps(run_record))
    exit_code, output, imported = run([*command, "report", "run.json"], tmp_path)
    assert exit_code == code, output
    assert ("A record must be a file" if code else "report.html: run, ") in output
    assert imported.isdisjoint({"tensorflow", "keras"})


LOG = "0000 00:00:1795899164.881442   10353 port.cc:153] "
FAKE = f"""import os
level = os.environ["TF_CPP_MIN_LOG_LEVEL"]
os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called\\n")
os.write(2, b"I{LOG}oneDNN\\nTo enable the following instructions: AVX2\\n")
os.write(2, b"a warning of Python\\nE{LOG}failed call to cuInit\\n")
os.write(2, b"F{LOG}built for other processors\\n") if END != "raise" else None
os.abort() if END == "abort" else None
raise ImportError(f"no AVX, level {{level}}")
"""


@pytest.mark.parametrize(
    ("end", "level", "code", "errors"),
    [
        ("raise", None, 1, "a warning of Python\ntf-dgc: no AVX, level 3\n"),
        ("abort", None, -6, f"a warning of Python\nF{LOG}built for other processors\n"),
        ("raise", "0", 1, None),
    ],
)
@pytest.mark.parametrize("name", ["doctor", "methods --size 16"])
def test_commands_hide_the_log_of_tensorflow(
    command, tmp_path, monkeypatch, name, end, level, code, errors
):
    """They show fatal messages, and everything if the user sets a log level."""
    for module in ("keras", "tensorflow"):
        (tmp_path / f"{module}.py").write_text(f"END = {end!r}\n{FAKE}")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if level:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    path = os.pathsep.join([str(tmp_path), os.path.dirname(tf_dgc.__path__[0])])
    result = subprocess.run(
        [sys.executable, *command, *name.split()],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == code
    if errors is None:
        assert f"I{LOG}oneDNN" in result.stderr
        assert f"no AVX, level {level}" in result.stderr
    else:
        assert result.stderr == errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["doctor", "collectives --workers 3", "methods --size 16"]
)
def test_commands_write_nothing_to_stderr(command, tmp_path, monkeypatch, name):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    environments = launcher.worker_environments(launcher.free_ports(2))
    monkeypatch.setenv("TF_CONFIG", environments[0]["TF_CONFIG"])
    result = subprocess.run(
        [sys.executable, *command, *name.split()],
        env={**os.environ, "PYTHONPATH": os.path.dirname(tf_dgc.__path__[0])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0
    assert result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    "arguments", [["script.py", "--workers", "2"], ["script.py", "-v", "--workers=2"]]
)
def test_options_after_the_script_raise(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["run", *arguments])
    errors = capsys.readouterr().err
    assert "come before the script" in errors
    assert "tf-dgc run --workers N script.py" in errors


def test_missing_number_of_workers_raises(capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["run", "script.py", "--rate", "1"])
    assert "number of workers is missing: tf-dgc run --w" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "must be a port, from 1 to 65535; received: 70000"),
        (["--port", "0"], "must be a port"),
        (
            ["--port", "65530", "--max-restarts", "3"],
            "with --max-restarts 3 ports up to 65537 are needed, and 65535 is the last",
        ),
    ],
)
def test_wrong_ports_raise(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["run", "--hosts", "a,me@b,b", *arguments, "-m", "train"])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "orig_argv", "expected"),
    [
        (["/usr/bin/tf-dgc", "run"], ["python", "/usr/bin/tf-dgc", "run"], True),
        (["-m", "run"], ["python", "-X", "dev", "-m", "tf_dgc", "run"], True),
        (["-m"], ["python", "-mtf_dgc"], True),
        (["-m", "tf_dgc"], ["python", "-m", "pytest", "tf_dgc"], False),
        (["-m", "-m", "tf_dgc"], ["python", "-m", "theirs", "-m", "tf_dgc"], False),
        (["tf-dgc.py"], ["python", "tf-dgc.py"], False),
        (["-c"], ["python", "-c", "import tf_dgc"], False),
        ([], ["python"], False),
    ],
)
def test_command_line_is_recognized(monkeypatch, argv, orig_argv, expected):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert tf_dgc._is_command_line() == expected


def test_command_line_loads_names_on_demand(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tf-dgc"])
    spec = importlib.util.spec_from_file_location("lazy", tf_dgc.__file__)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    assert vars(lazy).keys().isdisjoint(tf_dgc.__all__)
    for name in [*tf_dgc.__all__, "__version__"]:
        assert getattr(lazy, name) == getattr(tf_dgc, name)


def test_dir_lists_public_names_only():
    assert set(dir(tf_dgc)) == {*tf_dgc.__all__, "__doc__", "__version__"}
    assert all(hasattr(tf_dgc, name) for name in dir(tf_dgc))
    methods = {type(m()).__name__ for m in tf_dgc.compressors.METHODS.values()}
    listed = set(dir(tf_dgc.compressors))
    assert listed > methods | {"METHODS", "Compressor", "Aggregation", "base", "get"}
    values = [getattr(tf_dgc.compressors, name) for name in listed]
    modules = [v for v in values if isinstance(v, types.ModuleType)]
    assert modules == [tf_dgc.compressors.base]
    with pytest.raises(AttributeError, match="no attribute 'DGC'"):
        tf_dgc.DGC  # noqa: B018


def docstrings(tree):
    """Return the nodes of a module's docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = [n.body[0] for n in ast.walk(tree) if isinstance(n, owners) and n.body]
    return {node.value for node in first if isinstance(node, ast.Expr)}


def test_messages_cite_no_file_that_is_not_installed():
    package = pathlib.Path(tf_dgc.__file__).parent
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        for text in texts - docstrings(tree):
            assert not re.search(r"docs/|README|\.md\b", text.value), text.value


@pytest.mark.parametrize(
    "command", ["run", "serve", "doctor", "methods", "collectives", "advise", "report"]
)
def test_names_in_help_exist(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        main.main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in re.findall(r"help\(tf_dgc\.([\w.]+)\)", text):
        assert operator.attrgetter(name)(tf_dgc).__doc__
    for name in re.findall(r"`tf-dgc ([a-z]\w*)", text):
        assert name in ("run", "methods")

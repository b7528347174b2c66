"""The command line answers before TensorFlow is loaded; `import tf_dgc` loads all."""

import importlib.util
import os
import re
import subprocess
import sys
import types

import pytest

import tf_dgc
from tf_dgc.cli import main

LIMIT = 5.0  # CPU seconds, of 0.1; loading TensorFlow takes more
ENTRY = "import sys; from tf_dgc.cli.main import main; sys.exit(main())"
HEAVY = ("tensorflow", "keras", "numpy")


@pytest.fixture
def command(tmp_path):
    """The script that pip writes for the entry point."""
    script = tmp_path / "tf-dgc"
    script.write_text(ENTRY.replace("; ", "\n"))
    return [str(script)]


def run(arguments, tmp_path):
    """Run Python; return what it printed, and the modules that it imported."""
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
    said = re.sub(r"^import time:.*\n", "", result.stderr, flags=re.M)
    return result.returncode, result.stdout + said, imported


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "doctor"),
        (["--version"], 0, f"tf_dgc {tf_dgc.__version__}"),
        (["run", "--workers", "2", "script.py"], 0, "hello"),
    ],
)
def test_it_answers_without_tensorflow(
    command, tmp_path, module, arguments, code, says
):
    (tmp_path / "script.py").write_text("print('hello')")
    before = os.times()
    program = ["-m", "tf_dgc"] if module else command
    found, printed, imported = run([*program, *arguments], tmp_path)
    after = os.times()
    assert found == code, printed
    assert says in printed
    assert "argparse" in imported
    assert imported.isdisjoint(HEAVY)
    seconds = sum(after[2:4]) - sum(before[2:4])  # of children that ended
    assert seconds < LIMIT


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
    ("end", "level", "code", "said"),
    [
        ("raise", None, 1, "a warning of Python\ntf-dgc: no AVX, level 3\n"),
        ("abort", None, -6, f"a warning of Python\nF{LOG}built for other processors\n"),
        ("raise", "0", 1, None),
    ],
)
@pytest.mark.parametrize("name", ["doctor", "methods"])
def test_commands_show_no_log_of_tensorflow(
    command, tmp_path, monkeypatch, name, end, level, code, said
):
    """But what ends them, and all of it to those who set its level."""
    for module in ("keras", "tensorflow"):
        (tmp_path / f"{module}.py").write_text(f"END = {end!r}\n{FAKE}")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if level:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    path = os.pathsep.join([str(tmp_path), os.path.dirname(tf_dgc.__path__[0])])
    found = subprocess.run(
        [sys.executable, *command, name],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == code
    if said is None:
        assert f"I{LOG}oneDNN" in found.stderr
        assert f"no AVX, level {level}" in found.stderr
    else:
        assert found.stderr == said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["doctor", "collectives", "methods"])
def test_commands_print_nothing_else(command, tmp_path, monkeypatch, name):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    found = subprocess.run(
        [sys.executable, *command, name],
        env={**os.environ, "PYTHONPATH": os.path.dirname(tf_dgc.__path__[0])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert found.returncode == 0
    assert found.stdout
    assert found.stderr == ""


@pytest.mark.parametrize(
    "arguments", [["script.py", "--workers", "2"], ["script.py", "-v", "--workers=2"]]
)
def test_options_behind_the_script(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["run", *arguments])
    printed = capsys.readouterr().err
    assert "come before the script" in printed
    assert "tf-dgc run --workers N script.py" in printed


def test_no_number_of_workers(capsys):
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
def test_ports_that_there_are_not(arguments, message, capsys):
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
def test_when_it_is_the_command_line(monkeypatch, argv, orig_argv, expected):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert tf_dgc._is_command_line() == expected


def test_the_command_line_loads_what_it_asks_for(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tf-dgc"])
    spec = importlib.util.spec_from_file_location("lazy", tf_dgc.__file__)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    assert vars(lazy).keys().isdisjoint(tf_dgc.__all__)
    for name in [*tf_dgc.__all__, "__version__"]:
        assert getattr(lazy, name) == getattr(tf_dgc, name)


def test_only_what_is_public_is_listed():
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

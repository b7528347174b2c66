"""Progress bars of the benchmarks, on standard error if it is a terminal."""

import os
import pathlib
import pty
import re
import subprocess
import sys

import pytest
from common import progress

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import sys
from common import progress, reporting

items = []
for name in progress.track(("qsgd", "top_k", "[dgc]"), "methods", str):
    items += [(name, step) for step in progress.track(range(2), "steps")]
    print("between", name, file=sys.stderr)
print(items)
"""
FAILING = """
from common import progress, reporting

def measure():
    for name in progress.track(["qsgd", "top_k"], "methods", str):
        if name == "top_k":
            raise OSError("it ended")

try:
    measure()
finally:
    reporting.report([{"a": 1}], [("a", "A", "d")], "title", origin={})
"""
ITEMS = [(name, step) for name in ("qsgd", "top_k", "[dgc]") for step in range(2)]


def command(program):
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "80"}
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        environment.pop(name, None)
    return [sys.executable, "-W", "error", "-c", program], environment


def run_on_a_terminal(program):
    """Run a program whose standard error is a terminal; return both outputs."""
    controller, terminal = pty.openpty()
    words, environment = command(program)
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=terminal, text=True
    ) as process:
        os.close(terminal)
        screen = b""
        try:
            while data := os.read(controller, 4096):
                screen += data
        except OSError:  # on Linux: the program has closed the terminal
            pass
        os.close(controller)
        return process.stdout.read(), screen.decode()


def without_codes(screen):
    """Return the text without control codes of a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)


def test_line_for_each_name_without_a_terminal():
    words, environment = command(PROGRAM)
    finished = subprocess.run(
        words, env=environment, capture_output=True, text=True, check=True
    )
    assert finished.stdout == f"{ITEMS}\n"
    assert finished.stderr.splitlines() == [
        "methods: qsgd (1 of 3)",
        "between qsgd",
        "methods: top_k (2 of 3)",
        "between top_k",
        "methods: [dgc] (3 of 3)",
        "between [dgc]",
    ]


def test_bar_for_each_loop_on_a_terminal():
    output, screen = run_on_a_terminal(PROGRAM)
    assert output == f"{ITEMS}\n"
    text = without_codes(screen)
    for count, name in (("0/3", "qsgd"), ("1/3", "top_k"), ("2/3", "[dgc]")):
        assert re.search(rf"methods\W+ {count} .*{re.escape(name)}", text)
    assert re.search(r"steps\W+ 0/2", text)
    assert re.search(r"1/3 0:00:0\d left top_k", text)
    assert "between top_k\r\n" in text  # above the bars
    assert "(1 of 3)" not in text
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")  # shows the cursor


def test_bars_of_a_failed_loop_are_removed():
    """They disappear before the table, which is printed nevertheless."""
    output, screen = run_on_a_terminal(FAILING)
    assert "title" in output
    last = screen.rindex("methods")
    assert "\x1b[2K" in screen[last : screen.index("Traceback")]
    assert "it ended" in screen


@pytest.mark.parametrize(
    ("items", "expected"), [([], []), (iter([1, 2]), [1, 2]), ({"a": 1}, ["a"])]
)
def test_items_without_names_print_nothing(items, expected, capsys):
    assert list(progress.track(items, "things")) == expected
    assert capsys.readouterr() == ("", "")

"""Bars of the benchmarks: on standard error, and on a terminal alone."""

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

found = []
for name in progress.track(("qsgd", "top_k", "[dgc]"), "methods", str):
    found += [(name, step) for step in progress.track(range(2), "steps")]
    print("between", name, file=sys.stderr)
print(found)
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


def on_a_terminal(program):
    """Run a program whose standard error is a terminal; return both outputs."""
    controller, terminal = pty.openpty()
    asked, environment = command(program)
    with subprocess.Popen(
        asked, env=environment, stdout=subprocess.PIPE, stderr=terminal, text=True
    ) as process:
        os.close(terminal)
        shown = b""
        try:
            while some := os.read(controller, 4096):
                shown += some
        except OSError:  # Linux says so that nobody has the terminal open any more
            pass
        os.close(controller)
        return process.stdout.read(), shown.decode()


def plain(shown):
    """Return the text without the codes of colours and of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def test_without_a_terminal_there_is_a_line_for_each_name():
    asked, environment = command(PROGRAM)
    finished = subprocess.run(
        asked, env=environment, capture_output=True, text=True, check=True
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


def test_on_a_terminal_there_is_a_bar_for_each_loop():
    output, shown = on_a_terminal(PROGRAM)
    assert output == f"{ITEMS}\n"
    text = plain(shown)
    for count, name in (("0/3", "qsgd"), ("1/3", "top_k"), ("2/3", "[dgc]")):
        assert re.search(rf"methods\W+ {count} .*{re.escape(name)}", text)
    assert re.search(r"steps\W+ 0/2", text)
    assert re.search(r"1/3 0:00:0\d left top_k", text)
    assert "between top_k\r\n" in text  # above the bars
    assert "(1 of 3)" not in text
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def test_bars_of_a_loop_that_failed_are_taken_away():
    """Before the table that is shown nevertheless."""
    output, shown = on_a_terminal(FAILING)
    assert "title" in output
    last = shown.rindex("methods")
    assert "\x1b[2K" in shown[last : shown.index("Traceback")]
    assert "it ended" in shown


@pytest.mark.parametrize(
    ("items", "yielded"), [([], []), (iter([1, 2]), [1, 2]), ({"a": 1}, ["a"])]
)
def test_items_without_names_say_nothing(items, yielded, capsys):
    assert list(progress.track(items, "things")) == yielded
    assert capsys.readouterr() == ("", "")

"""Separation of TensorFlow's C++ log from a program's output."""

import re
import time

import pytest

from tf_dgc.multiworker.launch.output import (
    LogSeparator,
    WorkerOutput,
    final_terminal_state,
    open_log,
)

HEAD = "0000 00:00:1795338385.646852    7450 coordination_service.cc:221] "
OLDER = "2026-11-22 09:15:00.123456: W tensorflow/core/util/port.cc:113] oneDNN\n"


def separate(*texts):
    separator = LogSeparator()
    records = [record for text in texts for record in separator.feed(text)]
    records += separator.close()
    program = "".join(record.text for record in records if record.severity is None)
    return program, [(p.severity, p.text) for p in records if p.severity]


@pytest.mark.parametrize(
    ("text", "program", "severities"),
    [
        ("a\nb", "a\nb", ""),
        (f"a\nI{HEAD}x\nb\n", "a\nb\n", "I"),
        (f"1/2 I{HEAD}x\nE{HEAD}y\n\r2/2", "1/2 \r2/2", "IE"),
        (f"{OLDER}a\n", "a\n", "W"),
        ("WARNING: All log messages before absl::InitializeLog() is\na\n", "a\n", "I"),
        (f"I{HEAD}x\n/job:worker/replica:0/task:1\na\n", "a\n", "II"),
        (f"E{HEAD}x\nRPC: /tensorflow.CoordinationService/B\n", "", "EE"),
        ("RPC: /tensorflow.A\n", "RPC: /tensorflow.A\n", ""),  # of a traceback
        (f"F{HEAD}unfinished", "", "F"),
        ("I1122 09:15:00.123456 140 train.py:15] step\n", None, ""),  # absl's, Python
    ],
)
def test_separate(text, program, severities):
    seen, log = separate(text)
    assert seen == (text if program is None else program)
    assert "".join(severity for severity, _ in log) == severities


def test_a_record_may_be_split_anywhere_after_its_head():
    text = f"bar W{HEAD}a long line\ndone\n"
    head = re.search(r"\] ", text).end()
    for cut in range(head, len(text)):
        program, log = separate(text[:cut], text[cut:])
        assert program == "bar done\n"
        assert log == [("W", f"W{HEAD}a long line")]


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        (["1/3\b\b\b\r2/", "3\b\b\b\r", "3/3\nend"], ["3/3", "end"]),
        (["50%\r", "100%\r", "\n"], ["100%"]),
        (["a\r\nb\r", "\nc"], ["a", "b", "c"]),
        (["x" * 70000, "y\n"], ["x" * 70000, "y"]),
        ([b"\xe2\x94", b"\x81\n"], ["\u2501"]),
    ],
)
def test_lines_are_shown_when_they_are_finished(tmp_path, chunks, lines):
    shown_lines = []
    output = WorkerOutput(open_log(tmp_path, "worker 0", 1), shown_lines.append)
    for chunk in chunks:
        output.feed(chunk if isinstance(chunk, bytes) else chunk.encode())
    output.close()
    assert shown_lines == lines
    assert (tmp_path / "worker-0.log").read_text().splitlines() == lines


def test_a_line_that_is_redrawn_for_long_is_shown_periodically(tmp_path, monkeypatch):
    seconds, lines = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    output = WorkerOutput(open_log(tmp_path, "worker 0", 1), lines.append)
    for i in range(70):
        seconds[0] = i
        output.feed(f"{i}/70\r".encode())
        output.show_progress()
    output.feed(b"70/70\n? ")
    seconds[0] += 100
    output.show_progress()
    output.close()
    assert lines == ["31/70", "62/70", "70/70", "?"]


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("plain", "plain"),
        ("1/2\b\b\b\r2/2", "2/2"),
        ("50%\r100%\r", "100%"),
        ("\r", ""),
        ("dos\r", "dos"),
    ],
)
def test_final_state(line, seen):
    assert final_terminal_state(line) == seen


TRACEBACK = "Traceback (most recent call last):\n  File 'x.py', line 1\n    go()\n"
MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (f"a\n{TRACEBACK}KeyboardInterrupt\nb\n", "a\nb\n"),
        (f"{TRACEBACK}ValueError: no\n{MEANWHILE}{TRACEBACK}KeyboardInterrupt\n", ""),
        (f"{TRACEBACK}ValueError: no\nand so\nb\n", None),
        (f"{TRACEBACK}KeyboardInterrupt\n{MEANWHILE}{TRACEBACK}OSError: full\n", None),
        (f"{TRACEBACK}KeyboardInterrupt\n\n{TRACEBACK}OSError: full\nb\n", None),
        (f"Exception ignored in: <x>\n{TRACEBACK}KeyboardInterrupt:\nb\n", "b\n"),
        (f"Error in sys.excepthook:\n{TRACEBACK}KeyboardInterrupt\n\n"
         f"Original exception was:\n{TRACEBACK}a.b.OtherError: no\n", None),
        (f"{TRACEBACK}ValueError: no\n{MEANWHILE}{TRACEBACK}", ""),  # and was killed
        ("a\n\n  b\nKeyboardInterrupt\n", None),
    ],
)  # fmt: skip
def test_tracebacks_of_interrupts_are_left_out(tmp_path, printed, expected):
    """From the interrupt of the workers on; the log has them."""
    lines = []
    output = WorkerOutput(open_log(tmp_path, "worker 0", 1), lines.append)
    output.leave_out_interrupts(lines.append)
    output.feed(printed.encode())
    output.close()
    assert lines == (printed if expected is None else expected).splitlines()
    assert (tmp_path / "worker-0.log").read_text() == printed


GRAPH_ERROR = (
    "a.b.InvalidArgumentError: Graph execution error:\n\nDetected at node x (most "
    "recent call last):\n  File 'x.py', line 1, in go\n\n  File 'y.py', line 2\n\n"
    "Incompatible shapes: [2]\nvs. [3]\n\t [[{{node x}}]] [Op:__inference_step_1]\nb\n"
)
WHILE_TRACING = (
    "ValueError: in user code:\n\n    File 'x.py', line 1, in go  *\n        f()\n\n"
    "    TypeError: no such thing\nb\n"
)
LISTED = "ValueError: The workers differ. Differences:\n  a: 1\n  b: 2\nlater\n"


@pytest.mark.parametrize(
    ("printed", "code", "error"),
    [
        (f"a\n{TRACEBACK}a.b.ValueError: no\nb\n", 1, "a.b.ValueError: no"),
        (GRAPH_ERROR, 1, "a.b.InvalidArgumentError: Incompatible shapes: [2] vs. [3]"),
        (WHILE_TRACING, 1, "TypeError: no such thing"),
        ("usage: x.py\nx.py: error: no such flag\n", 2, "x.py: error: no such flag"),
        (
            "FATAL Flags parsing error: no 'x'\nPass --helpshort\n",
            1,
            "FATAL Flags parsing error: no 'x'",
        ),
        (LISTED, 1, "ValueError: The workers differ. Differences: a: 1; b: 2"),
        ("ValueError: :\n", 1, "ValueError: :"),
        (f"{GRAPH_ERROR}KeyError: 'x'\n", 1, "KeyError: 'x'"),
        ("a\nthe disk is full\n\n", 1, "the disk is full"),
        ("a\nstep 3\n", 7, ""),
        ("", 1, ""),
    ],
)
def test_the_error_that_ended_a_program(tmp_path, printed, code, error):
    output = WorkerOutput(open_log(tmp_path, "worker 0", 1))
    output.feed(printed.encode())
    output.close()
    assert output.last_error(code) == error


def test_usual_messages_of_tensorflow_are_not_shown_as_errors(tmp_path):
    head = "E0000 00:00:1795899164.881442   10353 cuda_platform.cc:52] "
    abort = head.replace("cuda_platform.cc:52", "base_collective_executor.cc:252")
    ring = head.replace("cuda_platform.cc:52", "ring_alg.cc:296")
    text = f"{head}failed call to cuInit: 303\n{abort}StartAbort tf_dgc: no\n"
    text += f"RPC: /tensorflow.WorkerService/RecvBuf\n{head}out of memory\n"
    text += f"/job:worker/task:1\n{ring}Aborting RingReduce\n"
    output = WorkerOutput(open_log(tmp_path, "worker 0", 1))
    output.feed(text.encode())
    output.close()
    assert output.unseen() == [f"{head}out of memory", "/job:worker/task:1"]
    assert (tmp_path / "worker-0.log").read_text() == text

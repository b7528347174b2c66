"""Answers of workers to the benchmark that started them, as lines of JSON."""

import json
import os
import sys
import time


def take_standard_output():
    """Return standard output, and redirect all other output to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def reply(replies, **values):
    """Write one answer."""
    replies.write(json.dumps(values) + "\n")
    replies.flush()


def answer(replies, time_steps, break_down):
    """Answer each line of standard input, until its end.

    Args:
        replies: file to write answers to.
        time_steps: function of a number of steps that returns their times in ms.
        break_down: function of a number of steps that returns the times of their parts.
    """
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "steps":
            cpu = time.process_time()
            times = time_steps(request["count"])
            reply(replies, times=times, cpu=1000 * (time.process_time() - cpu))
        else:
            reply(replies, **break_down(request["count"]))

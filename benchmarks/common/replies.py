"""How workers answer the benchmark that started them: a line of JSON each time."""

import json
import os
import sys
import time


def take_standard_output():
    """Return standard output; what others print goes to standard error instead."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def reply(replies, **values):
    """Write one line."""
    replies.write(json.dumps(values) + "\n")
    replies.flush()


def answer(replies, take_steps, take_apart):
    """Do what each line of standard input asks for, to its end.

    Args:
        replies: file that replies go to.
        take_steps: function of a number of steps that returns their times in ms.
        take_apart: function of the same number that returns what is told of parts.
    """
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "steps":
            cpu = time.process_time()
            times = take_steps(request["count"])
            reply(replies, times=times, cpu=1000 * (time.process_time() - cpu))
        else:
            reply(replies, **take_apart(request["count"]))

"""Between exchanges no packet leaves a worker, counted by the kernel."""

import json
import pathlib
import sys

import numpy as np
import programs
import pytest

SCRIPT = pathlib.Path(__file__).with_name("packet_worker.py")


@pytest.mark.slow
@pytest.mark.workers
def test_packets_of_each_step(tmp_path):
    """Under stock `fit`, of two processes that have a loopback to themselves.

    Heartbeats go on, some a second, and most steps take milliseconds: so nearly all
    have none of them.
    """
    alone = programs.on_its_own_loopback()
    if alone is None:
        pytest.skip("needs a network namespace")
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers=2", SCRIPT, tmp_path]
    finished = programs.run([*alone, *command])
    assert finished.returncode == 0
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        print(found)
        found = {name: np.array(some) for name, some in found.items()}
        for name in ("local", "data_set", "scaled"):
            check(found[name], found["period"], found["rounds"])
        assert np.min(found["each"]) > 2


def check(local, period, rounds):
    """Of one training by local steps."""
    ends = (np.arange(len(local)) + 2) % period == 0  # the first step is not counted
    assert np.count_nonzero(ends) == rounds
    # What ends an exchange may arrive in the step behind it.
    behind = np.roll(ends, 1)
    behind[0] = False
    between = local[~ends & ~behind]
    assert np.all(local[ends] > 2)
    assert np.median(between) == 0
    assert np.mean(between == 0) > 0.6

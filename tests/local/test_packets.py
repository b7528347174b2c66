"""Between exchanges no packet leaves a worker but heartbeats, counted by the kernel."""

import collections
import json
import pathlib
import sys

import numpy as np
import packet_capture
import programs
import pytest

from tf_dgc.multiworker import workers

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


@pytest.mark.slow
@pytest.mark.workers
def test_every_packet_of_a_thousand_steps_has_its_cause(tmp_path):
    """Two workers, stock `fit`, four rounds in two epochs.

    Steps send nothing. A round and an epoch have a number of packets each. All others
    come with the time that passes, and not with steps: heartbeats, and where a worker
    is, for the watch.
    """
    alone = programs.on_its_own_loopback()
    if alone is None:
        pytest.skip("needs a network namespace")
    file = tmp_path / "packets"
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers=2", SCRIPT, tmp_path]
    recorder = [*alone, sys.executable, packet_capture.__file__, file]
    assert programs.run([*recorder, *command, "many"]).returncode == 0
    ends = [json.loads((tmp_path / f"{r}.json").read_text())["ends"] for r in range(2)]
    begin, end = max(e[0] for e in ends), max(e[-1] for e in ends)
    steps, seconds = len(ends[0]) - 1, end - begin
    packets = [p for p in packet_capture.read(file) if begin <= p.time <= end]
    of_call = collections.Counter(p.call for p in packets)
    requests = collections.Counter(p.call for p in packets if p.what == "request")
    rounds, epochs = 4, 1  # the second epoch ends after its last step
    print(f"{steps} steps in {seconds:.1f} s: {of_call}, of these {requests}")

    assert steps == 999
    # Whatever is exchanged goes from one worker to the other, in one of these calls.
    exchanged = of_call.pop("RecvBuf") + of_call.pop("CompleteInstance", 0)
    assert exchanged <= 20 * rounds + 120 * epochs
    # So many heartbeats, one for each half of the time after which one is missed.
    interval = workers.heartbeat_timeout_seconds() / 2
    assert 0 < requests["Heartbeat"] <= 2 * (seconds / interval + 1)
    # Positions, where a look finds a worker in a collective; else every 20 s.
    positions = rounds + epochs + seconds / (workers.timeout_seconds() / 2) + 1
    assert requests["InsertKeyValue"] <= 2 * positions
    assert requests["DeleteKeyValue"] <= 2 * positions
    # Each worker asks once whether one wants to stop, and once where the other is.
    assert requests["GetKeyValue"] <= 2 * 2
    # With what acknowledges them and measures the connection.
    assert sum(of_call.values()) <= 12 * (1 + sum(requests[call] for call in of_call))
    if seconds < 40:  # the most that heartbeats may take, as steps do not
        assert len(packets) / steps < 0.3

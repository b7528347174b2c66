"""No packets but heartbeats between synchronizations, counted by the kernel."""

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
    """Two processes under stock `fit`, with a loopback interface of their own.

    Most steps take milliseconds, so nearly all of them see no heartbeat.
    """
    namespace = programs.loopback_prefix()
    if namespace is None:
        pytest.skip("needs a network namespace")
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers=2", SCRIPT, tmp_path]
    finished = programs.run([*namespace, *command])
    assert finished.returncode == 0
    for rank in range(2):
        packets = json.loads((tmp_path / f"{rank}.json").read_text())
        print(packets)
        packets = {name: np.array(counts) for name, counts in packets.items()}
        for name in ("local", "data_set", "scaled"):
            check_packets(packets[name], packets["period"], packets["rounds"])
        assert np.min(packets["each"]) > 2


def check_packets(packets, period, rounds):
    """Check the packets of each step in a training with local steps."""
    ends = (np.arange(len(packets)) + 2) % period == 0  # the first step is not counted
    assert np.count_nonzero(ends) == rounds
    # The last packets of a synchronization may arrive in the next step.
    after = np.roll(ends, 1)
    after[0] = False
    between = packets[~ends & ~after]
    assert np.all(packets[ends] > 2)
    assert np.median(between) == 0
    assert np.mean(between == 0) > 0.6


@pytest.mark.slow
@pytest.mark.workers
def test_every_packet_of_a_thousand_steps_is_explained(tmp_path):
    """Two workers, stock `fit`, four rounds in two epochs.

    Steps send nothing. A round and an epoch have a number of packets each. All others
    depend on time, not on steps: heartbeats, and positions for the watch.
    """
    namespace = programs.loopback_prefix()
    if namespace is None:
        pytest.skip("needs a network namespace")
    file = tmp_path / "packets"
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers=2", SCRIPT, tmp_path]
    recorder = [*namespace, sys.executable, packet_capture.__file__, file]
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
    # All exchanged data travels between the workers in one of these calls.
    num_exchanged = of_call.pop("RecvBuf") + of_call.pop("CompleteInstance", 0)
    assert num_exchanged <= 20 * rounds + 120 * epochs
    # One heartbeat per half of the heartbeat timeout.
    interval = workers.heartbeat_timeout_seconds() / 2
    assert 0 < requests["Heartbeat"] <= 2 * (seconds / interval + 1)
    # Positions, when the watch finds a worker in a collective, or every 20 s.
    positions = rounds + epochs + seconds / (workers.timeout_seconds() / 2) + 1
    assert requests["InsertKeyValue"] <= 2 * positions
    assert requests["DeleteKeyValue"] <= 2 * positions
    # Each worker reads once whether one stops, and once the other's position.
    assert requests["GetKeyValue"] <= 2 * 2
    # Including acknowledgements and measurements of the connection.
    assert sum(of_call.values()) <= 12 * (1 + sum(requests[call] for call in of_call))
    if seconds < 40:  # longer runs have more heartbeats per step
        assert len(packets) / steps < 0.3

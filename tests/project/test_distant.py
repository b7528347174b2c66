"""`benchmarks/distant.py`: delays of its links, and its figures."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import programs
import pytest
from common import distance, distant_runs, network
from workers import relay

DISTANT = pathlib.Path(__file__).parents[2] / "benchmarks" / "distant.py"
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/net/tun"),
    reason="namespaces and TAP devices need root",
)


def frame(to, source, number=0):
    return bytes(10) + bytes([to] * 6) + bytes([source] * 6) + bytes([number])


def test_relay_delays_frames_in_order():
    switch = relay.Switch([7, 8])
    switch.delay = 0.1
    frames = [frame(2, 1, number) for number in range(3)]
    for number, data in enumerate(frames):
        switch.take(7, data, 0.05 * number)
    assert switch.wait(0.0) == pytest.approx(0.1)
    assert list(switch.due(0.099)) == []
    assert list(switch.due(0.16)) == [(8, frames[0]), (8, frames[1])]
    assert switch.wait(0.16) == pytest.approx(0.04)
    switch.delay = 0.0  # later frames do not overtake earlier ones
    switch.take(7, frames[0], 0.17)
    assert list(switch.due(0.18)) == []
    assert list(switch.due(0.2)) == [(8, frames[2]), (8, frames[0])]
    assert switch.wait(0.2) is None


def test_relay_learns_the_ports_of_addresses():
    switch = relay.Switch([7, 8, 9])
    first, reply, second = frame(2, 1), frame(1, 2), frame(2, 1)
    switch.take(7, first, 0.0)
    assert list(switch.due(0.0)) == [(8, first), (9, first)]
    switch.take(9, reply, 0.0)
    switch.take(7, second, 0.0)
    assert list(switch.due(0.0)) == [(7, reply), (9, second)]
    switch.take(7, frame(1, 3), 0.0)  # both addresses are at one port
    assert list(switch.due(0.0)) == []


@needs_root
@pytest.mark.slow
def test_link_has_its_rate_and_delay():
    with distance.connect(3) as net:
        ping_before = net.ping()
        net.place("10mbit", 60)
        first, second = net.measure(), net.measure()
        net.gather()
        assert net.ping() < 0.03
    assert ping_before < 0.03
    assert first is second
    assert 60 <= first["ping_ms"] < 90
    assert 7 < first["mbit"] < 10.5
    assert_no_namespaces()
    assert net.relay.poll() == 0


def assert_no_namespaces():
    result = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
    assert f"dgc{os.getpid()}" not in result.stdout


@needs_root
@pytest.mark.slow
def test_relay_that_died_raises_and_leaves_no_namespaces():
    error = pytest.raises(network.NetworkError, match="relay between the links ended")
    with error, distance.connect(2) as net:
        net.relay.kill()
        net.relay.wait()
        net.place("10mbit", 60)
    assert_no_namespaces()


@needs_root
@pytest.mark.slow
def test_relay_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(distance, "_PATIENCE", 0.1)
    with distance.connect(2) as net:
        net.relay.send_signal(signal.SIGSTOP)
    assert net.relay.returncode == -signal.SIGKILL
    assert_no_namespaces()


def row(mode, period, step_ms, alone_ms):
    return {
        "mode": mode,
        "period": period,
        "rate": "10mbit",
        "delay_ms": 20.0,
        "step_ms": step_ms,
        "alone_ms": alone_ms,
        "workers": 4,
        "parameters": 3,
    }


def test_comparisons_of_rows():
    rows = [row("none", 1, 11.0, 10.0), row("dgc", 1, 40.0, None)]
    rows += [row("sparse_loco", 4, 15.0, 12.0)]
    none, dgc, local = distant_runs.add_comparisons(rows)
    assert none["of_none"] == 1.1
    assert "computing" not in none
    assert (dgc["computing"], dgc["exchange_ms"], dgc["of_none"]) == (0.25, 30, 4)
    assert dgc["steps_per_second"] == 25
    assert (local["computing"], local["exchange_ms"]) == (0.8, 12)
    timed = {**row("sparse_loco", 4, 15.0, 12.0), "exchanging_ms": 20.0}
    # Slow steps between two exchanges do not count as exchange time.
    assert distant_runs.add_comparisons([timed])[0]["exchange_ms"] == 8


@needs_root
@pytest.mark.exhaustive
@pytest.mark.workers
def test_distant(tmp_path):
    """Local steps exchange in one step of four, while they compute."""
    path = tmp_path / "rows.jsonl"
    flags = ["--model=tiny", "--modes=none,sparse_loco", "--period=4", "--seconds=1"]
    flags += ["--rates=100mbit", "--delays=40", "--step_seconds=0.05"]
    command = [sys.executable, DISTANT, *flags, f"--json={path}"]
    finished = programs.run(command)
    assert finished.returncode == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["mode"] for r in rows] == ["none", "sparse_loco"]
    none, local = rows
    assert none["step_ms"] > 49
    assert local["step_ms"] > none["alone_ms"] + 10  # a round trip in four steps
    assert local["left_out"] == 0
    assert 0 < local["sent"] < local["bytes_per_exchange"]
    assert all(r["ping_ms"] >= 40 for r in rows)
    assert "a step slept to 0.05 s" in finished.stdout
    finished = programs.run(command)  # measured rows are not measured again
    assert finished.returncode == 0
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="is about users other than root")
def test_distance_needs_root():
    with pytest.raises(PermissionError, match="which needs root"):
        distance.connect(2)

"""Worker and server processes that the launcher starts, under stock `fit`."""

import json
import pathlib
import re
import sys

import programs
import pytest

SCRIPT = pathlib.Path(__file__).with_name("server_worker.py")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1"}
STEPS = 24


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_launcher_starts_servers_and_fit_trains(tmp_path, servers):
    command = [sys.executable, "-m", "tf_dgc", "run", "--servers", str(servers)]
    command += ["--workers", "2", "--log-dir", tmp_path, SCRIPT, tmp_path, "sync"]
    finished = programs.run(command, merged=True, **ENVIRONMENT)
    logs = [(tmp_path / f"server-{i}.log").read_text() for i in range(servers)]
    assert finished.returncode == 0, logs
    one, other = (json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2))
    assert one["clock"] == other["clock"] == STEPS
    assert one["weights"] == other["weights"]
    assert one["clocks"] == other["clocks"] == list(range(2, STEPS + 1, 2))
    assert one["val_loss"][-1] < one["val_loss"][0]
    assert one["ratio"] > 5
    words = [int(re.search(r"(\d+) words of weights", log)[1]) for log in logs]
    assert words == ([41 * 64 + 65] if servers == 1 else [40 * 64, 64 + 65])
    for log in logs:
        assert re.findall(r"worker (\d) joins", log) in (["0", "1"], ["1", "0"])
        assert log.count("has left (24 pushes applied)") == 2
        assert "24 updates; at most 0 steps ahead" in log
        assert "learning rate 0.025" in log
        assert "Traceback" not in log

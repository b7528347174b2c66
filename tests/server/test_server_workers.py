"""Real workers and a server, under stock `fit`, by the launcher."""

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
def test_the_launcher_starts_a_server_and_fit_trains_with_it(tmp_path):
    command = [sys.executable, "-m", "tf_dgc", "run", "--servers", "1", "--workers"]
    command += ["2", "--log-dir", tmp_path, SCRIPT, tmp_path, "sync"]
    finished = programs.run(command, merged=True, **ENVIRONMENT)
    log = (tmp_path / "server-0.log").read_text()
    assert finished.returncode == 0, log
    one, other = (json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2))
    assert one["clock"] == other["clock"] == STEPS
    assert one["weights"] == other["weights"]
    assert one["clocks"] == other["clocks"] == list(range(2, STEPS + 1, 2))
    assert one["val_loss"][-1] < one["val_loss"][0]
    assert one["ratio"] > 5
    assert re.findall(r"worker (\d) joins", log) in (["0", "1"], ["1", "0"])
    assert log.count("has left (24 pushes applied)") == 2
    assert "24 updates; at most 0 steps ahead" in log
    assert "learning rate 0.025" in log
    assert "Traceback" not in log

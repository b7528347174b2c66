"""`tf-dgc run --max-restarts`: a killed worker does not change how training ends."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.workers]
SCRIPT = pathlib.Path(__file__).with_name("restart_worker.py")


def run(directory, how, kill):
    """Train on two workers; return what the launcher printed."""
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers", "2"]
    command += [
        "--output",
        "all",
        "--max-restarts",
        "2",
        str(SCRIPT),
        str(directory),
        str(how),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "RESTART_KILL": kill}
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
    return finished.stdout


@pytest.mark.parametrize("how", [0.0, 0.9, "local"])
def test_killed_in_mid_run(tmp_path, record, how):
    (tmp_path / "undisturbed").mkdir()
    undisturbed = run(tmp_path / "undisturbed", how, kill="0")
    killed = run(tmp_path / "killed", how, kill="1")
    assert "worker 1 failed with exit code 137" in killed
    assert "attempt 2 of 3: starting all 2 workers again" in killed
    # The second attempt goes on with the epoch in which the worker was killed.
    assert re.findall(r"\[0\] epoch (\d)", killed) == list("012234")
    what = "local steps, within a round" if how == "local" else f"sparsity {how:g}"
    rows = [(0, "started again, resumed at epoch 3 of 5", None, None)]
    record(f"worker 1 killed in epoch 3 of 5, {what}", rows)
    digests = [set(re.findall(r"digest (\w+)", o)) for o in (undisturbed, killed)]
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]

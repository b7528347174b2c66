"""`tf-dgc run --max-restarts`: a killed worker does not change the result."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.workers]
NAMES = {"local": "local steps, within a round", "adamw": "AdamW, sparsity 0.9"}
SCRIPT = pathlib.Path(__file__).with_name("restart_worker.py")


def run(directory, how, kill, workers=2, restarts=2, code=0):
    """Train; return the launcher's output."""
    command = [sys.executable, "-m", "tf_dgc", "run", f"--workers={workers}"]
    command += ["--output=all", f"--max-restarts={restarts}"]
    command += [str(SCRIPT), str(directory), str(how)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "RESTART_KILL": kill}
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280
    )
    assert finished.returncode == code, finished.stdout[-3000:]
    return finished.stdout


@pytest.mark.parametrize("how", [0.0, 0.9, "adamw", "local"])
def test_killed_in_mid_run(tmp_path, record, how):
    (tmp_path / "uninterrupted").mkdir()
    uninterrupted = run(tmp_path / "uninterrupted", how, kill="0")
    killed = run(tmp_path / "killed", how, kill="1")
    assert "worker 1 failed with exit code 137" in killed
    assert "attempt 2 of 3: starting all 2 workers again" in killed
    # The second attempt resumes with the epoch in which the worker was killed.
    assert re.findall(r"\[0\] epoch (\d)", killed) == list("012234")
    description = NAMES.get(how) or f"sparsity {how:g}"
    rows = [(0, "started again, resumed at epoch 3 of 5", None, None)]
    record(f"worker 1 killed in epoch 3 of 5, {description}", rows)
    digests = [set(re.findall(r"digest (\w+)", o)) for o in (uninterrupted, killed)]
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]


def test_fewer_workers_resume_the_state_of_an_adam(tmp_path, record):
    """One of three is killed; two resume with the residuals and moments."""
    killed = run(tmp_path, "adamw", "1", workers=3, restarts=0, code=137)
    assert "digest" not in killed
    fewer = run(tmp_path, "adamw", "0")
    again = re.findall(r"\[0\] epoch (\d)", killed + fewer)
    assert again == list("012234")
    rows = [(0, "two workers went on at epoch 3 of 5", None, None)]
    record("worker 1 of three killed in epoch 3 of 5, AdamW", rows)
    digests = re.findall(r"digest (\w+)", fewer)
    assert len(digests) == 2
    assert len(set(digests)) == 1

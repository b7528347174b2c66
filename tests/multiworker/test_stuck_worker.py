"""A worker that is stuck outside of all collectives does not outlive the others."""

import pathlib
import signal

import pytest

SCRIPT = pathlib.Path(__file__).with_name("stuck_worker.py")


@pytest.mark.workers
@pytest.mark.slow
@pytest.mark.parametrize("how", ["locked", "asleep"])
def test_the_watchdog_ends_it(starter, tmp_path, how):
    """Also if it holds Python's lock, so that no thread of its process can run."""
    finished = starter.run([SCRIPT, how], 2, tmp_path, TF_DGC_TIMEOUT="10")
    waiting, stuck = finished.outputs
    assert "which responds but does not come" in waiting
    assert finished.codes[0] not in (0, None)
    assert finished.codes[1] == -signal.SIGKILL
    assert "stuck" in stuck
    assert "has made no progress for" in stuck
    assert "in on_train_batch_end" in stuck  # its stack
    one, other = ((tmp_path / f"{rank}.log").stat().st_mtime for rank in range(2))
    assert other - one < 60.0

"""One fault in the default run; the others are `pytest -m faults`."""

import signal

import pytest
from processes import Cluster, Ended, on_loopback

pytestmark = [pytest.mark.workers, pytest.mark.slow]
LIMIT = 100  # s; with the default limits it takes two


def test_a_killed_worker_is_named(tmp_path):
    """Without anybody waiting for it."""
    with Cluster("none", tmp_path, on_loopback(2), TF_DGC_TIMEOUT="1000") as cluster:
        cluster.wait_for_steps()
        ended = Ended(cluster, [0], cluster.signal(1, signal.SIGKILL), LIMIT)
        assert "worker 1 (127.0.0.1:" in ended.texts[0]
        assert ended.seconds < LIMIT

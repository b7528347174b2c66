"""One fault that runs without `-m faults`."""

import signal

import pytest
from processes import Cluster, Survivors, local_environments

pytestmark = [pytest.mark.workers, pytest.mark.slow]
LIMIT = 100  # s; with the default limits it takes two


def test_a_killed_worker_is_named(tmp_path):
    """Even if no worker waits for it."""
    with Cluster(
        "none", tmp_path, local_environments(2), TF_DGC_TIMEOUT="1000"
    ) as cluster:
        cluster.wait_for_steps()
        survivors = Survivors(cluster, [0], cluster.signal(1, signal.SIGKILL), LIMIT)
        assert "worker 1 (127.0.0.1:" in survivors.texts[0]
        assert survivors.seconds < LIMIT

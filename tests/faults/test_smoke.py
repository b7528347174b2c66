"""One fault in the default run; the others are `pytest -m faults`."""

import signal

import pytest
from processes import Cluster, Ended, on_loopback
from test_faults import LIMIT, QUICK

pytestmark = pytest.mark.workers


def test_a_killed_worker_is_named(tmp_path):
    with Cluster("none", tmp_path, on_loopback(2), **QUICK) as cluster:
        cluster.wait_for_steps()
        ended = Ended(cluster, [0], cluster.signal(1, signal.SIGKILL), LIMIT)
        assert "worker 1 (127.0.0.1:" in ended.texts[0]
        assert ended.seconds < LIMIT

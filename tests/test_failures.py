"""What workers say of each other's failures."""

import socket
import threading
import time
import types

import pytest
import tensorflow as tf

from tf_dgc import coordination, failures, startup, workers
from tf_dgc.watch import Watch

SPEC = tf.train.ClusterSpec({"worker": ["a:1", "b:2", "c:3"]})
STRATEGY = types.SimpleNamespace(
    cluster_resolver=types.SimpleNamespace(
        task_type="worker", task_id=1, cluster_spec=lambda: SPEC
    )
)


@pytest.fixture(autouse=True)
def _not_told(monkeypatch):
    monkeypatch.setattr(failures, "told", threading.Event())


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (
            "Collective ops is aborted by: Error reported from /job:worker/task:2: The "
            "following tasks are unhealthy (stopped sending heartbeats):\n"
            "/job:worker/replica:0/task:2\nThe tasks have crashed.",
            "worker 2 (c:3) does not respond",
        ),
        (
            "Collective ops is aborted by: Collective ops is aborted by: Error "
            "reported from /job:worker/task:2: The following tasks are unhealthy "
            "(stopped sending heartbeats):\n/job:worker/replica:0/task:2\n"
            "Additional GRPC error information from remote target "
            "/job:worker/replica:0/task:0 while calling "
            "/tensorflow.WorkerService/CompleteGroup:\n",
            "worker 2 (c:3) does not respond",
        ),
        (
            "Collective ops is aborted by: Deadline Exceeded\n\n"
            "RPC: /tensorflow.CoordinationService/Heartbeat",
            "worker 0 (a:1), which coordinates all, cannot be reached",
        ),
        (
            "Collective ops is aborted by: recvmsg:Connection reset by peer\n"
            "Additional GRPC error information from remote target "
            "/job:worker/replica:0/task:0 while calling "
            "/tensorflow.WorkerService/RecvBuf:",
            "the connection to worker 0 (a:1) broke",
        ),
        (  # what worker 0 heard of worker 2, and passed on
            "Collective ops is aborted by: Collective ops is aborted by: "
            "recvmsg:Connection reset by peer\nAdditional GRPC error information from "
            "remote target /job:worker/replica:0/task:2 while calling "
            "/tensorflow.WorkerService/RecvBuf:\nThe error could be from a previous "
            "operation.\nAdditional GRPC error information from remote target "
            "/job:worker/replica:0/task:0 while calling "
            "/tensorflow.WorkerService/RecvBuf:",
            "the connection to worker 2 (c:3) broke",
        ),
        (
            "Collective ops is aborted by: Error reported from /job:worker/task:0: "
            "tf_dgc: worker 0 (a:1) ended with ValueError: no\n"
            "The error could be from a previous operation.",
            "worker 0 (a:1) ended with ValueError: no",
        ),
        ("Barrier failed because: task is set to ERROR: UNAVAILABLE: Task "
         "/job:worker/replica:0/task:2 heartbeat timeout.",
         "worker 2 (c:3) does not respond"),
    ],
)  # fmt: skip
def test_errors_about_other_workers(message, named):
    assert failures.explain(STRATEGY, message).startswith(named)


@pytest.mark.parametrize(
    "message",
    [
        "Incompatible shapes: [2] vs. [3]\n\t [[{{node add}}]]",
        "input 0 of /job:worker/replica:0/task:1/device:CPU:0 is empty",
        "Barrier timed out. Id: tf_dgc/3::0.\nRPC: /tensorflow.CoordinationService/Bar",
        "no kernel on /job:worker/replica:0/task:2/device:CPU:0",
    ],
)
def test_errors_that_are_about_no_other_worker(message):
    assert failures.explain(STRATEGY, message) is None


def position(started, finished=0, tracing=False):
    return {
        "started": started,
        "finished": finished,
        "tracing": tracing,
        "place": "f.py:3",
    }


@pytest.mark.parametrize(
    ("others", "waited", "said"),
    [
        ([position(9), position(8)], 5, None),
        ([position(9), position(8)], 11, "for worker 2 (c:3) (at f.py:3), which respo"),
        ([position(9), position(8, tracing=True)], 11, None),
        ([position(9), position(8, tracing=True)], 31, "for worker 2 (c:3)"),
        ([position(9), None], 11, "for worker 2 (c:3), of which nothing"),
        ([position(9), position(9)], 11, "for data from worker 0 (a:1) and worker 2"),
    ],
)
def test_who_is_waited_for(monkeypatch, others, waited, said):
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    monkeypatch.setenv(workers.TRACING_TIMEOUT_VARIABLE, "30")
    watch = Watch(STRATEGY, lambda: [9, 8])
    published = dict(zip(["worker 0", "worker 2"], others, strict=True))
    monkeypatch.setattr(watch, "_lookup", published.get)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert watch._blame(position(9, 8)) is None
    now += waited
    reason = watch._blame(position(9, 8))
    assert (said in reason) if said else (reason is None)


def test_time_of_tracing_does_not_count(monkeypatch):
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    watch = Watch(STRATEGY, lambda: [9, 8])
    start = time.monotonic()
    for later, tracing, blamed in [(0, True, False), (20, True, False),
                                   (21, False, False), (31, False, True)]:  # fmt: skip
        monkeypatch.setattr(time, "monotonic", lambda later=later: start + later)
        there = position(8, tracing=tracing)
        monkeypatch.setattr(watch, "_lookup", lambda peer, there=there: there)
        assert (watch._blame(position(9, 8)) is not None) == blamed


def test_a_worker_that_waits_for_nobody_blames_nobody(monkeypatch):
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    watch = Watch(STRATEGY, lambda: [9, 9])
    now = time.monotonic()
    for later in (0, 100):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        assert watch._blame(position(9, 9)) is None


def free_addresses(number):
    from tf_dgc import launcher

    ports = launcher._free_ports(number)
    return {f"worker {i}": f"127.0.0.1:{port}" for i, port in enumerate(ports)}


def test_all_workers_meet():
    addresses = free_addresses(3)
    with startup.ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(startup.meet, addresses, n, 20.0) for n in addresses]
        assert [call.result() for call in calls] == [None] * 3


def test_only_those_who_are_missing_are_named():
    addresses = free_addresses(3)
    with startup.ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(startup.meet, addresses, name, 2.0)
            for name in ("worker 0", "worker 2")
        ]
        for call in calls:
            with pytest.raises(
                RuntimeError, match=r"for worker 1 \(\S*\) to start, in"
            ):
                call.result()


def test_no_answer_from_the_worker_that_coordinates(monkeypatch):
    """What waits for it is left behind, and the error is one that names it."""
    answer = threading.Event()
    monkeypatch.setattr(coordination, "_call", lambda *_: answer.wait(20))
    start = time.monotonic()
    with pytest.raises(tf.errors.DeadlineExceededError) as caught:
        coordination.report_error("it failed", 0.1)
    answer.set()
    assert time.monotonic() - start < 10
    what = failures.explain(STRATEGY, caught.value.message)
    assert what.startswith("worker 0 (a:1), which coordinates all, cannot be reached")


def test_who_speaks():
    """A server of TensorFlow does; a stopped process only lets others connect."""
    server = tf.distribute.Server.create_local_server()
    assert startup._speaks(server.target.removeprefix("grpc://"))
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        gone = f"127.0.0.1:{stopped.getsockname()[1]}"
        assert not startup._speaks(gone)
    assert not startup._speaks(gone)

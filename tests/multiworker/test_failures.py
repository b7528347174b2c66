"""Errors of workers about each other's failures."""

import dataclasses
import gc
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import h5py
import keras
import pytest
import tensorflow as tf

from tf_dgc._internals import tf_collectives
from tf_dgc.multiworker import consensus, coordination, failures, rendezvous, workers
from tf_dgc.multiworker.launch import launcher
from tf_dgc.multiworker.positions import Collective, Position
from tf_dgc.multiworker.watch import Watch

SPEC = tf.train.ClusterSpec({"worker": ["a:1", "b:2", "c:3"]})
STRATEGY = types.SimpleNamespace(
    cluster_resolver=types.SimpleNamespace(
        task_type="worker", task_id=1, cluster_spec=lambda: SPEC
    )
)


NOT_CONNECTED = "Agent must be in CONNECTED state. It is currently in ERROR."
GONE = "failed to connect to all addresses\n... /tensorflow.CoordinationService/Barrier"
ABORT_MESSAGE = (
    "Collective ops is aborted by: tf_dgc: worker 0 (a:1) ended with ValueError: no"
)


@pytest.fixture(autouse=True)
def _nothing_reported(monkeypatch):
    monkeypatch.setattr(failures, "reported", threading.Event())


@pytest.fixture(autouse=True)
def notes(monkeypatch):
    """Return the dictionary that stands for the published keys of all workers."""
    published = {}

    def lookup(key, seconds):
        if key not in published:
            raise tf.errors.DeadlineExceededError(None, None, "nobody published it")
        return published[key]

    monkeypatch.setattr(coordination, "lookup", lookup)
    return published


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
        (  # worker 0 passes on an error about worker 2
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
        (
            "tf_dgc: worker 2 (c:3) ended with ValueError: no [type.googleapis.com/"
            "tensorflow.CoordinationServiceError='x']. Barrier Id: tf_dgc/43::0",
            "worker 2 (c:3) ended with ValueError: no",
        ),
        ("Barrier failed because: task is set to ERROR: UNAVAILABLE: Task "
         "/job:worker/replica:0/task:2 heartbeat timeout.",
         "worker 2 (c:3) does not respond"),
    ],
)  # fmt: skip
def test_errors_about_other_workers(message, named):
    reason = failures.explain_error(STRATEGY, message)
    assert reason.startswith(named)
    assert "googleapis" not in reason


@pytest.mark.parametrize(
    "message",
    [
        "Error reported from /job:worker/task:2: The following tasks are unhealthy "
        "(stopped sending heartbeats):\n/job:worker/replica:0/task:2",
        "recvmsg:Connection reset by peer\nAdditional GRPC error information from "
        "remote target /job:worker/replica:0/task:2 while calling "
        "/tensorflow.WorkerService/RecvBuf:",
    ],
)
def test_a_worker_that_published_its_end_has_ended(monkeypatch, notes, message):
    """Its program ended, as by `sys.exit`: it was neither killed nor cut off."""
    leaving = types.SimpleNamespace(
        cluster_resolver=types.SimpleNamespace(task_type="worker", task_id=2)
    )
    monkeypatch.setattr(coordination, "publish_at_exit", notes.__setitem__)
    failures.reported.set()
    failures.note_end(leaving)  # the others know already
    assert "has ended" not in failures.explain_error(STRATEGY, message)
    failures.reported.clear()
    failures.note_end(leaving)
    reason = failures.explain_error(STRATEGY, message)
    assert reason.startswith("worker 2 (c:3) has ended: its program was over")


@pytest.mark.parametrize(
    ("message", "first", "named"),
    [
        (NOT_CONNECTED, ABORT_MESSAGE, "worker 0 (a:1) ended with ValueError: no"),
        (GONE, ABORT_MESSAGE, "worker 0 (a:1) ended with ValueError: no"),
        (GONE, "", "worker 0 (a:1), which coordinates all, cannot be reached"),
        (GONE, "timed out", "worker 0 (a:1), which coordinates all, cannot be reached"),
        (NOT_CONNECTED, "", None),
        ("Barrier timed out. Id: tf_dgc/3::0.", ABORT_MESSAGE, None),
    ],
)
def test_the_first_reason_is_reported(monkeypatch, message, first, named):
    """Later errors of TensorFlow describe this worker's current operation."""
    hook = types.SimpleNamespace(abort_message=lambda seconds: first)
    monkeypatch.setattr(tf_collectives, "get_cross_device_ops", lambda strategy: hook)
    reason = failures.find_reason(STRATEGY, message)
    assert (reason or "").startswith(named or "")
    assert (reason is None) == (named is None)


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
    assert failures.explain_error(STRATEGY, message) is None


def position(started, finished=None, tracing=False, **groups):
    """Return a position; `_0_2=(3, 2)` are the counts of workers 0 and 2's group."""
    counts = {None: (started, started if finished is None else finished)}
    for group, pair in groups.items():
        counts[tuple(int(index) for index in group[1:].split("_"))] = pair
    return Position(counts, tracing, "f.py:3")


@pytest.mark.parametrize(
    ("others", "waited", "expected"),
    [
        ([position(9), position(8)], 5, None),
        ([position(9), position(8)], 11, "for worker 2 (c:3) (at f.py:3), which respo"),
        ([position(9), position(8, tracing=True)], 11, None),
        ([position(9), position(8, tracing=True)], 31, "for worker 2 (c:3)"),
        ([position(9), None], 11, "for worker 2 (c:3), which has sent nothing"),
        # All wait for the network: TCP's next attempt takes twice as long.
        ([position(9, 8), position(9, 8)], 19, None),
        ([position(9, 8), position(9, 8)], 21, "for data from worker 0 (a:1) and wor"),
        ([position(10, 9), position(8, 7)], 19, None),
    ],
)
def test_reason_names_the_worker_that_is_waited_for(
    monkeypatch, others, waited, expected
):
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    monkeypatch.setenv(workers.TRACING_TIMEOUT_VARIABLE, "30")
    watch = Watch(STRATEGY, lambda: {None: [9, 8]})
    published = dict(zip(["worker 0", "worker 2"], others, strict=True))
    monkeypatch.setattr(watch, "_lookup", published.get)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert watch._reason_to_give_up(position(9, 8)) is None
    now += waited
    reason = watch._reason_to_give_up(position(9, 8))
    assert (expected in reason) if expected else (reason is None)


@pytest.mark.parametrize(
    ("own_position", "others", "waited", "expected"),
    [
        # Worker 1 waits in a group with worker 2; worker 0 is not part of it.
        ((3, 2), [position(0), position(9, _1_2=(3, 2))], 19, None),
        ((3, 2), [None, position(9, _1_2=(3, 2))], 19, None),
        ((3, 2), [None, None], 11, "for worker 2 (c:3), which has sent nothing"),
        (
            (3, 2),
            [position(9, _0_1=(9, 9)), position(9)],
            11,
            "3 of workers 1, 2 for",
        ),
        # The worker that is behind waits for another one, and names that one.
        ((3, 2), [position(9), position(9, _0_2=(5, 4), _1_2=(2, 2))], 19, None),
        ((3, 2), [None, position(9, 8)], 19, None),
        ((3, 2), [position(9), position(9, _1_2=(3, 2))], 21, "for data from worker 2"),
        ((3, 3), [None, position(9)], 100, None),
    ],
)
def test_reason_names_the_worker_that_a_group_waits_for(
    monkeypatch, own_position, others, waited, expected
):
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    watch = Watch(STRATEGY, dict)
    published = dict(zip(["worker 0", "worker 2"], others, strict=True))
    monkeypatch.setattr(watch, "_lookup", published.get)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert watch._reason_to_give_up(position(9, _1_2=own_position)) is None
    now += waited
    reason = watch._reason_to_give_up(position(9, _1_2=own_position))
    assert (expected in reason) if expected else (reason is None)


def test_position_survives_json():
    for value in (
        position(9),
        position(9, 8, True, _0_2=(3, 2), _1_2=(4, 4)),
        pending(position(9, 8, _0_2=(3, 2)), {None: 7, (0, 2): 8}),
    ):
        assert Position.from_json(value.to_json()) == value


def pending(position, keys, line=""):
    """Return a position with the keys of the pending collectives."""
    collectives = {group: Collective(key, f"sum {key}") for group, key in keys.items()}
    return dataclasses.replace(position, line=line, collectives=collectives)


@pytest.mark.parametrize(
    ("own_position", "others", "waited", "places"),
    [
        # The 9th collectives of the workers differ.
        (
            pending(position(9, 8), {None: 1}, "predict(x)"),
            [pending(position(9, 8), {None: 1}), pending(position(9, 8), {None: 2})],
            5,
            ["1 (b:2) at f.py:3: predict(x) [sum 1]", "2 (c:3) at f.py:3 [sum 2]"],
        ),
        (
            pending(position(9, 8), {None: 1}),
            [None, pending(position(9, 8), {None: 2})],
            5,
            ["1 (b:2) at f.py:3 [sum 1]", "2 (c:3) at f.py:3 [sum 2]"],
        ),
        (
            pending(position(9, _1_2=(3, 2)), {(1, 2): 1}),
            [position(9), pending(position(9, _1_2=(3, 2)), {(1, 2): 2})],
            5,
            ["1 (b:2) at f.py:3 [sum 1]", "2 (c:3) at f.py:3 [sum 2]"],
        ),
        # The other one's collective is not yet known, or it is not that far.
        (
            pending(position(9, 8), {None: 1}),
            [position(9, 8), position(9, 8)],
            19,
            None,
        ),
        (
            pending(position(9, 8), {None: 1}),
            [pending(position(n, n - 1), {None: 2}) for n in (10, 8)],
            19,
            None,
        ),
        (position(9, 8), [pending(position(9, 8), {None: 2})] * 2, 19, None),
        # Each waits in a group that the other one does not join.
        (
            position(9, 8, _1_2=(3, 3)),
            [position(9, 8), position(8, _1_2=(4, 3))],
            19,
            None,
        ),
        (
            position(9, 8, _1_2=(3, 3)),
            [position(9, 8), position(8, _1_2=(4, 3))],
            21,
            ["1 (b:2) at f.py:3 [collective 9]", "2 (c:3) at f.py:3 [collective 4 of"],
        ),
    ],
)
def test_workers_in_different_collectives(
    monkeypatch, own_position, others, waited, places
):
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    watch = Watch(STRATEGY, lambda: {None: [9, 8]})
    watch._contacted = {"worker 0", "worker 2"}
    published = dict(zip(["worker 0", "worker 2"], others, strict=True))
    monkeypatch.setattr(watch, "_lookup", published.get)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert watch._reason_to_give_up(own_position) is None
    now += waited
    reason = watch._reason_to_give_up(own_position)
    if places is None:
        assert reason is None
        return
    assert "\n" not in reason  # otherwise TensorFlow's log splits it into lines
    head, *lines = failures.error_text(STRATEGY, reason).splitlines()
    assert head.startswith("tf_dgc: worker 1 (b:2) cannot go on: the workers are in di")
    for place, line in zip(places, lines, strict=False):
        assert line.startswith(f"  worker {place}")
    assert len(lines) == len(places) + 1
    assert lines[-1] == failures.ALL_ALIKE


def test_a_worker_that_waits_in_the_background_is_not_blamed(monkeypatch):
    """Another thread of it may join the collective; the reason names the network."""
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    watch = Watch(STRATEGY, lambda: {None: [9, 8]})
    own_position = dataclasses.replace(
        position(9, 8), counts={None: (9, 8), (-1, 1, 2): (3, 3)}
    )
    other = dataclasses.replace(own_position, counts={None: (8, 8), (-1, 1, 2): (4, 3)})
    monkeypatch.setattr(watch, "_lookup", lambda peer: other)
    now = time.monotonic()
    for elapsed, expected in [(0, None), (19, None), (21, "the network is too slow")]:
        monkeypatch.setattr(time, "monotonic", lambda elapsed=elapsed: now + elapsed)
        reason = watch._reason_to_give_up(own_position)
        assert (expected in reason) if expected else (reason is None)


def test_progress_of_any_worker_counts(monkeypatch):
    """While one worker waits, the others may exchange chunks with each other."""
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    watch = Watch(STRATEGY, lambda: {None: [9, 8]})
    start = time.monotonic()
    for elapsed in range(0, 60, 5):
        monkeypatch.setattr(time, "monotonic", lambda elapsed=elapsed: start + elapsed)
        other = position(20 + elapsed, 19 + elapsed)
        monkeypatch.setattr(watch, "_lookup", lambda peer, other=other: other)
        assert watch._reason_to_give_up(position(9, 8)) is None
    monkeypatch.setattr(time, "monotonic", lambda: start + 76)
    assert "the network is too slow" in watch._reason_to_give_up(position(9, 8))


def test_one_failed_lookup_does_not_make_a_peer_silent(monkeypatch):
    """A lookup may time out because the network is slow."""
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    watch = Watch(STRATEGY, lambda: {None: [9, 8]})
    start = time.monotonic()
    for elapsed, responds, blamed in [
        (0, True, False),
        (6, True, False),
        (11, False, False),
        (19, False, False),
        (21, False, True),
    ]:
        monkeypatch.setattr(time, "monotonic", lambda elapsed=elapsed: start + elapsed)
        other = position(9, 8) if responds else None
        monkeypatch.setattr(watch, "_lookup", lambda peer, other=other: other)
        assert (watch._reason_to_give_up(position(9, 8)) is not None) == blamed


def test_peers_are_contacted_before_the_network_is_busy(monkeypatch):
    """A peer that has not started does not delay contact with the others."""
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    watch = Watch(STRATEGY, lambda: [9, 8])
    published = {"worker 0": position(9, 8)}
    monkeypatch.setattr(watch, "_lookup", lambda peer: published.get(peer))
    for _ in range(100):
        watch._contact_next_peer()
    assert watch._contacted == {"worker 0"}
    published["worker 2"] = position(9, 8)
    for _ in range(100):
        watch._contact_next_peer()
    assert watch._contacted == {"worker 0", "worker 2"}


def test_time_of_tracing_does_not_count(monkeypatch):
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    watch = Watch(STRATEGY, lambda: {None: [9, 8]})
    start = time.monotonic()
    for elapsed, tracing, blamed in [
        (0, True, False),
        (20, True, False),
        (21, False, False),
        (31, False, True),
    ]:
        monkeypatch.setattr(time, "monotonic", lambda elapsed=elapsed: start + elapsed)
        other = position(8, tracing=tracing)
        monkeypatch.setattr(watch, "_lookup", lambda peer, other=other: other)
        assert (watch._reason_to_give_up(position(9, 8)) is not None) == blamed


def test_a_worker_stuck_while_tracing_is_blamed(monkeypatch):
    """Its last position says that it traces, but its beat no longer changes."""
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    watch = Watch(STRATEGY, lambda: {None: [9, 8]})
    start = time.monotonic()
    for elapsed, beat, blamed in [
        (0, 1, False),
        (6, 1, False),
        (20, 2, False),
        (28, 2, False),
        (31, 2, True),
    ]:
        monkeypatch.setattr(time, "monotonic", lambda elapsed=elapsed: start + elapsed)
        other = dataclasses.replace(position(8, tracing=True), beat=beat)
        monkeypatch.setattr(watch, "_lookup", lambda peer, other=other: other)
        assert (watch._reason_to_give_up(position(9, 8)) is not None) == blamed


def test_a_worker_that_waits_for_nobody_blames_nobody(monkeypatch):
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    watch = Watch(STRATEGY, lambda: {None: [9, 9]})
    now = time.monotonic()
    for elapsed in (0, 100):
        monkeypatch.setattr(time, "monotonic", lambda elapsed=elapsed: now + elapsed)
        assert watch._reason_to_give_up(position(9, 9)) is None


def free_addresses(number):
    ports = launcher.free_ports(number)
    return {f"worker {i}": f"127.0.0.1:{port}" for i, port in enumerate(ports)}


def test_all_workers_meet():
    addresses = free_addresses(3)
    with rendezvous.ThreadPoolExecutor(3) as threads:
        calls = [
            threads.submit(rendezvous.wait_for_all_workers, addresses, n, 20.0)
            for n in addresses
        ]
        assert [call.result() for call in calls] == [None] * 3


def test_only_missing_workers_are_named():
    addresses = free_addresses(3)
    with rendezvous.ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(rendezvous.wait_for_all_workers, addresses, name, 2.0)
            for name in ("worker 0", "worker 2")
        ]
        for call in calls:
            with pytest.raises(
                RuntimeError, match=r"for worker 1 \(\S*\) to start, in"
            ):
                call.result()


def test_an_interrupt_ends_waiting_for_others():
    start = time.monotonic()
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        rendezvous.wait_for_all_workers(free_addresses(2), "worker 0", 30.0)
    timer.join()
    assert time.monotonic() - start < 15


def test_a_port_that_is_busy_at_first_is_waited_for():
    addresses = free_addresses(2)
    port = int(addresses["worker 1"].rpartition(":")[2])
    with rendezvous.ThreadPoolExecutor(2) as threads:
        with rendezvous._server(port):
            calls = [
                threads.submit(rendezvous.wait_for_all_workers, addresses, n, 20)
                for n in addresses
            ]
            time.sleep(0.5)
        assert [call.result() for call in calls] == [None] * 2


def test_a_port_that_stays_busy_is_named():
    addresses = free_addresses(2)
    port = int(addresses["worker 1"].rpartition(":")[2])
    with (
        rendezvous._server(port),
        pytest.raises(RuntimeError, match=rf"0.3 s for port {port}, in vain: another"),
    ):
        rendezvous.wait_for_all_workers(addresses, "worker 1", 0.3)


def test_no_answer_from_the_worker_that_coordinates(monkeypatch):
    """The call is abandoned, and the error names that worker."""
    answer = threading.Event()
    monkeypatch.setattr(coordination, "_call", lambda *_: answer.wait(20))
    start = time.monotonic()
    with pytest.raises(tf.errors.DeadlineExceededError) as caught:
        coordination.report_error("it failed", 0.1)
    answer.set()
    assert time.monotonic() - start < 10
    reason = failures.explain_error(STRATEGY, caught.value.message)
    assert reason.startswith("worker 0 (a:1), which coordinates all, cannot be reached")


def test_only_a_running_server_speaks():
    """A stopped process still accepts connections, but does not answer."""
    server = tf.distribute.Server.create_local_server()
    assert rendezvous._speaks(server.target.removeprefix("grpc://"))
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        gone = f"127.0.0.1:{stopped.getsockname()[1]}"
        assert not rendezvous._speaks(gone)
    assert not rendezvous._speaks(gone)


WAIT_REASON = (
    "worker 2 (c:3) has waited 8 s in collective 24 for worker {}, which responds "
    "but does not come"
)


@pytest.mark.parametrize(
    ("error", "reason", "names_this_worker"),
    [
        (
            f"tf_dgc: {WAIT_REASON.format('1 (b:2)')}",
            WAIT_REASON.format("1 (b:2)"),
            True,
        ),
        (
            f"tf_dgc: {WAIT_REASON.format('0 (a:1)')}",
            WAIT_REASON.format("0 (a:1)"),
            False,
        ),
        (
            f"tf_dgc: {WAIT_REASON.format('0 (a:1)')}".replace("2 (c:3)", "1 (b:2)"),
            "worker 1 (b:2) has waited 8 s in collective 24 for worker 0 (a:1)",
            False,
        ),
        ("tf_dgc: worker 2 (c:3) ended with ValueError: no", "ValueError: no", False),
        ("tf_dgc: the connection to worker 1 (b:2) broke", "1 (b:2) broke", False),
        ("/job:worker/replica:0/task:2 heartbeat timeout", "2 (c:3) does not", False),
    ],
)
def test_a_worker_that_others_waited_for_reports_its_place(
    monkeypatch, error, reason, names_this_worker
):
    """The others' limit may end before its own, on a loaded machine."""

    def fail(name, seconds):
        raise tf.errors.UnavailableError(None, None, error)

    monkeypatch.setattr(consensus, "is_multi_worker", lambda strategy: True)
    monkeypatch.setattr(coordination, "wait_at_barrier", fail)
    monkeypatch.setattr(coordination, "report_error", lambda message, seconds: None)
    with pytest.raises(RuntimeError) as raised:
        consensus.wait_for_workers(STRATEGY, "read `residual`")
    text = str(raised.value)
    assert reason in text
    assert ".." not in text
    # Advice on the program is given only if this worker is at fault.
    assert ("not on the chief alone" in text) == names_this_worker
    assert text.startswith("tf_dgc: worker 1 (b:2) cannot go on") == (
        not names_this_worker
    )
    if names_this_worker:
        assert "waited for the others to read `residual`, and meanwhile work" in text


PEER_ERROR = "tf_dgc: worker 1 (b:2) cannot go on: worker 2 (c:3) failed\n  so it is"
PEER_ERROR_WHILE_TRACING = (
    "in user code:\n\n    File 'x.py', line 3, in step  *\n        apply()\n\n"
    "    RuntimeError: "
) + PEER_ERROR.replace("\n", "\n    ")


@pytest.fixture
def show_end(monkeypatch, capsys):
    """Return a function that raises an error, and returns output and reports."""
    reports = []
    monkeypatch.setattr(failures, "report_to_workers", reports.append)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    failures.show_own_errors_plainly()
    failures.report_uncaught_exceptions(STRATEGY)

    def show(error):
        try:
            raise error
        except BaseException:
            sys.excepthook(*sys.exc_info())
        return capsys.readouterr().err, reports

    return show


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (RuntimeError(PEER_ERROR), f"RuntimeError: {PEER_ERROR}"),
        (RuntimeError(PEER_ERROR_WHILE_TRACING), f"RuntimeError: {PEER_ERROR}"),
        (
            tf.errors.UnavailableError(
                None, None, f"{ABORT_MESSAGE}\n\t [[{{node x}}]]"
            ),
            "RuntimeError: tf_dgc: worker 1 (b:2) cannot go on: worker 0 (a:1) ended "
            f"with ValueError: no. {failures.ADVICE}",
        ),
        (
            tf.errors.InvalidArgumentError(
                None,
                None,
                "Graph execution error:\n\nDetected at node x\n\nassertion failed: "
                '[tf_dgc:] [Use \\"warn\\" in [0, 1)] [3]\n\t [[{{node x}}]] [Op:f]',
            ),
            'RuntimeError: tf_dgc: Use "warn" in [0, 1) 3',
        ),
    ],
)
def test_an_error_of_this_package_is_shown_without_a_traceback(show_end, error, last):
    output, reports = show_end(error)
    where, _, text = output.partition("\n")
    assert re.fullmatch(rf"At {re.escape(__file__)}:\d+ in show: raise error", where)
    assert text == f"{last}\n"
    assert not any("ended with RuntimeError" in reason for reason in reports)


def test_an_assertion_of_a_step_is_reported_to_the_other_workers(show_end):
    message = "assertion failed: [tf_dgc:] [Workers differ. So]\n\t [[{{node x}}]]"
    _, reports = show_end(tf.errors.InvalidArgumentError(None, None, message))
    (reason,) = reports
    assert reason == "worker 1 (b:2) ended with this error: Workers differ. So"
    assert failures.explain_error(STRATEGY, message) is None


@pytest.mark.parametrize(
    "error",
    [
        ValueError(PEER_ERROR),
        RuntimeError("no"),
        tf.errors.InvalidArgumentError(None, None, "Incompatible shapes"),
    ],
)
def test_an_error_of_the_program_is_shown_with_a_traceback(show_end, error):
    output, reports = show_end(error)
    assert output.startswith("Traceback (most recent call last):")
    assert reports[0].startswith(f"worker 1 (b:2) ended with {type(error).__name__}: ")


def test_tracebacks_are_shown_without_traceback_filtering(show_end, monkeypatch):
    monkeypatch.setattr(keras.config, "is_traceback_filtering_enabled", lambda: False)
    output, _ = show_end(RuntimeError(PEER_ERROR))
    assert output.startswith("Traceback (most recent call last):")


def test_an_interrupt_does_not_hide_the_reason(show_end):
    """`tf-dgc run` may interrupt a worker while it looks for the reason of its end."""
    interrupt = KeyboardInterrupt()
    interrupt.__context__ = tf.errors.UnavailableError(None, None, ABORT_MESSAGE)
    output, _ = show_end(interrupt)
    assert "RuntimeError: tf_dgc: worker 1 (b:2) cannot go on: worker 0 (a:1)" in output
    assert "KeyboardInterrupt" not in output
    assert "KeyboardInterrupt" in show_end(KeyboardInterrupt())[0]


def test_two_workers_that_write_one_hdf5_file(monkeypatch, tmp_path, capsys):
    """`model.save_weights` does so before it calls anything of this package."""
    path = str(tmp_path / "m.weights.h5")
    writes = f"import h5py; f = h5py.File({path!r}, 'w'); print(flush=True); input()"
    reports = []
    monkeypatch.setattr(failures, "report_to_workers", reports.append)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    failures.report_uncaught_exceptions(STRATEGY)
    other = subprocess.Popen(
        [sys.executable, "-c", writes], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        other.stdout.readline()
        with pytest.raises(BlockingIOError) as caught:
            h5py.File(path, "w")
    finally:
        other.kill()
        other.communicate()
    sys.excepthook(caught.type, caught.value, None)
    (reason,) = reports
    assert reason.startswith("worker 1 (b:2) ended with BlockingIOError: ")
    for text in (reason, capsys.readouterr().err):
        assert "Save by `tf_dgc.saving.save_weights`" in text
    sys.excepthook(ValueError, ValueError("no"), None)
    assert reports[1] == "worker 1 (b:2) ended with ValueError: no"
    assert "tf_dgc.saving" not in capsys.readouterr().err


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_frames_are_read(collects):
    """In Python 3.11 that could end the process with a segmentation fault."""
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(KeyError), failures.thread_frames() as frames:
            assert not gc.isenabled()
            assert failures.main_thread(frames).f_code.co_filename
            assert threading.get_ident() in frames
            raise KeyError
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_frames_of_threads_are_read_in_one_place():
    package = pathlib.Path(failures.__file__).parents[1]
    files = [
        p.name for p in package.rglob("*.py") if "_current_frames(" in p.read_text()
    ]
    assert files == ["failures.py"]

"""`ServerLoop` with messages and a clock that the test controls."""

import json

import keras
import numpy as np
import pytest
from served_loop import WEIGHTS, Fake, encoded_model_spec, refusal, weights

from tf_dgc.server import messages, model_spec
from tf_dgc.server.messages import REQUEST, Kind, Status


def wait_for(status, fake, seconds, alive, worker=0):
    """Let `worker` poll until the first reply has a status; return the replies."""
    for _ in range(seconds):
        replies = fake.wait(1, alive)
        if replies and replies[0][1]["status"] == status:
            break
        fake.send(worker, Kind.POLL)
    return replies


def test_first_worker_sends_initial_weights_and_others_get_them():
    fake = Fake()
    ((_, head, _),) = fake.send(0, Kind.JOIN, encoded_model_spec(fake))
    assert head["status"] == Status.DONE
    assert fake.join(1) == []  # waits for the weights
    replies = fake.send(0, Kind.INITIALIZE, WEIGHTS.view(np.int32))
    assert [slot for slot, *_ in replies] == [0, 1]
    np.testing.assert_array_equal(weights(replies[1]), WEIGHTS)
    assert weights(*fake.send(0, Kind.START)).tolist() == WEIGHTS.tolist()


def test_asynchronous_pushes_are_applied_as_they_arrive():
    fake = Fake()
    fake.join(0)
    fake.join(1)
    np.testing.assert_array_equal(weights(*fake.push(0, 2.0)), WEIGHTS - 1)
    np.testing.assert_array_equal(weights(*fake.push(0, 2.0)), WEIGHTS - 2)
    (reply,) = fake.push(1, 4.0, step=0)
    np.testing.assert_array_equal(weights(reply), WEIGHTS - 4)
    assert reply[1]["clock"] == 3


def test_repeated_push_is_applied_once():
    fake = Fake()
    fake.join(0)
    first = weights(*fake.push(0, 2.0))
    (again,) = fake.push(0, 2.0, repeat=True)
    np.testing.assert_array_equal(weights(again), first)
    assert fake.clock == 1


def test_synchronous_pushes_are_one_step():
    fake = Fake("sync")
    assert fake.join(0) == []
    assert len(fake.join(1)) == 1
    assert [slot for slot, *_ in fake.sent].count(0) == 3  # worker 0 starts too
    assert fake.push(1, 2.0) == []
    replies = fake.push(0, 4.0)
    assert [slot for slot, *_ in replies] == [0, 1]
    for reply in replies:
        np.testing.assert_array_equal(weights(reply), WEIGHTS - 3)
    assert fake.clock == 1


def test_waiting_worker_gets_wait_and_polls():
    fake = Fake("sync")
    fake.join(0)
    fake.join(1)
    fake.push(0, 2.0)
    alive = [(0, 0), (1, 0)]
    ((slot, head, _),) = fake.wait(1, alive)
    assert (slot, head["status"]) == (0, Status.WAIT)
    assert fake.send(0, Kind.POLL) == []
    assert len(fake.push(1, 2.0)) == 2
    assert fake.clock == 1


def test_bounded_staleness():
    fake = Fake("ssp", 1)
    fake.join(0)
    fake.join(1)
    assert len(fake.push(0, 1.0)) == 1
    assert fake.push(0, 1.0) == []
    assert [slot for slot, *_ in fake.push(1, 1.0)] == [0, 1]
    assert fake.clock == 3
    assert "at most 1 steps ahead" in fake.service.summary()


@pytest.mark.parametrize("mode, staleness", [("sync", None), ("ssp", 0), ("ssp", 1)])
def test_silent_worker_ends_only_a_synchronous_run(mode, staleness):
    fake = Fake(mode, staleness)
    fake.join(0)
    fake.join(1)
    for _ in range((staleness or 0) + 1):
        replies = fake.push(0, 1.0)
    assert replies == []
    answers = []
    for _ in range(12):
        answers += [r for r in fake.wait(1, [(0, 0)]) if r[1]["status"] != Status.WAIT]
        if answers:
            break
        fake.send(0, Kind.POLL)
    assert any("worker 1 has not responded for 10 s" in line for line in fake.lines)
    (reply,) = answers
    if mode == "sync":
        assert "cannot continue: worker 1 has not responded" in refusal(reply)
    else:
        weights(reply)
        assert len(fake.push(0, 1.0)) == 1


def test_lease_does_not_expire_while_the_server_is_busy():
    """It traces its first step while heartbeats lie in its inbox."""
    fake = Fake(number=1)
    fake.join(0)
    apply = fake.service.model.apply
    times = []

    def slow(pushes):
        fake.time += 30
        return apply(pushes)

    def take():
        times.append(fake.time)
        if len(times) == 1:
            return push
        return -1, None

    fake.service.model.apply = slow
    numbers = np.zeros(7, np.int32)
    fields = {
        "number": 4,
        "parts": 1,
        "rate": np.nan,
        "incarnation": 100,
        "kind": Kind.PUSH,
    }
    push = 0, messages.add_frame(REQUEST, numbers, **fields)
    fake.loop._transport = type("Once", (), {"take": take, "answer": fake.answer})
    fake.loop.runs.is_over = lambda now: len(times) == 3
    fake.loop.run()
    assert 0 in fake.service.members
    assert fake.clock == 1


def test_idle_worker_that_responds_is_reported():
    fake = Fake("sync")
    fake.join(0)
    fake.join(1)
    fake.push(0, 1.0)
    replies = wait_for(Status.REFUSED, fake, 45, [(0, 0), (1, 0)])
    assert "waited 40 s" in refusal(replies[0])
    assert "for worker 1, which responds but neither pushes" in refusal(replies[0])


@pytest.mark.parametrize(
    "mode, settings, suggestion",
    [
        ("sync", {}, 'mode that does not wait for such a worker: "async", or "backup"'),
        (
            "ssp",
            {"staleness": 0},
            'such a worker: "async", or "backup" with a `quorum`',
        ),
        ("backup", {"quorum": 3}, 'again, with a `quorum` of at most 2, or in mode "a'),
    ],
)
def test_timeout_error_suggests_a_mode_or_quorum(mode, settings, suggestion):
    """It suggests neither "ssp" nor a quorum that the others cannot meet."""
    fake = Fake(mode, number=3, **settings)
    for worker in range(3):
        fake.join(worker)
    for worker in range(2):
        fake.push(worker, 1.0)
    replies = []
    while not replies or replies[0][1]["status"] != Status.REFUSED:
        replies = fake.wait(1, [(0, 0), (1, 0), (2, 0)])
        for worker in range(2):
            fake.send(worker, Kind.POLL)
    text = refusal(replies[0])
    assert "for worker 2, which responds but neither pushes nor computes" in text
    assert suggestion in text
    assert "`quorum` of at most 2" in text
    assert '"ssp"' not in text
    assert text.endswith("quorum=3, with 3 workers") is (mode == "backup")


@pytest.mark.parametrize("seconds, busy_workers", [(90, [1]), (110, [])])
def test_wait_for_a_busy_worker_is_longer_but_bounded(seconds, busy_workers):
    """The worker may evaluate or trace."""
    fake = Fake("sync")
    fake.join(0)
    fake.join(1)
    fake.push(0, 1.0)
    for i in range(seconds):
        replies = fake.wait(1, [(0, 0), (1, 0)], busy_workers or [1] * (i < 105))
        if replies and replies[0][1]["status"] == Status.REFUSED:
            break
        fake.send(0, Kind.POLL)
    if busy_workers:
        assert len(fake.push(1, 1.0)) == 2
    else:
        assert "waited 40 s" in refusal(replies[0])
        assert 99 <= i <= 101


def test_worker_that_never_joins_is_reported():
    fake = Fake("sync")
    fake.join(0)
    replies = wait_for(Status.REFUSED, fake, 50, [(0, 0)])
    assert "worker 1 did not join within 45 s" in refusal(replies[0])


def test_bounded_staleness_starts_without_a_missing_worker():
    """It may join late."""
    fake = Fake("ssp", 0)
    fake.join(0)
    replies = wait_for(Status.DONE, fake, 50, [(0, 0)])
    weights(replies[0])
    np.testing.assert_array_equal(weights(*fake.push(0, 2.0)), WEIGHTS - 1)
    np.testing.assert_array_equal(weights(*fake.join(1)), WEIGHTS - 1)
    assert fake.push(0, 2.0) == []
    assert len(fake.push(1, 2.0)) == 2


def test_error_of_one_worker_ends_a_synchronous_run():
    fake = Fake("sync")
    fake.join(0)
    fake.join(1)
    fake.push(0, 1.0)
    error = messages.encode_text("ValueError: no")
    goodbye, reply = fake.send(1, Kind.LEAVE, error, number=1)
    assert goodbye[0] == 3
    assert "worker 1 ended with ValueError: no" in refusal(reply)


def test_worker_that_finished_ends_nobody():
    fake = Fake("sync")
    fake.join(0)
    fake.join(1)
    fake.push(0, 2.0)
    _, reply = fake.send(1, Kind.LEAVE, number=1)
    np.testing.assert_array_equal(weights(reply), WEIGHTS - 1)
    fake.send(0, Kind.LEAVE, number=1)
    assert fake.service.is_over(fake.time)


def test_new_process_replaces_the_old_one():
    fake = Fake("ssp", 0)
    fake.join(0)
    fake.join(1)
    fake.push(1, 2.0)
    # The old request is answered first, as its caller may still be there.
    old_reply, join_reply = fake.send(1, Kind.JOIN, encoded_model_spec(fake), process=1)
    assert old_reply[1]["status"] == Status.WAIT
    assert "worker 1 is replaced by another process (0 pushes applied)" in fake.lines
    assert json.loads(messages.decode_text(join_reply[2])) == {
        "give": False,
        "clock": 0,
    }
    assert fake.send(1, Kind.START, process=1) == []  # its push is not yet applied
    replies = fake.push(0, 2.0)
    assert [slot for slot, *_ in replies] == [0, 1]
    np.testing.assert_array_equal(weights(replies[1]), WEIGHTS - 2)
    (reply,) = fake.push(1, 2.0, process=0)
    assert "does not know this process of worker 1" in refusal(reply)
    assert fake.clock == 1


def test_rejoin_when_the_sender_of_initial_weights_is_gone():
    fake = Fake()
    fake.send(0, Kind.JOIN, encoded_model_spec(fake))
    fake.join(1)
    replies = wait_for(Status.REJOIN, fake, 15, [(1, 0)], worker=1)
    assert replies[0][1]["status"] == Status.REJOIN
    weights(fake.join(1)[-1])


@pytest.mark.parametrize(
    "change, text",
    [
        ({"num_workers": 3}, "num_workers is 3, and the server's TF_CONFIG has 2"),
        ({"version": "0.0"}, "version is '0.0', and the server's tf_dgc is "),
        ({"settings": {}}, "settings mode is None, not 'async'"),
        ({"variables": []}, "variables has 0 entries, not 1"),
    ],
)
def test_worker_with_another_model_spec_is_refused(change, text):
    fake = Fake()
    fake.join(0)
    error = fake.join(1, handed={**fake.handed, **change})
    assert text in error
    assert "The server refuses worker 1" in error
    assert len(fake.push(0, 1.0)) == 1


def test_next_worker_may_join_after_the_first_is_refused():
    fake = Fake()
    spec = {**fake.handed, "version": "0.0"}
    assert "version is '0.0', and the server's" in fake.join(0, handed=spec)
    weights(*fake.join(1))


def test_late_worker_may_have_another_learning_rate():
    """Callbacks may have changed it; the rate in effect stays."""
    fake = Fake()
    fake.join(0)
    before = weights(*fake.push(0, 0.0, rate=0.5))
    spec = Fake(rule=keras.optimizers.SGD(0.25)).handed
    fake.join(1, handed=spec)
    np.testing.assert_array_equal(weights(*fake.push(1, 2.0, rate=0.25)), before - 1)


def test_refusal_names_the_shape_or_rate_that_differs():
    fake = Fake()
    fake.send(0, Kind.JOIN, encoded_model_spec(fake))
    spec = Fake(rule=keras.optimizers.SGD(0.25)).handed
    assert "optimizer config learning_rate is 0.25, not 0.5" in fake.join(1, 0, spec)
    spec = json.loads(model_spec.model_spec_text(fake.handed))
    spec["variables"][0]["shape"] = [2, 4]
    error = fake.join(1, 1, spec)
    assert "variables 0 shape 1 is 4, not 3" in error


def test_unknown_optimizer_is_refused():
    fake = Fake()
    spec = json.loads(model_spec.model_spec_text(fake.handed))
    spec["optimizer"]["class_name"] = "Mine"
    spec["optimizer"]["module"] = "my_module"
    (reply,) = fake.send(0, Kind.JOIN, messages.encode_text(json.dumps(spec)))
    assert "cannot create the optimizer" in refusal(reply)
    assert "Received: ('my_module', 'Mine')" in refusal(reply)
    assert len(fake.join(1)) == 1  # another worker can join


def test_initial_weights_of_another_size_are_refused():
    fake = Fake()
    fake.send(0, Kind.JOIN, encoded_model_spec(fake))
    (reply,) = fake.send(0, Kind.INITIALIZE, np.zeros(5, np.int32))
    assert "must be 6 words" in refusal(reply)


def test_request_out_of_order_is_refused():
    fake = Fake()
    fake.send(0, Kind.JOIN, encoded_model_spec(fake))
    (reply,) = fake.push(0, 1.0)
    assert "before the worker asked for the initial weights" in refusal(reply)
    (reply,) = fake.send(0, Kind.PULL)
    assert "is not possible now" in refusal(reply)
    fake.send(1, Kind.JOIN, encoded_model_spec(fake))
    (reply,) = fake.send(1, Kind.INITIALIZE, WEIGHTS.view(np.int32))
    assert "did not ask for initial weights" in refusal(reply)


def test_push_before_the_initial_weights_is_refused():
    fake = Fake()
    fake.join(0)
    fake.join(1)
    fake.send(1, Kind.JOIN, encoded_model_spec(fake), process=1)
    (reply,) = fake.push(1, 1.0, process=1)
    assert "before the worker asked for the initial weights" in refusal(reply)


def test_weights_can_be_pulled_at_any_time():
    fake = Fake()
    fake.join(0)
    fake.push(0, 2.0)
    fake.join(1)
    np.testing.assert_array_equal(weights(*fake.send(1, Kind.PULL)), WEIGHTS - 1)


def test_run_is_over_when_nobody_else_joins():
    fake = Fake()
    assert not fake.service.is_over(1e9)
    fake.join(0)
    fake.send(0, Kind.LEAVE, number=1)
    assert not fake.service.is_over(fake.time)
    fake.wait(46)
    assert fake.service.is_over(fake.time)


@pytest.mark.parametrize("error", ["", "ValueError: no"])
def test_process_may_join_after_the_last_one_was_killed(error):
    """The last one may also have ended with an error."""
    fake = Fake(number=1)
    fake.join(0)
    fake.push(0, 2.0)
    if error:
        fake.send(0, Kind.LEAVE, messages.encode_text(error), number=1)
    fake.wait(20)
    assert not fake.service.members
    assert not fake.service.is_over(fake.time)
    np.testing.assert_array_equal(weights(*fake.join(0, process=1)), WEIGHTS - 1)
    fake.send(0, Kind.LEAVE, process=1, number=1)
    assert fake.service.is_over(fake.time)


def test_run_is_over_when_nobody_replaces_a_killed_worker():
    fake = Fake(number=1)
    fake.join(0)
    fake.wait(60)
    assert fake.service.is_over(fake.time)

"""The server's loop, with messages and a time that the test makes."""

import json

import keras
import numpy as np
import pytest
from served_loop import WEIGHTS, Fake, body_of, refusal, weights

from tf_dgc.server import messages, model_spec
from tf_dgc.server.messages import REQUEST, Kind, Status


def test_the_first_gives_its_weights_and_others_get_them():
    fake = Fake()
    ((_, head, _),) = fake.send(0, Kind.JOIN, body_of(fake))
    assert head["status"] == Status.DONE
    assert fake.join(1) == []  # waits for the weights
    replies = fake.send(0, Kind.INITIALIZE, WEIGHTS.view(np.int32))
    assert [slot for slot, *_ in replies] == [0, 1]
    np.testing.assert_array_equal(weights(replies[1]), WEIGHTS)
    assert weights(*fake.send(0, Kind.START)).tolist() == WEIGHTS.tolist()


def test_asynchronous_pushes_are_applied_as_they_come():
    fake = Fake()
    fake.join(0)
    fake.join(1)
    np.testing.assert_array_equal(weights(*fake.push(0, 2.0)), WEIGHTS - 1)
    np.testing.assert_array_equal(weights(*fake.push(0, 2.0)), WEIGHTS - 2)
    (reply,) = fake.push(1, 4.0, step=0)
    np.testing.assert_array_equal(weights(reply), WEIGHTS - 4)
    assert reply[1]["clock"] == 3


def test_a_push_that_comes_twice_is_applied_once():
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
    assert [slot for slot, *_ in fake.sent].count(0) == 3  # it has begun too
    assert fake.push(1, 2.0) == []
    replies = fake.push(0, 4.0)
    assert [slot for slot, *_ in replies] == [0, 1]
    for reply in replies:
        np.testing.assert_array_equal(weights(reply), WEIGHTS - 3)
    assert fake.clock == 1


def test_who_waits_is_told_so_and_asks_again():
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
def test_a_worker_that_falls_silent(mode, staleness):
    fake = Fake(mode, staleness)
    fake.join(0)
    fake.join(1)
    for _ in range((staleness or 0) + 1):
        (*replies,) = fake.push(0, 1.0)
    assert replies == []
    answered = []
    for _ in range(12):
        answered += [r for r in fake.wait(1, [(0, 0)]) if r[1]["status"] != Status.WAIT]
        if answered:
            break
        fake.send(0, Kind.POLL)
    assert any("worker 1 has not responded for 10 s" in line for line in fake.lines)
    (reply,) = answered
    if mode == "sync":
        assert "cannot continue: worker 1 has not responded" in refusal(reply)
    else:
        weights(reply)
        assert len(fake.push(0, 1.0)) == 1


def test_time_in_which_the_server_is_busy_counts_against_nobody():
    """As while it traces its first step, and signs of life lie in its inbox."""
    fake = Fake(number=1)
    fake.join(0)
    apply, taken = fake.service.model.apply, []

    def slow(pushes):
        fake.time += 30
        return apply(pushes)

    def take():
        taken.append(fake.time)
        if len(taken) == 1:
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
    fake.loop.runs.is_over = lambda now: len(taken) == 3
    fake.loop.run()
    assert 0 in fake.service.members
    assert fake.clock == 1


def test_a_worker_that_does_not_come_though_it_lives():
    fake = Fake("sync")
    fake.join(0)
    fake.join(1)
    fake.push(0, 1.0)
    told = []
    for _ in range(45):
        told = fake.wait(1, [(0, 0), (1, 0)])
        if told and told[0][1]["status"] == Status.REFUSED:
            break
        fake.send(0, Kind.POLL)
    assert "waited 40 s" in refusal(told[0])
    assert "for worker 1, which responds but neither pushes" in refusal(told[0])


@pytest.mark.parametrize(
    "mode, settings, helps",
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
def test_who_waits_in_vain_is_told_what_helps(mode, settings, helps):
    """ "ssp" does not, nor a quorum that the others cannot meet."""
    fake, told = Fake(mode, number=3, **settings), []
    for worker in range(3):
        fake.join(worker)
    for worker in range(2):
        fake.push(worker, 1.0)
    while not told or told[0][1]["status"] != Status.REFUSED:
        told = fake.wait(1, [(0, 0), (1, 0), (2, 0)])
        for worker in range(2):
            fake.send(worker, Kind.POLL)
    text = refusal(told[0])
    assert "for worker 2, which responds but neither pushes nor computes" in text
    assert helps in text
    assert "`quorum` of at most 2" in text
    assert '"ssp"' not in text
    assert text.endswith("quorum=3, with 3 workers") is (mode == "backup")


@pytest.mark.parametrize("seconds, works", [(90, [1]), (110, [])])
def test_who_waits_for_a_worker_that_computes(seconds, works):
    """As one that evaluates or traces; though not for ever."""
    fake, told = Fake("sync"), []
    fake.join(0)
    fake.join(1)
    fake.push(0, 1.0)
    for i in range(seconds):
        told = fake.wait(1, [(0, 0), (1, 0)], works or [1] * (i < 105))
        if told and told[0][1]["status"] == Status.REFUSED:
            break
        fake.send(0, Kind.POLL)
    if works:
        assert len(fake.push(1, 1.0)) == 2
    else:
        assert "waited 40 s" in refusal(told[0])
        assert 99 <= i <= 101


def test_a_worker_that_never_comes():
    fake, told = Fake("sync"), []
    fake.join(0)
    for _ in range(50):
        told = fake.wait(1, [(0, 0)])
        if told and told[0][1]["status"] == Status.REFUSED:
            break
        fake.send(0, Kind.POLL)
    assert "worker 1 did not join within 45 s" in refusal(told[0])


def test_with_a_bound_the_others_begin_without_who_never_comes_and_it_may_join_late():
    fake, told = Fake("ssp", 0), []
    fake.join(0)
    for _ in range(50):
        told = fake.wait(1, [(0, 0)])
        if told and told[0][1]["status"] == Status.DONE:
            break
        fake.send(0, Kind.POLL)
    weights(told[0])
    np.testing.assert_array_equal(weights(*fake.push(0, 2.0)), WEIGHTS - 1)
    np.testing.assert_array_equal(weights(*fake.join(1)), WEIGHTS - 1)
    assert fake.push(0, 2.0) == []
    assert len(fake.push(1, 2.0)) == 2


def test_a_worker_that_ends_with_an_error_ends_all_of_a_synchronous_run():
    fake = Fake("sync")
    fake.join(0)
    fake.join(1)
    fake.push(0, 1.0)
    error = messages.encode_text("ValueError: no")
    bye, told = fake.send(1, Kind.LEAVE, error, number=1)
    assert bye[0] == 3
    assert "worker 1 ended with ValueError: no" in refusal(told)


def test_a_worker_that_is_done_ends_nobody():
    fake = Fake("sync")
    fake.join(0)
    fake.join(1)
    fake.push(0, 2.0)
    _, told = fake.send(1, Kind.LEAVE, number=1)
    np.testing.assert_array_equal(weights(told), WEIGHTS - 1)
    fake.send(0, Kind.LEAVE, number=1)
    assert fake.service.is_over(fake.time)


def test_a_new_process_takes_the_place_of_an_old_one():
    fake = Fake("ssp", 0)
    fake.join(0)
    fake.join(1)
    fake.push(1, 2.0)
    # The old one's request is answered first, as its caller may be there.
    old, joined = fake.send(1, Kind.JOIN, body_of(fake), process=1)
    assert old[1]["status"] == Status.WAIT
    assert "worker 1 is replaced by another process (0 pushes applied)" in fake.lines
    assert json.loads(messages.decode_text(joined[2])) == {"give": False, "clock": 0}
    assert fake.send(1, Kind.START, process=1) == []  # its push is not yet applied
    replies = fake.push(0, 2.0)
    assert [slot for slot, *_ in replies] == [0, 1]
    np.testing.assert_array_equal(weights(replies[1]), WEIGHTS - 2)
    (stranger,) = fake.push(1, 2.0, process=0)
    assert "does not know this process of worker 1" in refusal(stranger)
    assert fake.clock == 1


def test_who_was_to_give_the_weights_and_is_gone():
    fake = Fake()
    fake.send(0, Kind.JOIN, body_of(fake))
    fake.join(1)
    told = []
    for _ in range(15):
        told = fake.wait(1, [(1, 0)])
        if told and told[0][1]["status"] == Status.REJOIN:
            break
        fake.send(1, Kind.POLL)
    assert told[0][1]["status"] == Status.REJOIN
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
def test_workers_that_differ_are_refused(change, text):
    fake = Fake()
    fake.join(0)
    found = fake.join(1, handed={**fake.handed, **change})
    assert text in found
    assert "The server refuses worker 1" in found
    assert len(fake.push(0, 1.0)) == 1


def test_the_first_worker_may_be_of_another_version():
    fake = Fake()
    handed = {**fake.handed, "version": "0.0"}
    assert "version is '0.0', and the server's" in fake.join(0, handed=handed)
    weights(*fake.join(1))


def test_who_joins_late_may_have_another_learning_rate():
    """As callbacks change it; that of the others goes on."""
    fake = Fake()
    fake.join(0)
    before = weights(*fake.push(0, 0.0, rate=0.5))
    other = Fake(rule=keras.optimizers.SGD(0.25)).handed
    fake.join(1, handed=other)
    np.testing.assert_array_equal(weights(*fake.push(1, 2.0, rate=0.25)), before - 1)


def test_shapes_and_rates_that_differ_are_named():
    fake = Fake()
    fake.send(0, Kind.JOIN, body_of(fake))
    other = Fake(rule=keras.optimizers.SGD(0.25)).handed
    assert "optimizer config learning_rate is 0.25, not 0.5" in fake.join(1, 0, other)
    other = json.loads(model_spec.model_spec_text(fake.handed))
    other["variables"][0]["shape"] = [2, 4]
    found = fake.join(1, 1, other)
    assert "variables 0 shape 1 is 4, not 3" in found


def test_an_optimizer_that_the_server_does_not_know():
    fake = Fake()
    handed = json.loads(model_spec.model_spec_text(fake.handed))
    handed["optimizer"]["class_name"] = "Mine"
    handed["optimizer"]["module"] = "my_module"
    (reply,) = fake.send(0, Kind.JOIN, messages.encode_text(json.dumps(handed)))
    assert "cannot create the optimizer" in refusal(reply)
    assert "Received: ('my_module', 'Mine')" in refusal(reply)
    assert len(fake.join(1)) == 1  # another one can


def test_weights_of_another_size():
    fake = Fake()
    fake.send(0, Kind.JOIN, body_of(fake))
    (reply,) = fake.send(0, Kind.INITIALIZE, np.zeros(5, np.int32))
    assert "must be 6 words" in refusal(reply)


def test_what_has_no_place_is_refused():
    fake = Fake()
    fake.send(0, Kind.JOIN, body_of(fake))
    (reply,) = fake.push(0, 1.0)
    assert "before the worker asked for the initial weights" in refusal(reply)
    (reply,) = fake.send(0, Kind.PULL)
    assert "is not possible now" in refusal(reply)
    fake.send(1, Kind.JOIN, body_of(fake))
    (reply,) = fake.send(1, Kind.INITIALIZE, WEIGHTS.view(np.int32))
    assert "did not ask for initial weights" in refusal(reply)


def test_who_has_no_weights_cannot_push():
    fake = Fake()
    fake.join(0)
    fake.join(1)
    fake.send(1, Kind.JOIN, body_of(fake), process=1)
    (reply,) = fake.push(1, 1.0, process=1)
    assert "before the worker asked for the initial weights" in refusal(reply)


def test_weights_can_be_had_at_any_time():
    fake = Fake()
    fake.join(0)
    fake.push(0, 2.0)
    fake.join(1)
    np.testing.assert_array_equal(weights(*fake.send(1, Kind.PULL)), WEIGHTS - 1)


def test_it_is_over_when_nobody_comes_any_more():
    fake = Fake()
    assert not fake.service.is_over(1e9)
    fake.join(0)
    fake.send(0, Kind.LEAVE, number=1)
    assert not fake.service.is_over(fake.time)
    fake.wait(46)
    assert fake.service.is_over(fake.time)


@pytest.mark.parametrize("error", ["", "ValueError: no"])
def test_another_process_may_come_when_the_last_one_was_killed(error):
    """Or ended with an error."""
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


def test_when_nobody_comes_in_place_of_who_was_killed_it_is_over():
    fake = Fake(number=1)
    fake.join(0)
    fake.wait(60)
    assert fake.service.is_over(fake.time)

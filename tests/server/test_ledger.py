"""Killed and restarted workers and lost replies: each push is applied once."""

import collections
import random

import keras
import numpy as np
import pytest
from served_loop import WEIGHTS, Fake

from tf_dgc.server import messages
from tf_dgc.server.messages import Kind, Status

MODES = {
    "async": ("async", {}),
    "ssp 0": ("ssp", {"staleness": 0}),
    "ssp 2": ("ssp", {"staleness": 2}),
    "backup": ("backup", {"quorum": 2}),
}


class Worker:
    """A worker whose processes are killed one after the other.

    Each push is a unique number, by which the ledger recognizes it.
    """

    def __init__(self, index, ledger):
        self.index, self.ledger, self.process = index, ledger, -1
        self.begin()

    def begin(self):
        """Start another process, which does not know what became of the last push."""
        self.process += 1
        self.step = None
        self.push = None
        self.waits = False
        self.loses_reply = False
        fake = self.ledger.fake
        fake.join(self.index, self.process)
        # The number of the request for weights.
        self.first_number = fake.numbers[self.index, self.process]
        self.ledger.deliver()

    def act(self, loses_reply):
        """Push, or poll while waiting; repeat the message if its reply gets lost."""
        kind, body, head = Kind.POLL, (), {}
        if self.step is not None:
            self.push, head = self.ledger.new_push(), {"step": self.step}
            kind, body = Kind.PUSH, np.array([0, *[self.push] * 6], np.float32)
            body = body.view(np.int32)
        elif not self.waits:
            return
        self.step, self.waits = None, False
        self.loses_reply = loses_reply
        self._send(kind, body, head)
        if loses_reply:  # of the first message
            self._send(kind, body, {**head, "repeat": True})

    def _send(self, kind, body, head):
        self.ledger.fake.send(self.index, kind, body, self.process, **head)
        self.ledger.deliver()

    def receive(self, head, body):
        """Receive a reply, or lose it."""
        if head["number"] < self.first_number:
            return
        if self.loses_reply:
            self.loses_reply = False
            return
        if head["status"] == Status.WAIT:
            self.waits = True
            return
        assert head["status"] in (Status.DONE, Status.LATE), messages.decode_text(body)
        if self.push is not None:
            self.ledger.statuses[self.push] = Status(head["status"])
        self.push, self.step = None, int(head["clock"])


class Ledger:
    """Records pushes, the statuses that workers got for them, and applied pushes."""

    def __init__(self, mode, settings, number):
        rule = keras.optimizers.SGD(1.0)
        self.fake = Fake(mode, number=number, rule=rule, **settings)
        self.statuses = {}
        self.applied = collections.Counter()
        self.num_pushes = 0
        self.workers = []
        self._num_delivered = 0
        for i in range(number):
            self.workers.append(Worker(i, self))
        self.model = self.fake.service.model
        self._apply = self.model.apply
        self.model.apply = self.apply

    def new_push(self):
        self.num_pushes += 1
        return self.num_pushes * (-1) ** self.num_pushes  # so that sums stay exact

    def apply(self, pushes):
        self.applied.update(int(p.words.view(np.float32)[1]) for p in pushes)
        return self._apply(pushes)

    def deliver(self):
        """Deliver new replies to the processes that are still alive."""
        replies = self.fake.sent[self._num_delivered :]
        self._num_delivered = len(self.fake.sent)
        for slot, head, body in replies:
            if slot < len(self.workers):
                worker = self.workers[slot]
                if head["incarnation"] == 100 + worker.process:
                    worker.receive(head, body)

    def wait(self, seconds, alive):
        self.fake.wait(seconds, [(w.index, w.process) for w in alive])
        self.deliver()


@pytest.mark.parametrize(
    "kills", [20, pytest.param(1000, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("mode", MODES)
def test_every_push_is_applied_once(mode, kills):
    """A push is applied if and only if its status is DONE."""
    rng = random.Random(kills)
    ledger = Ledger(*MODES[mode], number=4)
    for _ in range(kills):
        for _ in range(rng.randrange(20)):
            rng.choice(ledger.workers).act(loses_reply=rng.random() < 0.2)
            if rng.random() < 0.1:
                ledger.wait(1, ledger.workers)
        killed = rng.choice(ledger.workers)
        if rng.random() < 0.1:  # its lease ends before another process comes
            ledger.wait(12, [w for w in ledger.workers if w is not killed])
        killed.begin()
    assert set(ledger.applied.values()) == {1}
    for push, status in ledger.statuses.items():
        assert (push in ledger.applied) is (status == Status.DONE)
    num_unanswered = ledger.num_pushes - len(ledger.statuses)
    assert num_unanswered <= kills + 4
    assert len(ledger.statuses) > 2 * kills
    change = ledger.model.variables[0].numpy().ravel() - WEIGHTS
    np.testing.assert_array_equal(change, [-sum(ledger.applied)] * 6)
    if mode == "backup":
        assert Status.LATE in ledger.statuses.values()

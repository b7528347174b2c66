"""Workers that are killed and come again, replies that are lost: each push once."""

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
    """A worker, whose processes are killed one after the other.

    A push is a number that no other has, by which the server's side knows it.
    """

    def __init__(self, index, ledger):
        self.index, self.ledger, self.process = index, ledger, -1
        self.begin()

    def begin(self):
        """Start another process; nobody knows what became of the last one's push."""
        self.process += 1
        self.step = self.push = None
        self.asks = self.deaf = False
        fake = self.ledger.fake
        fake.join(self.index, self.process)
        self.first = fake.numbers[self.index, self.process]  # that asks for weights
        self.ledger.hear()

    def act(self, loses):
        """Push, or ask again, unless it waits; and once more, if a reply is lost."""
        kind, body, head = Kind.POLL, (), {}
        if self.step is not None:
            self.push, head = self.ledger.new_push(), {"step": self.step}
            kind, body = Kind.PUSH, np.array([0, *[self.push] * 6], np.float32)
            body = body.view(np.int32)
        elif not self.asks:
            return
        self.step, self.asks = None, False
        self.deaf = loses
        self._send(kind, body, head)
        if loses:  # its reply, or what sends the call away that nobody made any more
            self._send(kind, body, {**head, "repeat": True})

    def _send(self, kind, body, head):
        self.ledger.fake.send(self.index, kind, body, self.process, **head)
        self.ledger.hear()

    def hear(self, head, body):
        """Take a reply, or lose it."""
        if head["number"] < self.first:
            return
        if self.deaf:
            self.deaf = False
            return
        if head["status"] == Status.WAIT:
            self.asks = True
            return
        assert head["status"] in (Status.DONE, Status.LATE), messages.decode_text(body)
        if self.push is not None:
            self.ledger.told[self.push] = Status(head["status"])
        self.push, self.step = None, int(head["clock"])


class Ledger:
    """What was pushed, what the workers were told of it, and what was applied."""

    def __init__(self, mode, settings, number):
        rule = keras.optimizers.SGD(1.0)
        self.fake = Fake(mode, number=number, rule=rule, **settings)
        self.told, self.applied, self.pushed = {}, collections.Counter(), 0
        self._heard, self.workers = 0, []
        for i in range(number):
            self.workers.append(Worker(i, self))
        self.model = self.fake.service.model
        self._apply, self.model.apply = self.model.apply, self.note

    def new_push(self):
        self.pushed += 1
        return self.pushed * (-1) ** self.pushed  # so that sums stay exact

    def note(self, pushes):
        self.applied.update(int(p.words.view(np.float32)[1]) for p in pushes)
        return self._apply(pushes)

    def hear(self):
        """Let the processes that live take the replies that have come."""
        replies, self._heard = self.fake.sent[self._heard :], len(self.fake.sent)
        for slot, head, body in replies:
            if slot < len(self.workers):
                worker = self.workers[slot]
                if head["incarnation"] == 100 + worker.process:
                    worker.hear(head, body)

    def wait(self, seconds, alive):
        self.fake.wait(seconds, [(w.index, w.process) for w in alive])
        self.hear()


@pytest.mark.parametrize(
    "kills", [20, pytest.param(1000, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("mode", MODES)
def test_every_push_is_applied_once(mode, kills):
    """Or not at all, if its worker was told so, or killed before it was told."""
    draw = random.Random(kills)
    ledger = Ledger(*MODES[mode], number=4)
    for _ in range(kills):
        for _ in range(draw.randrange(20)):
            draw.choice(ledger.workers).act(loses=draw.random() < 0.2)
            if draw.random() < 0.1:
                ledger.wait(1, ledger.workers)
        killed = draw.choice(ledger.workers)
        if draw.random() < 0.1:  # its lease ends before another process comes
            ledger.wait(12, [w for w in ledger.workers if w is not killed])
        killed.begin()
    assert set(ledger.applied.values()) == {1}
    for push, status in ledger.told.items():
        assert (push in ledger.applied) is (status == Status.DONE)
    never_told = ledger.pushed - len(ledger.told)
    assert never_told <= kills + 4
    assert len(ledger.told) > 2 * kills
    moved = ledger.model.variables[0].numpy().ravel() - WEIGHTS
    np.testing.assert_array_equal(moved, [-sum(ledger.applied)] * 6)
    if mode == "backup":
        assert Status.LATE in ledger.told.values()

"""A server's loop with a fake transport and a fake clock."""

import json

import keras
import numpy as np

from tf_dgc.compressors import NoCompression
from tf_dgc.server import messages, model_spec
from tf_dgc.server.messages import REPLY, REQUEST, Kind, Status
from tf_dgc.server.process import ServerLoop
from tf_dgc.server.sessions import Limits

LIMITS = Limits(lease=10.0, start=45.0, wait=40.0, work=100.0, hold=1.0)
WEIGHTS = np.arange(6, dtype=np.float32)


class Fake:
    """A transport for two or more workers, the server's loop, and its time."""

    def __init__(self, mode="async", staleness=None, number=2, rule=None, **others):
        self.time, self.lines, self.sent = 0.0, [], []
        self.loop = ServerLoop(
            self, number, LIMITS, "", self.lines.append, lambda: self.time
        )
        self.service = self.loop.runs.service(0)
        self.number, self.numbers = number, {}
        settings = {"mode": mode, "staleness": staleness}
        settings |= {"error_feedback": False, "seed": 0}
        settings |= {"pull": "whole", "pull_sparsity": None, "quorum": None}
        settings |= {"correction": None, "correction_strength": None, **others}
        variable = keras.Variable(np.zeros([2, 3]), dtype="float32", name="kernel")
        self.handed = model_spec.create_model_spec(
            settings,
            number,
            rule or keras.optimizers.SGD(0.5),
            NoCompression(),
            [variable],
            [False],
            [False],
        )

    def answer(self, slot, words):
        self.sent.append((slot, *messages.remove_frame(REPLY, words)))

    def send(self, worker, kind, body=(), process=0, repeat=False, **changed):
        """Send a message of a worker; return the replies that it causes."""
        key = worker, process
        is_new = not repeat and "number" not in changed
        self.numbers[key] = self.numbers.get(key, 0) + is_new
        fields = {"number": self.numbers[key], "parts": 1, "step": self.clock}
        fields["rate"] = np.nan  # as with a schedule
        fields |= {"incarnation": 100 + process, "worker": worker, "kind": kind}
        words = messages.add_frame(
            REQUEST, np.asarray(body, np.int32), **{**fields, **changed}
        )
        slot = worker + self.number * (kind in (Kind.HEARTBEAT, Kind.LEAVE))
        return self.take(slot, words)

    def take(self, slot, words):
        before = len(self.sent)
        self.loop._receive(slot, words)
        self.loop.runs.advance(self.time)
        return self.sent[before:]

    def wait(self, seconds, alive=(), works=()):
        """Advance the time while some workers send heartbeats; return replies."""
        before = len(self.sent)
        for _ in range(int(2 * seconds)):
            self.time += 0.5
            for worker, process in alive:
                self.send(worker, Kind.HEARTBEAT, [worker in works], process, number=1)
            self.loop.runs.advance(self.time)
        return [s for s in self.sent[before:] if s[0] < self.number]

    @property
    def clock(self):
        model = self.service.model
        return model.clock if model else 0

    def join(self, worker, process=0, handed=None):
        text = messages.encode_text(model_spec.model_spec_text(handed or self.handed))
        replies = self.send(worker, Kind.JOIN, text, process)
        receiver = worker, 100 + process
        _, head, body = next(
            r for r in replies if (r[0], r[1]["incarnation"]) == receiver
        )
        if head["status"] == Status.REFUSED:
            return messages.decode_text(body)
        if json.loads(messages.decode_text(body))["give"]:
            self.send(worker, Kind.INITIALIZE, WEIGHTS.view(np.int32), process)
        return self.send(worker, Kind.START, process=process)

    def push(self, worker, gradient, process=0, **changed):
        """Push a gradient whose entries are all equal."""
        flag_and_values = np.array([0, *[gradient] * 6], np.float32)
        body = flag_and_values.view(np.int32)
        return self.send(worker, Kind.PUSH, body, process, **changed)


def weights(reply, status=Status.DONE):
    _, head, body = reply
    assert head["status"] == status, messages.decode_text(body)
    return body.view(np.float32)


def refusal(reply):
    _, head, body = reply
    assert head["status"] == Status.REFUSED
    return messages.decode_text(body)


def encoded_model_spec(fake):
    return messages.encode_text(model_spec.model_spec_text(fake.handed))

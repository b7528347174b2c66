"""Malformed messages end their sender's work, and nobody else's."""

import copy
import json

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from served_loop import WEIGHTS, Fake, encoded_model_spec, refusal, weights

from tf_dgc.compressors import CountSketch, TopK
from tf_dgc.schedules import WarmupSparsity
from tf_dgc.server import messages, model_spec, validation
from tf_dgc.server.checkpoint import ServerCheckpoint
from tf_dgc.server.messages import MAX_WORDS, Kind, Status


@pytest.fixture(autouse=True)
def _no_large_variables(monkeypatch):
    """Fail where the server creates a variable of an impossible size."""
    stock = keras.Variable.__init__

    def init(self, *args, shape=None, **others):
        assert np.prod(shape or (), dtype=float) < 1e6
        stock(self, *args, shape=shape, **others)

    monkeypatch.setattr(keras.Variable, "__init__", init)


def changed_spec(fake, path, value):
    spec = copy.deepcopy(fake.handed)
    *keys, last = path
    node = spec
    for key in keys:
        node = node[key]
    node[last] = value
    return spec


def check_another_worker_trains(fake):
    """Check that another process joins and trains, and gets no foreign errors."""
    (reply,) = fake.join(1)
    np.testing.assert_array_equal(weights(reply), WEIGHTS)
    np.testing.assert_array_equal(weights(*fake.push(1, 2.0)), WEIGHTS - 1)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"run":' * 100_000, "1" * 5000, '{"run": 1e999}', "NaN"]
)
def test_text_that_is_no_model_spec_is_refused(text):
    fake = Fake()
    (reply,) = fake.send(0, Kind.JOIN, messages.encode_text(text))
    assert "The server refuses worker 0 because of its model spec" in refusal(reply)
    check_another_worker_trains(fake)


LAYER = {"module": "keras.layers", "class_name": "Dense", "config": {"units": 10**12}}
TEXT = {"class_name": "__numpy__", "config": {"value": "a", "dtype": "S1000000000"}}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["variables", 0, "shape"], [10**13]),
        (["variables", 0, "shape"], [10**30, 10**30]),
        (["variables", 0, "shape"], [-2, -3]),
        (["variables", 0, "shape"], [2.0, 3]),
        (["variables", 0, "shape"], ["2", 3]),
        (["variables", 0, "dtype"], "floor"),
        (["variables", 0, "dtype"], "string"),
        (["variables", 0, "dtype"], "int4"),
        (["variables", 0, "dtype"], None),
        (["variables", 0, "name"], 7),
        (["variables", 0], None),
        (["settings", "mode"], ["sync"]),
        (["settings", "staleness"], "far"),
        (["settings", "correction"], "more"),
        (["settings", "seed"], 0.5),
        (["run"], 10**4000),
        (["run"], -1),
        (["optimizer"], LAYER),
        (["optimizer", "config", "learning_rate"], LAYER),
        (["optimizer", "config", "learning_rate"], TEXT),
        (["compressor", "registered_name"], ["tf_dgc>TopK"]),
    ],
)
def test_impossible_model_spec_is_refused(path, value):
    """The server creates nothing from it, before or after another worker joins."""
    fake = Fake()
    body = messages.encode_text(json.dumps(changed_spec(fake, path, value)))
    (reply,) = fake.send(0, Kind.JOIN, body)
    assert "The server refuses worker 0 because of its model spec" in refusal(reply)
    check_another_worker_trains(fake)
    fake.send(0, Kind.JOIN, body, process=1)
    np.testing.assert_array_equal(weights(*fake.push(1, 2.0)), WEIGHTS - 2)


def test_model_larger_than_memory_is_refused(monkeypatch):
    fake = Fake()
    memory = psutil.virtual_memory()._replace(total=23)
    monkeypatch.setattr(validation.psutil, "virtual_memory", lambda: memory)
    error = "its variables have 24 bytes, and the server's machine 23"
    assert error in fake.join(0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["optimizer", "class_name"], "get"),
        (["optimizer", "config", "learning_rate"], "fast"),
        (["compressor", "config", "sparsity"], [[]]),
        (["settings", "pull"], "sparse"),
    ],
)
def test_model_spec_that_cannot_be_built_is_refused(path, value):
    fake = Fake()
    body = messages.encode_text(json.dumps(changed_spec(fake, path, value)))
    replies = fake.send(0, Kind.JOIN, body)
    replies += fake.send(0, Kind.INITIALIZE, WEIGHTS.view(np.int32))
    assert Status.REFUSED in [head["status"] for _, head, _ in replies]
    check_another_worker_trains(fake)


@pytest.mark.parametrize("kind", [Kind.JOIN, Kind.INITIALIZE, Kind.PUSH, Kind.START])
def test_request_of_too_many_parts_is_refused(kind):
    """The server would hold all parts until the last one arrives."""
    fake = Fake()
    if kind == Kind.INITIALIZE:
        fake.send(0, Kind.JOIN, encoded_model_spec(fake))
    elif kind != Kind.JOIN:
        fake.join(0)
    part = np.zeros([MAX_WORDS], np.int32)
    for number in range(10):
        (reply,) = fake.send(0, kind, part, part=number, parts=1000)
        if reply[1]["status"]:
            break
    assert "a request of more than" in refusal(reply)
    numbers = {Kind.JOIN: 4, Kind.INITIALIZE: 0, Kind.PUSH: 1, Kind.START: 1}
    assert number == numbers[kind]


@pytest.mark.parametrize(
    ("method", "kind", "error"),
    [
        ("apply", Kind.PUSH, MemoryError("no memory")),
        ("apply", Kind.PUSH, tf.errors.ResourceExhaustedError(None, None, "no memory")),
        ("full_pull", Kind.PUSH, AttributeError("no such name")),
        ("full_pull", Kind.PULL, RecursionError("too deep")),
    ],
)
def test_unexpected_error_is_reported_only_to_its_sender(
    monkeypatch, method, kind, error
):
    fake = Fake()
    fake.join(0)
    fake.join(1)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(fake.service.model, method, fail)
        is_push = kind == Kind.PUSH
        (reply,) = fake.push(0, 0.0) if is_push else fake.send(0, kind)
    assert type(error).__name__ in refusal(reply)
    np.testing.assert_array_equal(weights(*fake.push(1, 2.0)), WEIGHTS - 1)


def test_damaged_checkpoint_refuses_only_its_own_run(tmp_path):
    fake = Fake()
    fake.join(0)
    fake.loop.runs._checkpoint = ServerCheckpoint(tmp_path, 60.0, fake.lines.append)
    (tmp_path / "server-run-2.npz").write_text("damaged")
    error = fake.join(1, handed={**fake.handed, "run": 1})
    assert "cannot resume from" in error
    assert "server-run-2.npz" in error
    np.testing.assert_array_equal(weights(*fake.push(0, 2.0)), WEIGHTS - 1)


@pytest.mark.parametrize(
    "rule",
    [
        keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 10)),
        keras.optimizers.SGD(
            keras.optimizers.schedules.PiecewiseConstantDecay(
                [1, 2], np.array([0.1, 0.2, 0.3])
            )
        ),
    ],
)
@pytest.mark.parametrize("compressor", [TopK(WarmupSparsity(4)), CountSketch(0.9)])
def test_valid_model_spec_passes(rule, compressor):
    fake = Fake(rule=rule)
    variable = keras.Variable(np.zeros([2, 3]), dtype="float16", name="kernel")
    spec = model_spec.create_model_spec(
        fake.handed["settings"], 2, rule, compressor, [variable], [False], [False]
    )
    validation.check_model_spec(json.loads(model_spec.model_spec_text(spec)))

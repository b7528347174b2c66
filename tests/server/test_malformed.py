"""Messages that are malformed end what their sender does, and nothing else."""

import copy
import json

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from served_loop import WEIGHTS, Fake, body_of, refusal, weights

from tf_dgc.compressors import CountSketch, TopK
from tf_dgc.schedules import WarmupSparsity
from tf_dgc.server import messages, model_spec, validation
from tf_dgc.server.checkpoint import ServerCheckpoint
from tf_dgc.server.messages import MAX_WORDS, Kind, Status


@pytest.fixture(autouse=True)
def _nothing_large_is_made(monkeypatch):
    """Of a size that cannot be, no variable may be asked for."""
    stock = keras.Variable.__init__

    def init(self, *args, shape=None, **others):
        assert np.prod(shape or (), dtype=float) < 1e6
        stock(self, *args, shape=shape, **others)

    monkeypatch.setattr(keras.Variable, "__init__", init)


def changed(fake, path, value):
    handed = copy.deepcopy(fake.handed)
    *keys, last = path
    found = handed
    for key in keys:
        found = found[key]
    found[last] = value
    return handed


def goes_on(fake):
    """Assert that another process joins, trains, and is not told of others' errors."""
    (begun,) = fake.join(1)
    np.testing.assert_array_equal(weights(begun), WEIGHTS)
    np.testing.assert_array_equal(weights(*fake.push(1, 2.0)), WEIGHTS - 1)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"run":' * 100_000, "1" * 5000, '{"run": 1e999}', "NaN"]
)
def test_text_that_is_none(text):
    fake = Fake()
    (reply,) = fake.send(0, Kind.JOIN, messages.encode_text(text))
    assert "The server refuses worker 0 because of its model spec" in refusal(reply)
    goes_on(fake)


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
def test_a_description_of_what_cannot_be(path, value):
    """It is refused before anything is made of it; of a second one nothing is made."""
    fake = Fake()
    body = messages.encode_text(json.dumps(changed(fake, path, value)))
    (reply,) = fake.send(0, Kind.JOIN, body)
    assert "The server refuses worker 0 because of its model spec" in refusal(reply)
    goes_on(fake)
    fake.send(0, Kind.JOIN, body, process=1)
    np.testing.assert_array_equal(weights(*fake.push(1, 2.0)), WEIGHTS - 2)


def test_a_model_that_this_machine_has_no_memory_for(monkeypatch):
    fake = Fake()
    memory = psutil.virtual_memory()._replace(total=23)
    monkeypatch.setattr(validation.psutil, "virtual_memory", lambda: memory)
    said = "its variables have 24 bytes, and the server's machine 23"
    assert said in fake.join(0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["optimizer", "class_name"], "get"),
        (["optimizer", "config", "learning_rate"], "fast"),
        (["compressor", "config", "sparsity"], [[]]),
        (["settings", "pull"], "sparse"),
    ],
)
def test_a_description_that_the_model_cannot_be_made_of(path, value):
    fake = Fake()
    body = messages.encode_text(json.dumps(changed(fake, path, value)))
    replies = fake.send(0, Kind.JOIN, body)
    replies += fake.send(0, Kind.INITIALIZE, WEIGHTS.view(np.int32))
    assert Status.REFUSED in [head["status"] for _, head, _ in replies]
    goes_on(fake)


@pytest.mark.parametrize("kind", [Kind.JOIN, Kind.INITIALIZE, Kind.PUSH, Kind.START])
def test_a_request_of_more_parts_than_it_can_have(kind):
    """They would be kept until all are there."""
    fake = Fake()
    if kind == Kind.INITIALIZE:
        fake.send(0, Kind.JOIN, body_of(fake))
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
def test_what_nobody_thought_of(monkeypatch, method, kind, error):
    """An error of any class, of a push or of a pull, is its sender's alone."""
    fake = Fake()
    fake.join(0)
    fake.join(1)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(fake.service.model, method, fail)
        pushed = kind == Kind.PUSH
        (reply,) = fake.push(0, 0.0) if pushed else fake.send(0, kind)
    assert type(error).__name__ in refusal(reply)
    np.testing.assert_array_equal(weights(*fake.push(1, 2.0)), WEIGHTS - 1)


def test_a_later_run_whose_checkpoint_is_damaged(tmp_path):
    """It is refused; another one goes on."""
    fake = Fake()
    fake.join(0)
    fake.loop.runs._checkpoint = ServerCheckpoint(tmp_path, 60.0, fake.lines.append)
    (tmp_path / "server-run-2.npz").write_text("damaged")
    said = fake.join(1, handed={**fake.handed, "run": 1})
    assert "cannot resume from" in said
    assert "server-run-2.npz" in said
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
def test_what_is_as_it_should_be(rule, compressor):
    fake = Fake(rule=rule)
    variable = keras.Variable(np.zeros([2, 3]), dtype="float16", name="kernel")
    given = rule, compressor, [variable], [False], [False]
    handed = model_spec.create_model_spec(fake.handed["settings"], 2, *given)
    validation.check_model_spec(json.loads(model_spec.model_spec_text(handed)))

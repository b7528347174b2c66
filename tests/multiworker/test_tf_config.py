"""`TF_CONFIG` and other environment variables, right and wrong."""

import json

import keras
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc.multiworker import tf_config, workers

O = keras.optimizers  # noqa: E741
CLUSTER = {"worker": ["a:1", "b:2"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{not json", "is not JSON"),
        ("[1]", "must be a JSON object"),
        (json.dumps({"task": {"type": "worker", "index": 0}}), "lacks a `cluster`"),
        (
            json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 2}}),
            "names a task not in its cluster",
        ),
        (
            json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": "b"}}),
            "cannot be read",
        ),
        (json.dumps({"cluster": {"worker": "a:1"}}), "cannot be read"),
        *[
            (json.dumps({"cluster": {"worker": ["127.0.0.1:1", address]}}), message)
            for address, message in [
                ("b", "names 'b', which is not a host, a colon and a port"),
                (":1", "which is not a host"),
                ("[::1]", r"names '\[::1\]'"),
                ("b:x", "names 'b:x'"),
                ("b:0", "a port from 1 to 65535"),
                ("b:70000", "names 'b:70000'"),
                ("127.0.0.1:1", "names '127.0.0.1:1' twice"),
            ]
        ],
        (
            json.dumps({"cluster": {"worker": ["a:1"], "ps": ["a:1"]}}),
            "names 'a:1' twice",
        ),
        (json.dumps({"cluster": CLUSTER, "task": "type"}), "cannot be read"),
        (json.dumps({"cluster": CLUSTER}), "names a task not in its cluster"),
    ],
)
def test_bad_tf_config_is_refused(monkeypatch, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=message) as error:
        tf_dgc.DGCOptimizer(O.SGD(0.1))
    assert text in str(error.value)


@pytest.mark.parametrize("index", [1, "1", 1.0])
@pytest.mark.parametrize("hosts", [["a:1", "b:2"], {"0": "a:1", "1": "b:2"}])
def test_tf_config_may_have_the_types_that_tensorflow_accepts(
    monkeypatch, hosts, index
):
    config = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert resolver.task_id == 1
    tf_config.check_tf_config()


@pytest.mark.parametrize(
    "cluster",
    [
        {"worker": ["[::1]:1", "[::1]:2", "b.c-d:65535"]},
        {"chief": ["a"]},  # a single worker needs no port
        {"worker": ["a:1", "b:1"], "evaluator": ["a"]},
    ],
)
def test_valid_addresses(monkeypatch, cluster):
    task = {"type": next(iter(cluster)), "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    tf_config.check_tf_config()


def test_tf_config_without_a_strategy(monkeypatch):
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": task}))
    with pytest.raises(ValueError, match=r"`with strategy.scope\(\):`.*Received"):
        tf_dgc.DGCOptimizer(O.SGD(0.1))
    with pytest.raises(ValueError, match="each of them trains alone"):
        tf_dgc.prepare(tf.distribute.get_strategy())
    with tf_config.single_worker():
        tf_dgc.DGCOptimizer(O.SGD(0.1))
    monkeypatch.setenv("TF_DGC_ALONE", "1")
    config = tf_dgc.DGCOptimizer(O.SGD(0.1)).get_config()
    monkeypatch.delenv("TF_DGC_ALONE")
    with pytest.warns(UserWarning, match="each of them trains alone"):
        tf_dgc.DGCOptimizer.from_config(config)  # as to load a model and predict
    evaluator = {"cluster": CLUSTER, "task": {"type": "evaluator", "index": 0}}
    for alone in ({}, evaluator):
        monkeypatch.setenv("TF_CONFIG", json.dumps(alone))
        tf_dgc.DGCOptimizer(O.SGD(0.1))


def test_a_strategy_after_tensorflow_was_used(monkeypatch):
    """The error says what to do, unlike TensorFlow's, and no worker waits."""
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": task}))
    tf.constant(1.0)
    with pytest.raises(RuntimeError, match="at program startup"):
        tf.distribute.MultiWorkerMirroredStrategy()
    with pytest.raises(RuntimeError, match=r"Move `strategy = .*top of the program"):
        tf_dgc.multi_worker_strategy()


@pytest.mark.parametrize("named", [{}, {"evaluator": ["c:3"]}])
def test_an_evaluator_gets_the_default_strategy(monkeypatch, named):
    task = {"type": "evaluator", "index": 0}
    config = {"cluster": {**CLUSTER, **named}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = tf_dgc.multi_worker_strategy()
    assert strategy is tf.distribute.get_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(tf_dgc.DGCOptimizer(O.SGD(0.1)), "mse")
    assert model.evaluate(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0) >= 0


def test_a_server_is_advised_to_run_serve(monkeypatch):
    config = {"cluster": {**CLUSTER, "ps": ["c:3"]}, "task": {"type": "ps", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match=r"run by `tf-dgc serve`.*type 'ps'"):
        tf_dgc.multi_worker_strategy()


@pytest.mark.parametrize("seconds", ["0", "-1", "soon"])
def test_timeout_variable(monkeypatch, seconds):
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, seconds)
    with pytest.raises(ValueError, match="TF_DGC_TIMEOUT"):
        workers.timeout_seconds()

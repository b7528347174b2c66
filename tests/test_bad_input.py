"""Every wrong input ends in an error that says what was passed and what to do."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc import _versions, schedules
from tf_dgc.cluster import tf_config, workers

O = keras.optimizers  # noqa: E741


@pytest.mark.parametrize(
    "sparsity",
    [
        1.0,
        -0.1,
        99.9,
        math.nan,
        math.inf,
        None,
        "0.999",
        True,
        lambda step: 1.0,
        lambda step: math.nan,
        O.schedules.PiecewiseConstantDecay([10], [1.5, 0.9]),
    ],
)
def test_sparsity(sparsity):
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        tf_dgc.DGCOptimizer(O.SGD(0.1), sparsity)


@pytest.mark.parametrize("value_dtype", ["float64", "int8", "", 16, tf.bfloat16])
def test_value_dtype(value_dtype):
    with pytest.raises(ValueError, match=r"None or one of float32.*Received: value_dt"):
        tf_dgc.DGCOptimizer(O.SGD(0.1), value_dtype=value_dtype)


def test_schedule_that_goes_wrong_later():
    schedule = O.schedules.PiecewiseConstantDecay([2], [0.9, 1.0])
    trainer = Trainer(
        tf.distribute.get_strategy(),
        lambda: tf_dgc.DGCOptimizer(O.SGD(0.1), schedule),
        initial_weights("float32"),
    )
    steps = make_gradients(1, 4, "float32")
    for gradients in steps[:3]:
        trainer.step(gradients)
    with pytest.raises(tf.errors.InvalidArgumentError, match="sparsity schedule"):
        trainer.step(steps[3])


@pytest.mark.parametrize(
    ("boundaries", "values"),
    [([2, 1], [0.1, 0.2, 0.3]), ([1], [0.1]), ([1], [0.5, 1.0]), ([], [math.nan])],
)
def test_piecewise_schedule(boundaries, values):
    with pytest.raises(ValueError, match="Received"):
        schedules.PiecewiseConstantSparsity(boundaries, values)


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": -1},
        {"warmup_steps": 0},
        {"warmup_steps": 1.5},
        {"stages": []},
        {"final_sparsity": 1.0},
    ],
)
def test_warmup_schedule(settings):
    with pytest.raises(ValueError, match="Received"):
        schedules.WarmupSparsity(**{"warmup_steps": 4, **settings})


def test_warmup_reaches_its_stages():
    warmup = schedules.WarmupSparsity(8)
    values = [float(warmup(tf.constant(step))) for step in range(10)]
    assert (
        values == [0.75] * 2 + [0.9375] * 2 + [0.984375] * 2 + [0.996] * 2 + [0.999] * 2
    )


@pytest.mark.parametrize("momentum", [1.0])
def test_momentum(momentum):
    with pytest.raises(ValueError, match=r"momentum .* must be in \[0, 1\)"):
        tf_dgc.DGCOptimizer(O.SGD(0.1, momentum=momentum))


@pytest.mark.parametrize("inner", [None, 0.1, O.SGD, keras.layers.Dense(1)])
def test_inner_that_is_no_optimizer(inner):
    with pytest.raises(ValueError, match="must be a Keras optimizer"):
        tf_dgc.DGCOptimizer(inner)


@pytest.mark.parametrize("inner", ["sdg", "", {"class_name": "Dense"}, {}])
def test_inner_that_keras_does_not_know(inner):
    with pytest.raises(ValueError, match="not the name or config of an optimizer"):
        tf_dgc.DGCOptimizer(inner)


def test_inner_of_several_optimizers():
    several = O.MultiOptimizer(O.OptimizerMap(O.SGD(0.1)))
    for wrap in (tf_dgc.DGCOptimizer, tf_dgc.CompressedOptimizer):
        with pytest.raises(ValueError, match="`MultiOptimizer` cannot be wrapped"):
            wrap(several)


@pytest.mark.parametrize("strategy", [None, "mirrored", tf.distribute.MirroredStrategy])
def test_prepare_without_a_strategy(strategy):
    with pytest.raises(ValueError, match=r"`prepare` needs a strategy.*Received"):
        tf_dgc.prepare(strategy)


def test_inner_that_is_a_dgc_optimizer():
    with pytest.raises(ValueError, match="itself a DGCOptimizer"):
        tf_dgc.DGCOptimizer(tf_dgc.DGCOptimizer(O.SGD(0.1)))


def test_inner_that_is_built():
    inner = O.SGD(0.1)
    inner.build([keras.Variable(1.0)])
    with pytest.raises(ValueError, match="already built"):
        tf_dgc.DGCOptimizer(inner)


def test_inner_that_scales_the_loss():
    with pytest.raises(ValueError, match="Loss scaling goes outside"):
        tf_dgc.DGCOptimizer(O.LossScaleOptimizer(O.SGD(0.1)))


def test_gradient_accumulation():
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        tf_dgc.DGCOptimizer(O.SGD(0.1, gradient_accumulation_steps=4))


@pytest.mark.parametrize("size", [-1, 1.5])
def test_min_compress_size(size):
    with pytest.raises(ValueError, match="min_compress_size"):
        tf_dgc.DGCOptimizer(O.SGD(0.1), min_compress_size=size)


def test_model_without_trainable_variables(strategies):
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.ReLU()])
        model.compile(tf_dgc.DGCOptimizer(O.SGD(0.1)), "mse")
    with pytest.raises(ValueError, match="no trainable variables"):
        model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0)
    with pytest.raises(ValueError, match="no trainable variables"):
        tf_dgc.DGCOptimizer(O.SGD(0.1)).build([])


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_dtype(dtype):
    variable = keras.Variable(np.zeros((3, 3)), dtype=dtype, trainable=False)
    with pytest.raises(ValueError, match=f"dtype {dtype}"):
        tf_dgc.DGCOptimizer(O.SGD(0.1)).build([variable])


def test_optimizer_of_another_strategy(strategies):
    optimizer = tf_dgc.DGCOptimizer(O.SGD(0.1))
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="different strategies"):
        model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    outside = keras.Variable(np.zeros((3, 3)))
    with strategies[2].scope():
        other = tf_dgc.DGCOptimizer(O.SGD(0.1))
        with pytest.raises(ValueError, match="different strategies"):
            other.build([outside])


def test_applied_outside_a_replica(strategies):
    with strategies[2].scope():
        variable = keras.Variable(np.zeros((3, 3), "float32"))
        optimizer = tf_dgc.DGCOptimizer(O.SGD(0.1))
        optimizer.build([variable])
        with pytest.raises(ValueError, match="replica context"):
            optimizer.apply([tf.ones((3, 3))], [variable])
    with pytest.raises(ValueError, match="scope of the same strategy"):
        optimizer.apply([tf.ones((3, 3))], [variable])


def test_unknown_variable():
    optimizer = tf_dgc.DGCOptimizer(O.SGD(0.1))
    optimizer.build([keras.Variable(np.zeros((3, 3)))])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([tf.ones((3, 3))], [keras.Variable(np.zeros((3, 3)))])


def test_number_of_gradients():
    variable = keras.Variable(np.zeros((3, 3)))
    with pytest.raises(ValueError, match="one gradient per variable"):
        tf_dgc.DGCOptimizer(O.SGD(0.1)).apply([tf.ones(3), tf.ones(3)], [variable])


def test_strategy_that_is_not_supported():
    strategy = tf.distribute.experimental.CentralStorageStrategy(
        ["CPU:0", "CPU:1"], "CPU:0"
    )
    with strategy.scope(), pytest.raises(ValueError, match="MirroredStrategy"):
        tf_dgc.DGCOptimizer(O.SGD(0.1))


def test_monitor_without_dgc_optimizer():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    monitor = tf_dgc.callbacks.CompressionMonitor()
    with pytest.raises(ValueError, match="DGCOptimizer"):
        model.fit(np.ones((8, 4)), np.ones((8, 2)), callbacks=[monitor], verbose=0)


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
        (json.dumps({"cluster": CLUSTER, "task": "type"}), "cannot be read"),
        (json.dumps({"cluster": CLUSTER}), "names a task not in its cluster"),
    ],
)
def test_tf_config(monkeypatch, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=message) as error:
        tf_dgc.DGCOptimizer(O.SGD(0.1))
    assert text in str(error.value)


@pytest.mark.parametrize("index", [1, "1", 1.0])
@pytest.mark.parametrize("hosts", [["a:1", "b:2"], {"0": "a:1", "1": "b:2"}])
def test_tf_config_may_be_what_tensorflow_takes(monkeypatch, hosts, index):
    config = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert resolver.task_id == 1
    tf_config.check_tf_config()


def test_tf_config_without_a_strategy(monkeypatch):
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": task}))
    with pytest.raises(ValueError, match=r"`with strategy.scope\(\):`.*Received"):
        tf_dgc.DGCOptimizer(O.SGD(0.1))
    with pytest.raises(ValueError, match="each of them trains alone"):
        tf_dgc.prepare(tf.distribute.get_strategy())
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
    """Other than TensorFlow's error, ours says what to do, and nobody is waited for."""
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": task}))
    tf.constant(1.0)
    with pytest.raises(RuntimeError, match="at program startup"):
        tf.distribute.MultiWorkerMirroredStrategy()
    with pytest.raises(RuntimeError, match=r"Move `strategy = .*top of the program"):
        tf_dgc.multi_worker_strategy()


@pytest.mark.parametrize("seconds", ["0", "-1", "soon"])
def test_timeout_variable(monkeypatch, seconds):
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, seconds)
    with pytest.raises(ValueError, match="TF_DGC_TIMEOUT"):
        workers.timeout_seconds()


@pytest.mark.parametrize(
    ("package", "version"),
    [("tensorflow", "2.20.0"), ("keras", "2.15.0"), ("python", "3.9.1")],
)
def test_versions_outside_the_supported_range(package, version):
    with pytest.raises(ImportError, match=f"{package} {version} is installed"):
        _versions.check_supported({package: version})


def test_versions_here_are_supported():
    _versions.check_supported(
        {
            "python": _versions.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        }
    )

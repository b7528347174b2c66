"""`ServerOptimizer` by itself: errors, config and saved files."""

import json
import os
import socket
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc.cli import main
from tf_dgc.multiworker.launch import launcher
from tf_dgc.server import model_spec, process, tasks

CLUSTER = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]}


def set_task(monkeypatch, job="worker", index=1, cluster=CLUSTER):
    task = {"type": job, "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


@pytest.fixture(autouse=True)
def _worker(monkeypatch):
    set_task(monkeypatch)


BY_RATE = tf_dgc.StalenessCorrection("rate")
BY_DELAY = tf_dgc.StalenessCorrection("delay")


def sgd(**settings):
    return keras.optimizers.SGD(0.1, momentum=0.9, **settings)


def test_tasks(monkeypatch):
    assert tasks.find_task() == tasks.Task(("127.0.0.1:1",), 2, 1)
    assert tasks.find_task().is_loopback
    set_task(monkeypatch, "ps", 0)
    assert tasks.find_task().worker is None
    set_task(monkeypatch, cluster={**CLUSTER, "chief": ["a:1"], "ps": ["b:1"]})
    assert tasks.find_task() == tasks.Task(("b:1",), 3, 2)
    assert not tasks.find_task().is_loopback


@pytest.mark.parametrize(
    "cluster, job, text",
    [
        ({"worker": ["a:1", "b:1"]}, "worker", "a cluster without a task of type `ps`"),
        ({**CLUSTER, "other": ["a:1", "b:1"]}, "other", "task other 1"),
    ],
)
def test_cluster_without_a_server_raises(monkeypatch, cluster, job, text):
    set_task(monkeypatch, job, cluster=cluster)
    with pytest.raises(ValueError, match=text):
        tf_dgc.ServerOptimizer(sgd())


def test_missing_cluster_raises(monkeypatch):
    monkeypatch.delenv("TF_CONFIG")
    with pytest.raises(ValueError, match="tf-dgc run --servers 1 --workers N"):
        tf_dgc.ServerOptimizer(sgd())


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"mode": "fast"}, "`mode` must be one of 'sync', 'async', 'ssp', 'backup'"),
        ({"mode": "backup"}, "needs `quorum`"),
        ({"quorum": 1}, "needs `quorum`.*omit it in other modes"),
        ({"mode": "backup", "quorum": 0}, "1 or more"),
        ({"mode": "backup", "quorum": 3}, "at most the number of workers, 2"),
        (
            {"mode": "backup", "quorum": 1, "compressor": "none"},
            "pass `error_feedback=True`",
        ),
        ({"mode": "async", "staleness_correction": "rate"}, r"StalenessCorrection\("),
        ({"staleness_correction": BY_RATE}, "computed with old weights"),
        (
            {"mode": "ssp", "staleness": 0, "staleness_correction": BY_RATE},
            "old weights",
        ),
        (
            {"mode": "async", "staleness_correction": BY_DELAY, "pull": "sparse"},
            "all of them",
        ),
        ({"mode": "ssp"}, "needs `staleness`"),
        ({"mode": "sync", "staleness": 1}, "omit it in other modes"),
        ({"mode": "ssp", "staleness": -1}, "0 or more"),
        ({"mode": "ssp", "staleness": 1.5}, "whole number of steps"),
        ({"compressor": "sign_sgd"}, "which is a vote"),
        ({"compressor": "power_sgd"}, "keeps a state"),
        ({"compressor": "scale_com"}, "reads the residual"),
        ({"compressor": "no_such"}, "no_such"),
        ({"min_compress_size": -1}, "min_compress_size"),
        ({"pull": "all"}, '"whole" or "sparse"'),
        ({"pull_sparsity": 0.9}, 'is for `pull="sparse"`'),
        ({"pull": "sparse", "pull_sparsity": 1.0}, "number in"),
        ({"pull": "sparse", "compressor": "qsgd"}, "Pass `pull_sparsity`"),
        (
            {"compressor": "qsgd", "corrections": tf_dgc.Corrections(momentum=True)},
            "needs error feedback",
        ),
        ({"inner": sgd(use_ema=True)}, "use_ema"),
        ({"inner": sgd(gradient_accumulation_steps=2)}, "pushes in every call"),
        ({"inner": keras.optimizers.SGD(lambda: 0.1)}, "cannot run a function"),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(ValueError, match=text):
        tf_dgc.ServerOptimizer(**{"inner": sgd(), **settings})


def test_invalid_corrections_raise():
    with pytest.raises(ValueError, match='must be "rate" or "delay"'):
        tf_dgc.StalenessCorrection("all")
    with pytest.raises(ValueError, match='is for `rule="delay"`'):
        tf_dgc.StalenessCorrection("rate", 1.0)
    with pytest.raises(ValueError, match="`strength` must be a finite number above 0"):
        tf_dgc.StalenessCorrection("delay", 0)


def test_optimizer_in_a_strategy_raises(strategies):
    with strategies[2].scope(), pytest.raises(ValueError, match="without a strategy"):
        tf_dgc.ServerOptimizer(sgd())


def test_model_in_a_strategy_raises(strategies):
    with strategies[2].scope():
        variable = keras.Variable(np.zeros([2, 2]), name="kernel")
    message = "Move the call that creates the model out of.*Received: variable kernel"
    with pytest.raises(ValueError, match=message):
        tf_dgc.ServerOptimizer(sgd()).build([variable])


def test_variable_with_a_constraint_raises():
    bounded = keras.Variable(np.zeros([2, 2]))
    bounded.constraint = keras.constraints.NonNeg()
    with pytest.raises(ValueError, match="constraint"):
        tf_dgc.ServerOptimizer(sgd()).build([bounded])


def test_missing_gradient_raises():
    optimizer = tf_dgc.ServerOptimizer(sgd())
    variables = [keras.Variable(np.zeros([2, 2]), name=f"v{i}") for i in range(2)]
    optimizer.build(variables)
    with (
        pytest.warns(UserWarning, match="Gradients do not exist"),
        pytest.raises(ValueError, match="1 gradients for 2 variables"),
    ):
        optimizer.apply([tf.ones([2, 2]), None], variables)


def test_xla_raises():
    optimizer = tf_dgc.ServerOptimizer(sgd())
    variable = keras.Variable(np.zeros([2, 2]))
    optimizer.build([variable])
    step = tf.function(lambda g: optimizer.apply([g], [variable]), jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=False"):
        step(tf.ones([2, 2]))


def test_unreachable_server_raises(monkeypatch):
    monkeypatch.setenv("TF_DGC_START_TIMEOUT", "0.1")
    monkeypatch.setenv("TF_DGC_TIMEOUT", "0.2")
    optimizer = tf_dgc.ServerOptimizer(sgd())
    optimizer.build([keras.Variable(np.zeros([2, 2]))])
    with pytest.raises(RuntimeError, match=r"finds no server at 127.0.0.1:1 within"):
        optimizer.join()


def test_methods_of_an_unbuilt_optimizer():
    optimizer = tf_dgc.ServerOptimizer(sgd())
    for method in (optimizer.join, optimizer.pull_weights):
        with pytest.raises(ValueError, match="needs a built optimizer"):
            method()
    optimizer.leave()
    assert optimizer.stats.steps == 0


def test_config_round_trip():
    method = tf_dgc.compressors.TopK(0.99, "bfloat16")
    optimizer = tf_dgc.ServerOptimizer(
        sgd(clipnorm=1.0), "ssp", 3, compressor=method, seed=4, name="mine"
    )
    config = json.loads(json.dumps(optimizer.get_config()))
    again = tf_dgc.ServerOptimizer.from_config(config)
    assert again.get_config() == optimizer.get_config()
    assert (again.mode, again.staleness, again.clipnorm) == ("ssp", 3, 1.0)
    assert again.inner_optimizer.momentum == 0
    assert "mode='ssp'" in repr(again)


def test_model_spec():
    rule = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    biases = [keras.Variable(np.zeros([2]), name="bias")]
    kernels = [keras.Variable(np.zeros([2, 2]), name="kernel")]
    rule.exclude_from_weight_decay(var_list=biases)
    spec = model_spec.create_model_spec(
        {"mode": "async"},
        2,
        rule,
        tf_dgc.compressors.TopK(),
        biases + kernels,
        [True, False],
        [False] * 2,
    )
    assert [v["decays"] for v in spec["variables"]] == [False, True]
    assert json.loads(model_spec.model_spec_text(spec)) == spec
    assert model_spec.spec_difference(spec, spec) is None


def test_model_is_loaded_without_a_cluster(monkeypatch, tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(tf_dgc.ServerOptimizer(sgd()), "mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.residual[0].assign(np.ones([3, 2]))
    model.save(tmp_path / "model.keras")
    monkeypatch.delenv("TF_CONFIG")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    np.testing.assert_array_equal(loaded.optimizer.residual[0].numpy(), np.ones([3, 2]))
    assert loaded.optimizer.num_workers == 1
    loaded.predict(np.zeros([1, 3]), verbose=0)
    with pytest.raises(RuntimeError, match="was loaded outside of a cluster"):
        loaded.fit(np.zeros([4, 3]), np.zeros([4, 2]), verbose=0)


def test_build_without_variables_as_in_keras():
    optimizer = tf_dgc.ServerOptimizer(sgd())
    optimizer.build([])
    assert optimizer.built
    optimizer.apply([])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([np.ones((3, 3))], [keras.Variable(np.ones((3, 3)))])


def test_frozen_model_is_loaded(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(tf_dgc.ServerOptimizer(sgd()), "mse")
    model.optimizer.build(model.trainable_variables)
    model.trainable = False
    model.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="no trainable variables"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.built  # for no variables, as in Keras


def test_serve_needs_the_task_of_a_server(capsys):
    assert main.main(["serve"]) == 1
    assert "This process must be a server" in capsys.readouterr().err


def test_address_in_use_is_reported(monkeypatch, capsys):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        set_task(monkeypatch, "ps", 0, {**CLUSTER, "ps": [address]})
        assert main.main(["serve"]) == 1
    assert f"the server cannot listen on {address}" in capsys.readouterr().err


@pytest.mark.parametrize("secret", ["", "of ours"])
def test_serves_until_all_workers_have_left(monkeypatch, capsys, secret):
    """A server that other machines can reach warns if it has no secret."""
    monkeypatch.setenv("TF_DGC_SECRET", secret)
    (port,) = launcher.free_ports(1)
    monkeypatch.setattr(process.ServerLoop, "run", lambda loop: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    set_task(monkeypatch, "ps", 0, {**CLUSTER, "ps": [f"0.0.0.0:{port}"]})
    with pytest.raises(SystemExit, match="0"):
        tf_dgc.ServerOptimizer(sgd())
    printed = capsys.readouterr().out
    assert f"listens on 0.0.0.0:{port}, for 2 workers" in printed
    assert ("WARNING: anyone who can reach this address" in printed) is (not secret)

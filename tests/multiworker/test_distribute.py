"""The cross-device hook that `prepare` installs on a strategy."""

import itertools
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc._internals import tf_collectives
from tf_dgc.multiworker import cross_device
from tf_dgc.multiworker.strategy import prepare


def collectives(graph):
    """Return the names of all collective ops in a graph and its functions."""
    functions = graph.as_graph_def().library.function
    nodes = [*graph.as_graph_def().node, *(n for f in functions for n in f.node_def)]
    return sorted(n.op for n in nodes if n.op.startswith("Collective"))


@pytest.mark.parametrize(
    ("sparsity", "expected"),
    [
        (0.999, ["CollectiveGatherV2"]),
        pytest.param(0.0, ["CollectiveReduceV2"], marks=pytest.mark.slow),
        # 75 %, the lowest sparsity, makes no step dense.
        pytest.param(
            tf_dgc.schedules.WarmupSparsity(4),
            ["CollectiveGatherV2"],
            marks=pytest.mark.slow,
        ),
        # One of the two runs in each step.
        (
            tf_dgc.schedules.WarmupSparsity(4, stages=[0.0]),
            ["CollectiveGatherV2", "CollectiveReduceV2"],
        ),
    ],
    ids=["sparse", "dense", "schedule", "dense first"],
)
def test_many_variables_cost_one_collective_per_step(strategies, sparsity, expected):
    shapes = [(40, 40), (40,)] * 6
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), sparsity),
        initial_weights("float32", shapes),
        traced=True,
    )
    (gradients,) = make_gradients(2, 1, "float32", shapes)
    concrete = trainer._run.get_concrete_function(trainer.per_replica(gradients))
    # Two workers live in this process, each with its own op.
    assert collectives(concrete.graph) == sorted(2 * expected)
    trainer.step(gradients)
    assert trainer.optimizer.stats.steps == 1


def test_stock_optimizer_for_comparison(strategies):
    """`collectives` also counts those of stock TensorFlow."""
    shapes = [(40, 40), (40,)] * 3
    trainer = Trainer(
        strategies[2],
        lambda: keras.optimizers.SGD(0.1),
        initial_weights("float32", shapes),
        traced=True,
    )
    (gradients,) = make_gradients(2, 1, "float32", shapes)
    concrete = trainer._run.get_concrete_function(trainer.per_replica(gradients))
    assert "CollectiveReduceV2" in collectives(concrete.graph)


def test_other_methods_are_those_of_the_base(strategies):
    strategy = prepare(strategies[2])
    hook = cross_device.cross_device_ops(strategy)
    assert isinstance(hook, tf.distribute.CrossDeviceOps)
    assert not isinstance(hook.base, tf_dgc.CompressedCrossDeviceOps)

    @tf.function
    def run():
        def replica():
            context = tf.distribute.get_replica_context()
            rank = tf.cast(context.replica_id_in_sync_group, tf.float32)
            total = context.all_reduce("SUM", rank + 1)
            gathered = context.all_gather(tf.reshape(rank, [1]), axis=0)
            return rank, total, gathered

        return strategy.run(replica)

    ranks, totals, gathered = run()
    assert float(strategy.reduce("SUM", ranks, axis=None)) == 1
    assert float(strategy.reduce("MEAN", ranks, axis=None)) == 0.5
    assert [float(t) for t in strategy.experimental_local_results(totals)] == [3, 3]
    for local in strategy.experimental_local_results(gathered):
        np.testing.assert_array_equal(local, [0, 1])
    with strategy.scope():
        variable = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    strategy.run(lambda: variable.assign_add(2.0))
    assert float(variable.read_value()) == 4


def test_private_methods_are_those_of_the_base(strategies):
    hook = cross_device.cross_device_ops(strategies[2])
    for name in cross_device._DELEGATED:
        assert getattr(hook, name) == getattr(hook.base, name), name
    assert {"_all_reduce", "_gather", "_num_between_graph_workers"} <= (
        cross_device._DELEGATED
    )


def test_prepare_is_idempotent(strategies):
    strategy = strategies[2]
    assert tf_dgc.prepare(strategy) is strategy
    hook = tf_collectives.get_cross_device_ops(strategy)
    tf_dgc.prepare(strategy)
    assert tf_collectives.get_cross_device_ops(strategy) is hook


def test_an_optimizer_replaces_the_hook_of_prepare():
    class Strategy(tf.distribute.MirroredStrategy):
        _collective_key_base = 200_000

    strategy = tf_dgc.prepare(Strategy(["CPU:0", "CPU:1"]))
    plain = tf_collectives.get_cross_device_ops(strategy)
    assert not isinstance(plain, tf_dgc.CompressedCrossDeviceOps)
    plain.all_gather([tf.constant([1]), tf.constant([2])])
    with strategy.scope():
        tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1), 0.97)
    hook = tf_collectives.get_cross_device_ops(strategy)
    assert isinstance(hook, tf_dgc.CompressedCrossDeviceOps)
    assert cross_device.cross_device_ops(strategy) is hook
    assert hook.count() == plain.count() == {None: [1, 1]}
    hook.all_gather([tf.constant([1]), tf.constant([2])])
    assert hook.count() == plain.count() == {None: [2, 2]}
    assert hook.num_keys == plain.num_keys == 1


@pytest.mark.parametrize(
    "cross_device_ops",
    [tf.distribute.ReductionToOneDevice, tf.distribute.HierarchicalCopyAllReduce],
)
def test_user_defined_cross_device_ops(strategies, cross_device_ops):
    class Strategy(tf.distribute.MirroredStrategy):
        _collective_key_base = 100_000

    weights = initial_weights("float32")
    steps = make_gradients(2, 3, "float32")
    results = []
    for strategy in (
        strategies[2],
        Strategy(["CPU:0", "CPU:1"], cross_device_ops=cross_device_ops()),
    ):
        trainer = Trainer(
            strategy,
            lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1), 0.97),
            weights,
        )
        for gradients in steps:
            trainer.step(gradients)
        results.append(trainer.weights())
    for value, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3,), (2, 3), (3, 2), (4, 1, 7)])
def test_key_of_a_collective_is_that_of_its_tensor(shape):
    """Also if one worker knows the shape while tracing, and another does not."""
    key = int(tf_collectives.collective_key("all_reduce", tf.zeros(shape)))
    assert 0 < key < 2**31
    for static_shape in ([None] * len(shape), None):
        spec = tf.TensorSpec(static_shape, tf.float32)
        compute_key = tf.function(
            lambda x: tf_collectives.collective_key("all_reduce", x),
            input_signature=[spec],
        )
        assert compute_key(tf.zeros(shape)) == key


def test_keys_of_collectives_differ():
    tensors = [tf.zeros(s) for s in [(), (1,), (5,), (6,), (2, 3), (3, 2), (6, 1)]]
    tensors += [tf.zeros((6,), t) for t in ("float64", "int32", "float16")]
    kinds = itertools.product(("all_reduce", "_all_gather"), tensors)
    keys = [int(tf_collectives.collective_key(*kind)) for kind in kinds]
    assert len(set(keys)) == 2 * len(tensors)


def test_more_steps_need_no_more_keys(strategies, monkeypatch):
    """TensorFlow never frees the memory of a key."""
    used = []
    stock = tf_collectives.collective_key

    def key_of(kind, tensor):
        key = stock(kind, tensor)
        tf.py_function(lambda k: used.append(int(k)), [key], [])
        return key

    monkeypatch.setattr(tf_collectives, "collective_key", key_of)
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(
            keras.optimizers.SGD(0.1),
            0.97,
            diagnostics=tf_dgc.Diagnostics(check_every=2),
        ),
        initial_weights("float32"),
    )
    first, second, *others = make_gradients(2, 6, "float32")
    trainer.step(first)  # with checksums
    trainer.step(second)
    assert len(set(used)) == 2
    hook = cross_device.cross_device_ops(strategies[2])
    num_keys = hook.num_keys
    for gradients in others:
        trainer.step(gradients)
    assert used == used[:4] * 3  # of two replicas
    assert hook.num_keys == num_keys


IMPORT = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import tensorflow as tf, keras
from tensorflow.python.distribute import cross_device_ops, cross_device_utils
from tensorflow.python.eager import context
classes = [
    tf.distribute.Strategy, tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy, tf.distribute.CrossDeviceOps,
    cross_device_ops.CollectiveAllReduce, cross_device_utils.CollectiveReplicaLauncher,
    keras.Model, keras.Variable, keras.optimizers.Optimizer, keras.optimizers.SGD,
    keras.optimizers.LossScaleOptimizer, tf.train.Checkpoint,
    tf.train.CheckpointManager,
]
wrapped = {{
    keras.Model: ["evaluate", "fit", "predict"],
    tf.train.Checkpoint: ["read", "restore", "save", "write"],
    tf.train.CheckpointManager: ["save"],
}}
def snapshot():
    return [dict(vars(c)) for c in classes]
before, environment = snapshot(), dict(os.environ)
import tf_dgc
assert context.context()._context_handle is None, "importing initialized devices"
{use}
assert dict(os.environ) == environment
for c, old, new in zip(classes, before, snapshot()):
    changed = [k for k in new if not k.startswith("_abc") and new[k] is not old.get(k)]
    assert sorted(changed) == ({expected}).get(c, []), (c, changed)
"""
USE = """
strategy = tf_dgc.prepare(tf.distribute.MultiWorkerMirroredStrategy())
with strategy.scope():
    tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1)).build([keras.Variable([[1.0]])])
"""
OTHER_STRATEGY = """from tf_dgc._internals import keras_trainer
class Callback(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        assert keras_trainer.running_loop() is None
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.ones([2, 1])))
assert model.fit(data, callbacks=[Callback()], verbose=0).history["loss"]
assert "train_step" not in vars(model) and "save" not in vars(model)
"""


@pytest.mark.slow
@pytest.mark.parametrize("use", ["", USE], ids=["import", "use"])
def test_no_side_effects_on_tensorflow_or_keras(use):
    """Importing patches no class; using the package wraps the documented methods."""
    program = IMPORT.format(use=use, expected="wrapped" if use else "{}")
    program += OTHER_STRATEGY  # for whose models the wrapped loops are Keras's own
    subprocess.run([sys.executable, "-c", program], check=True)

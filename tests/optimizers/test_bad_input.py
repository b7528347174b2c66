"""Errors about wrong input say what was passed and what to do."""

import inspect
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc.optimizers.gradients import match_gradients

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


@pytest.mark.parametrize("uncompressed_dtype", ["float16", "mxfp4", "sign", "", 16])
def test_uncompressed_dtype(uncompressed_dtype):
    with pytest.raises(ValueError, match="`uncompressed_dtype` must be None or one of"):
        tf_dgc.DGCOptimizer(
            keras.optimizers.SGD(0.1), uncompressed_dtype=uncompressed_dtype
        )


@pytest.mark.parametrize("value_dtype", ["float64", "int8", "", 16, tf.bfloat16])
def test_value_dtype(value_dtype):
    with pytest.raises(ValueError, match=r"None or one of float32.*Received: value_dt"):
        tf_dgc.DGCOptimizer(O.SGD(0.1), value_dtype=value_dtype)


def test_sparsity_of_numpy():
    assert tf_dgc.DGCOptimizer("sgd", np.float32(0.75)).sparsity == 0.75


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


@pytest.mark.parametrize("size", [-1, 1.5, None, math.inf])
def test_min_compress_size(size):
    with pytest.raises(ValueError, match="min_compress_size"):
        tf_dgc.DGCOptimizer(O.SGD(0.1), min_compress_size=size)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 0.5, None])
@pytest.mark.parametrize(
    "make",
    [
        lambda seed: tf_dgc.DGCOptimizer("adam", seed=seed),
        lambda seed: tf_dgc.LocalOptimizer("adam", 2, seed=seed),
    ],
)
def test_seed(make, seed):
    with pytest.raises(ValueError, match=r"`seed` must be a whole number.*Received"):
        make(seed)
    assert make(np.int32(7)).seed == 7


@pytest.mark.filterwarnings("ignore:The model does not have any trainable:UserWarning")
def test_model_without_trainable_variables(strategies, tmp_path):
    """Nothing is trained, as in Keras."""
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.ReLU()])
        model.compile(tf_dgc.DGCOptimizer(O.SGD(0.1)), "mse")
    history = model.fit(np.ones((8, 4)), np.zeros((8, 4)), verbose=0).history
    assert history["loss"] == [1.0]
    assert model.optimizer.built and model.optimizer.stats.steps == 0
    model.save(tmp_path / "m.keras")


WRAPPERS = {
    "dgc": lambda: tf_dgc.DGCOptimizer(O.Nadam(0.1)),
    "local": lambda: tf_dgc.LocalOptimizer(O.Adam(0.1), 2),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_optimizer_is_built_without_variables_as_in_keras(wrapper):
    optimizer, plain = WRAPPERS[wrapper](), O.Nadam(0.1)
    variable = keras.Variable(np.ones((3, 3)))
    for instance in (optimizer, plain):
        instance.build([])
        assert instance.built
        instance.apply([])
        with pytest.raises(ValueError, match="Unknown variable"):
            instance.apply([np.ones((3, 3))], [variable])
    assert optimizer.stats.steps == 0
    optimizer.finalize_variable_values([])


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_dtype(dtype):
    variable = keras.Variable(np.zeros((3, 3)), dtype=dtype, trainable=False)
    with pytest.raises(ValueError, match=f"dtype {dtype}"):
        tf_dgc.DGCOptimizer(O.SGD(0.1)).build([variable])


MODEL_OUTSIDE = "Move the call that creates the model"
OPTIMIZER_OUTSIDE = (
    r"Move the call of `\w+\(...\)`, or of the function that returns it, into"
)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf_dgc.DGCOptimizer(O.SGD(0.1)),
        lambda: tf_dgc.CompressedOptimizer(O.SGD(0.1), "top_k"),
        lambda: tf_dgc.local_sgd(O.SGD(0.1), 2),
    ],
)
@pytest.mark.parametrize(
    ("model_replicas", "optimizer_replicas", "message"),
    [
        (2, 1, OPTIMIZER_OUTSIDE),
        (1, 2, MODEL_OUTSIDE),
        (2, 4, "were created under different strategies. Create one strategy"),
    ],
)
def test_objects_created_outside_the_scope(
    strategies, make, model_replicas, optimizer_replicas, message
):
    """In `fit`, in a custom loop, and in `build`."""
    with strategies[model_replicas].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with strategies[optimizer_replicas].scope():
        optimizer = make()
        with pytest.raises(ValueError, match=message) as building:
            optimizer.build(model.trainable_variables)
    variables = model.trainable_variables

    def step():
        optimizer.apply_gradients([(tf.ones(v.shape), v) for v in variables])

    texts = [str(building.value)]
    for strategy in {model_replicas, optimizer_replicas} - {1}:
        with pytest.raises(ValueError, match=message) as applying:
            strategies[strategy].run(step)
        texts.append(str(applying.value))
    model.compile(optimizer, "mse", run_eagerly=True)
    with pytest.raises(ValueError, match=message) as fitting:
        model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    for text in (*texts, str(fitting.value)):
        assert "0x" not in text
        assert type(optimizer).__name__ in text
        received = text.partition("Received: variable ")[2]
        assert received.startswith(variables[0].path)
        for number, who in ((model_replicas, "created"), (optimizer_replicas, "and a")):
            where = f"of {number} replicas" if number > 1 else "outside of any scope"
            assert where in received.partition(who)[2], received


def test_applied_outside_a_replica(strategies):
    with strategies[2].scope():
        variable = keras.Variable(np.zeros((3, 3), "float32"))
        optimizer = tf_dgc.DGCOptimizer(O.SGD(0.1))
        optimizer.build([variable])
        with pytest.raises(ValueError, match="replica context"):
            optimizer.apply([tf.ones((3, 3))], [variable])
    message = r"outside of the strategy.*in a function that is passed to `strategy.run`"
    with pytest.raises(ValueError, match=message):
        optimizer.apply([tf.ones((3, 3))], [variable])
    with pytest.raises(ValueError, match=message):
        tf_dgc.prepare(strategies[4]).run(lambda: optimizer.apply([tf.ones((3, 3))]))


class WrongType:
    """An object that no argument accepts, with the default `repr`."""


CONSTRUCTORS = [
    (tf_dgc.DGCOptimizer, {"inner": "sgd"}),
    (tf_dgc.CompressedOptimizer, {"inner": "sgd", "compressor": "top_k"}),
    (tf_dgc.LocalOptimizer, {"inner": "sgd", "period": 2}),
    (tf_dgc.ServerOptimizer, {"inner": "sgd"}),
    (tf_dgc.dgc_for_steps, {"inner": "sgd", "steps": 10}),
    (tf_dgc.sparse_loco, {"inner": "sgd"}),
    (tf_dgc.NovoGrad, {}),
    (tf_dgc.DelayedNesterov, {}),
    (tf_dgc.callbacks.BackupAndRestore, {"backup_dir": "backup"}),
    *((method, {}) for method in tf_dgc.compressors.METHODS.values()),
]


@pytest.mark.parametrize(
    ("make", "required"), CONSTRUCTORS, ids=[make.__name__ for make, _ in CONSTRUCTORS]
)
def test_errors_show_no_addresses(make, required):
    refused = []
    keras_arguments = {"name", "learning_rate", "kwargs"}
    for name in set(inspect.signature(make).parameters) - keras_arguments:
        try:
            make(**{**required, name: WrongType()})
        except Exception as error:
            refused.append(name)
            assert "0x" not in str(error), name
    assert refused or not required


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf_dgc.DGCOptimizer(O.SGD(1.0), 0.9),
        lambda: tf_dgc.LocalOptimizer(O.SGD(1.0), 2),
    ],
)
def test_no_gradient_at_all_is_no_step(make):
    """As in Keras, before and after the build."""
    variable, optimizer = keras.Variable(np.zeros((40, 50), "float32")), make()
    optimizer.apply([], [])
    assert not optimizer.built
    with pytest.raises(ValueError, match=r"not yet built\. .*Received: 1 gradients"):
        optimizer.apply([tf.ones((40, 50))])
    optimizer.apply([tf.ones((40, 50))], [variable])
    optimizer.apply([], [])
    optimizer.apply([])
    assert int(optimizer.iterations) == 1


def make_slices(shape):
    return tf.IndexedSlices(tf.ones(shape), tf.constant([0, 3]), (40, 50))


@pytest.mark.parametrize(
    ("gradient", "shape"),
    [
        (tf.ones((50, 40)), (40, 50)),
        (tf.ones(2000), (40, 50)),
        (np.ones((3, 1)), (1, 3)),
        ([1.0], ()),
        (make_slices((2, 40)), (40, 50)),
        (make_slices((2, 50, 1)), (40, 50)),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: tf_dgc.DGCOptimizer(O.SGD(1.0), 0.9),
        lambda: tf_dgc.DGCOptimizer(O.SGD(1.0, gradient_accumulation_steps=2), 0.0),
        lambda: tf_dgc.LocalOptimizer(O.SGD(1.0), 2),
    ],
)
def test_gradient_of_another_shape(make, gradient, shape):
    """Also with the same number of entries, as a transposed one."""
    variable = keras.Variable(np.zeros(shape, "float32"), name="kernel")
    with pytest.raises(
        ValueError, match=r"gradient of kernel must .*Received: .*shape"
    ):
        make().apply([gradient], [variable])
    assert not np.any(variable.numpy())


@pytest.mark.slow
def test_gradient_without_a_static_shape():
    variable = keras.Variable(np.zeros((40, 50), "float32"))
    optimizer = tf_dgc.DGCOptimizer(O.SGD(1.0), 0.0)

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def match(gradient):
        (gradient_of_variable,), _ = match_gradients(optimizer, [gradient], [variable])
        return gradient_of_variable

    assert match(tf.ones((40, 50))).shape == (40, 50)

"""`jit_compile=True` without a strategy gives equal results, or raises an error."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from selection import in_turn, rows

import tf_dgc
from tf_dgc import compressors, native_library, schedules
from tf_dgc.steps import native

pytestmark = pytest.mark.filterwarnings("ignore:XLA compiles this step")
SHAPE = (12, 10)
STEPS = 3
RATE = 0.1


def train(optimizer, jit_compile):
    """Return weights and stats after a few steps."""
    rng = np.random.default_rng(1)
    variable = keras.Variable(rng.normal(size=SHAPE).astype("float32"))
    optimizer.build([variable])

    @tf.function(jit_compile=jit_compile)
    def step(gradient):
        optimizer.apply([gradient], [variable])

    for _ in range(STEPS):
        step(tf.constant(rng.normal(size=SHAPE).astype("float32")))
    return variable.numpy(), optimizer.stats


def compare(make_optimizer):
    """Train with and without compilation; compare, and return the stats of both."""
    plain, plain_stats = train(make_optimizer(), False)
    compiled, compiled_stats = train(make_optimizer(), True)
    np.testing.assert_allclose(compiled, plain, rtol=1e-5, atol=1e-6)
    assert compiled_stats.entries == plain_stats.entries
    assert compiled_stats.nonfinite == plain_stats.nonfinite
    return plain_stats, compiled_stats


def alternating(step):
    return 0.9 - 0.1 * tf.cast(step % 2, tf.float64)


SCHEDULES = {
    "warm-up": schedules.WarmupSparsity(2, 0.95, stages=(0.5, 0.75)),
    "with a dense stage": schedules.PiecewiseConstantSparsity([1, 2], [0.0, 0.5, 0.9]),
    "any function": alternating,
}


@pytest.mark.parametrize(
    ("schedule", "value_dtype"),
    in_turn(SCHEDULES, [None, "bfloat16"], []),
)
def test_schedules_of_dgc(schedule, value_dtype):
    """The compiled step has room for the lowest sparsity of the schedule."""

    def make_optimizer():
        return tf_dgc.DGCOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9),
            SCHEDULES[schedule],
            min_compress_size=0,
            value_dtype=value_dtype,
            diagnostics=tf_dgc.Diagnostics(track_staleness=True),
        )

    plain, compiled = compare(make_optimizer)
    assert compiled.bytes_per_step >= plain.bytes_per_step


@pytest.mark.slow
def test_a_corrected_adam():
    compare(
        lambda: tf_dgc.DGCOptimizer(
            keras.optimizers.AdamW(0.01),
            SCHEDULES["with a dense stage"],
            min_compress_size=0,
        )
    )


LOCAL = {
    "local_sgd": lambda: tf_dgc.local_sgd(keras.optimizers.SGD(0.1, momentum=0.9), 2),
    "diloco": lambda: tf_dgc.diloco(keras.optimizers.Adam(0.1), 2),
}


@pytest.mark.parametrize("preset", LOCAL)
def test_local_steps(preset):
    compare(LOCAL[preset])


@pytest.mark.parametrize("schedule", rows(SCHEDULES, []))
def test_schedules_of_top_k(schedule):
    compare(
        lambda: tf_dgc.CompressedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9),
            compressors.TopK(SCHEDULES[schedule]),
            corrections=tf_dgc.Corrections(momentum=True),
            min_compress_size=0,
        )
    )


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("value_dtype", ["sign", "mxint8", "mxfp4"])
def test_shared_scales_with_a_schedule_raise(generic, value_dtype):
    """The error comes while the first step is traced and says what to do."""
    sgd, schedule = keras.optimizers.SGD(0.1), SCHEDULES["warm-up"]
    if generic:
        method = compressors.TopK(schedule, value_dtype)
        optimizer = tf_dgc.CompressedOptimizer(sgd, method, min_compress_size=0)
    else:
        optimizer = tf_dgc.DGCOptimizer(
            sgd, schedule, value_dtype=value_dtype, min_compress_size=0
        )
    with pytest.raises(ValueError, match="jit_compile=False"):
        train(optimizer, True)


# XLA draws other numbers from the same seeds.
DRAWN = {"atomo", "count_sketch", "diana", "ecq", "natural", "qsgd", "random_k"}
DRAWN |= {"rotated_quantization", "tern_grad"}


@pytest.mark.parametrize("name", rows(compressors.METHODS, []))
def test_every_method(name):
    """Settings are the defaults, except for phases that are longer than the test."""
    settings = {"lgc": {"dense_steps": 1, "learning_steps": 1, "channels": 2}}

    def make_optimizer():
        return tf_dgc.CompressedOptimizer(
            keras.optimizers.SGD(RATE),
            compressors.METHODS[name](**settings.get(name, {})),
            min_compress_size=0,
        )

    if name in DRAWN:
        check_drawn(make_optimizer())
    else:
        compare(make_optimizer)


def check_drawn(optimizer):
    """Check that the compiled step's sums and residuals add up to the gradients."""
    weights, stats = train(optimizer, True)
    assert stats.steps == STEPS
    rng = np.random.default_rng(1)
    start, *gradients = (rng.normal(size=SHAPE) for _ in range(STEPS + 1))
    total = (start - weights) / RATE
    if optimizer.residual:
        total = total + optimizer.residual[0].numpy() / RATE
        np.testing.assert_allclose(total, sum(gradients), rtol=1e-4, atol=1e-4)
    else:
        assert np.corrcoef(total.ravel(), sum(gradients).ravel())[0, 1] > 0.3


@pytest.mark.filterwarnings("default:XLA compiles this step")
def test_script_on_a_gpu_without_a_strategy(monkeypatch):
    """Keras compiles steps by XLA if there is a GPU; the script trains unchanged."""
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    devices = [*tf.config.list_physical_devices(), gpu]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: devices)
    native.warn_of_xla.cache_clear()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1, 0.9)), "mse")
    assert model.jit_compile
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    expected = (
        pytest.warns(RuntimeWarning, match="XLA compiles this step")
        if native_library.load_library().library is not None
        else contextlib.nullcontext()
    )
    with expected as caught:
        losses = model.fit(x, x[:, :1], epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    if caught is not None:
        assert sum("XLA compiles" in str(w.message) for w in caught) == 1

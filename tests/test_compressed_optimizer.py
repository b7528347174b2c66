"""`CompressedOptimizer`: what holds whatever the method."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import SHAPES, Trainer, initial_weights, make_gradients
from selection import in_turn

import tf_dgc
from tf_dgc import compressors
from tf_dgc._internals import launching
from tf_dgc.collectives.requests import Gather, Result, Sum
from tf_dgc.compressors.base import Compressor
from tf_dgc.compressors.common import one_round
from tf_dgc.testing.simulation import Simulation

O = keras.optimizers  # noqa: E741


def make_trainer(strategy, compressor, inner=None, dtype="float64", **settings):
    inner = inner or (lambda: O.SGD(0.125, momentum=0.9))
    return Trainer(
        strategy,
        lambda: tf_dgc.CompressedOptimizer(inner(), compressor, **settings),
        initial_weights(dtype),
    )


def assert_same_weights(one, other, rtol):
    for a, b in zip(one.weights(), other.weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


# --- against what is known ------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "value_dtype"), in_turn([1, 2], ["bfloat16", None])
)
def test_top_k_with_momentum_correction_is_dgc(strategies, num_workers, value_dtype):
    strategy = strategies[num_workers]
    inner = lambda: O.SGD(0.125, momentum=0.9, nesterov=True, clipnorm=3.0)  # noqa: E731
    generic = make_trainer(
        strategy, compressors.TopK(0.97, value_dtype), inner, momentum_correction=True
    )
    dgc = Trainer(
        strategy,
        lambda: tf_dgc.DGCOptimizer(inner(), 0.97, value_dtype=value_dtype),
        initial_weights(),
    )
    for gradients in make_gradients(num_workers, 6):
        generic.step(gradients)
        dgc.step(gradients)
    assert_same_weights(generic, dgc, 1e-12)
    assert generic.optimizer.stats == dgc.optimizer.stats


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    "inner",
    [
        lambda: O.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=2.0),
        lambda: O.AdamW(0.01, weight_decay=0.1),
    ],
    ids=["nesterov", "adamw"],
)
def test_no_compression_is_the_inner_optimizer(strategies, num_workers, inner):
    wrapped = make_trainer(strategies[num_workers], "none", inner, "float32")
    alone = Trainer(strategies[num_workers], inner, initial_weights("float32"))
    for gradients in make_gradients(num_workers, 4, "float32"):
        wrapped.step(gradients)
        alone.step(gradients)
    assert_same_weights(wrapped, alone, 2e-6)


def test_a_schedule_of_the_sparsity(strategies):
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([2], [0.9, 0.99])
    trainer = make_trainer(strategies[2], compressors.TopK(schedule))
    entries = []
    for gradients in make_gradients(2, 4):
        trainer.step(gradients)
        entries.append(trainer.optimizer.stats.entries_per_step)
    exempt = 50 + 21
    assert entries == [exempt + 350] * 2 + [exempt + 35] * 2


# --- collectives ----------------------------------------------------------------------


class TwoRounds(Compressor):
    """Scales by the largest entry of all workers, then sums."""

    name = "two_rounds"
    kind = "quantization"
    reference = "this test"

    def bytes(self, shape, dtype):
        return None

    def exchange(self, values, state, draw):
        largest = yield from one_round.maximum(tf.reduce_max(tf.abs(values)))
        total = yield Sum(values / largest)
        return Result(total * largest, values)


@pytest.mark.parametrize(
    ("compressor", "gathers", "sums"),
    [
        (compressors.TopK(0.99), 1, 0),
        (compressors.SignSGD(), 1, 0),
        (compressors.RandomK(0.9), 0, 1),
        (compressors.PowerSGD(2), 0, 2),
        (TwoRounds(), 1, 1),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_collectives_of_a_step(strategies, monkeypatch, compressor, gathers, sums):
    """Of all tensors together, the exempt ones included."""
    launched = []

    def spy(name, launch):
        def count(launcher, tensor):
            launched.append(name)
            return launch(launcher, tensor)

        return count

    for name in ("launch_all_gather", "launch_all_reduce"):
        monkeypatch.setattr(launching, name, spy(name, getattr(launching, name)))
    trainer = make_trainer(strategies[2], compressor)
    trainer.step(*make_gradients(2, 1))
    assert launched.count("launch_all_gather") == 2 * gathers
    assert launched.count("launch_all_reduce") == 2 * sums


def test_exempt_tensors_arrive_whole(strategies):
    trainer = make_trainer(strategies[2], "ef_sign_sgd", lambda: O.SGD(1.0))
    before = trainer.weights()
    (gradients,) = make_gradients(2, 1)
    trainer.step(gradients)
    for i, shape in enumerate(SHAPES):
        moved = before[i] - trainer.weights()[i]
        total = gradients[0][i] + gradients[1][i]
        exempt = len(shape) < 2 or np.prod(shape) < 1024
        assert np.allclose(moved, total, rtol=1e-12) == exempt
        assert np.any(trainer.optimizer.residual[i].numpy()) != exempt


def test_missing_gradients_and_empty_variables():
    shapes = [(0, 5), (40, 40), (40, 30)]
    variables = [keras.Variable(np.zeros(s, "float32")) for s in shapes]
    optimizer = tf_dgc.CompressedOptimizer(O.SGD(1.0), "diana", min_compress_size=0)
    optimizer.build(variables)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply(
            [
                tf.zeros((0, 5)),
                None,
                tf.IndexedSlices(tf.ones((1, 30)), tf.constant([3]), (40, 30)),
            ],
            variables,
        )
    assert np.flatnonzero(variables[2].numpy().any(axis=1)) == [3]
    assert not np.any(optimizer.compressor_state[1]["shift"].numpy())


def test_factor_masking_clears_what_was_sent():
    variable = keras.Variable(np.zeros((40, 50), "float32"))
    gradient = np.random.default_rng(0).normal(size=(40, 50)).astype("float32")
    for masking in (True, False):
        optimizer = tf_dgc.CompressedOptimizer(
            O.SGD(1.0, momentum=0.9),
            compressors.RandomK(0.9),
            momentum_correction=True,
            factor_masking=masking,
        )
        optimizer.build([variable])
        variable.assign(np.zeros((40, 50)))
        optimizer.apply([gradient], [variable])
        sent = variable.numpy() != 0
        assert np.count_nonzero(sent) == 200
        velocity = optimizer.velocity[0].numpy()
        np.testing.assert_array_equal(velocity, np.where(sent & masking, 0, gradient))


# --- in Keras -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:tf_dgc. there is one worker")
@pytest.mark.parametrize(
    ("name", "num_workers"), in_turn(["diana", "power_sgd"], [2, 1])
)
def test_state_survives_saving(strategies, tmp_path, name, num_workers):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 20)).astype("float32")
    data = {"x": x, "y": x.sum(axis=1, keepdims=True), "batch_size": 16, "verbose": 0}
    with strategies[num_workers].scope():
        layers = [keras.Input((20,)), keras.layers.Dense(60), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(tf_dgc.CompressedOptimizer(O.Adam(0.01), name), "mse")
    before = model.evaluate(x, data["y"], verbose=0)
    monitor = tf_dgc.callbacks.CompressionMonitor()
    history = model.fit(**data, epochs=4, callbacks=[monitor]).history
    stats = model.optimizer.stats
    assert history["bytes_per_step"] == [stats.bytes_per_step] * 4
    assert model.evaluate(x, data["y"], verbose=0) < before
    model.save(tmp_path / "model.keras")
    with strategies[num_workers].scope():
        again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == model.optimizer.get_config()
    pairs = list(zip(model.optimizer.variables, again.optimizer.variables, strict=True))
    assert sum("shift" in a.path or a.path.endswith("_q") for a, _ in pairs) > 0
    for a, b in pairs:
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6, err_msg=a.path)
    again.fit(**data)


# Without random choices, ties included: XLA has a generator of its own.
@pytest.mark.parametrize("name", ["ef_sign_sgd", "power_sgd"])
def test_xla(name):
    weights = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50)])
        model.compile(
            tf_dgc.CompressedOptimizer(O.SGD(0.1), name), "mse", jit_compile=jit_compile
        )
        x, y = np.ones((32, 40), "float32"), np.ones((32, 50), "float32")
        model.fit(x, y, verbose=0, batch_size=8)
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-4)


def test_an_overflowing_residual_is_left_out():
    variable = keras.Variable(np.zeros((4, 4), "float32"))
    optimizer = tf_dgc.CompressedOptimizer(
        O.SGD(1.0), compressors.TopK(0.9), min_compress_size=0
    )
    optimizer.build([variable])
    gradient = np.full((4, 4), 3e38, "float32")
    for _ in range(3):
        optimizer.apply([gradient], [variable])
        optimizer.apply([-gradient], [variable])
        optimizer.apply([gradient], [variable])
    assert np.all(np.isfinite(optimizer.residual[0].numpy()))
    assert optimizer.stats.nonfinite > 0


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("identifier", ["topk", None, 3, compressors.TopK])
def test_what_is_no_compressor(identifier):
    with pytest.raises(ValueError, match=r"the name of a method: \w+, .*Received"):
        tf_dgc.CompressedOptimizer(O.SGD(0.1), identifier)


@pytest.mark.parametrize("compressor", ["qsgd", "none", "sign_sgd"])
def test_momentum_correction_without_a_residual(compressor):
    with pytest.raises(ValueError, match="needs error feedback"):
        tf_dgc.CompressedOptimizer(O.SGD(0.1), compressor, momentum_correction=True)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("top_k", {"sparsity": 1.0}),
        ("top_k", {"value_dtype": "int8"}),
        ("random_k", {"sparsity": -0.5}),
        ("qsgd", {"levels": 0}),
        ("qsgd", {"levels": 2**24}),
        ("qsgd", {"bucket": 1.5}),
        ("diana", {"alpha": 0.0}),
        ("diana", {"alpha": 2.0}),
        ("power_sgd", {"rank": 0}),
    ],
)
def test_parameters_outside_their_meaning(name, settings):
    with pytest.raises(ValueError, match="Received"):
        compressors.METHODS[name](**settings)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("name", "two words"),
        ("kind", "magic"),
        ("reference", None),
        ("aggregation", "mean"),
        ("error_feedback", True),
    ],
)
def test_wrong_facts(fact, value):
    broken = type("Broken", (TwoRounds,), {fact: value})
    with pytest.raises(ValueError, match=f"`{fact}` of a compressor must be .*Broken"):
        tf_dgc.CompressedOptimizer(O.SGD(0.1), broken())


def not_a_generator(values):
    return Result(values, values)


def asks_for_something_else(values):
    yield values


def gathers_floats(values):
    yield Gather(tf.reshape(values, [-1]))


def returns_a_tensor(values):
    return (yield Sum(values))


@pytest.mark.parametrize(
    ("exchange", "message"),
    [
        (not_a_generator, "must be a generator"),
        (asks_for_something_else, "must yield `Sum` of a float"),
        (gathers_floats, "`Gather` of an int32"),
        (returns_a_tensor, r"must end with `return Result\(...\)`"),
    ],
)
def test_wrong_exchanges(exchange, message):
    class Broken(TwoRounds):
        def exchange(self, values, state, draw):
            return exchange(values)

    with pytest.raises(ValueError, match=f"Broken.* {message}"):
        Simulation(Broken(), [(2, 3)], 1).step([[np.zeros((2, 3))]])


def test_state_per_worker_that_is_not_zero_at_first():
    class Broken(TwoRounds):
        def state(self, shape):
            return {"memory": compressors.StateSpec(shape, initial=lambda rng: 1.0)}

    optimizer = tf_dgc.CompressedOptimizer(O.SGD(0.1), Broken(), min_compress_size=0)
    with pytest.raises(ValueError, match=r"zero at first.*Received: memory"):
        optimizer.build([keras.Variable(np.zeros((2, 3)))])


class LongerThanStated(compressors.OneRound):
    name = "longer"
    kind = "quantization"
    reference = "this test"

    def words(self, size, dtype):
        return size

    def encode(self, values, draw):
        return tf.zeros([values.shape[0] + 1], tf.int32)

    def decode(self, words, size, dtype):
        return tf.zeros([size], dtype)


class OtherThanStated(Compressor):
    name = "other"
    kind = "quantization"
    reference = "this test"

    def __init__(self, factor):
        self.factor = factor

    def get_config(self):
        return {"factor": self.factor}

    def bytes(self, shape, dtype):
        return 40

    def exchange(self, values, state, draw):
        yield Gather(tf.zeros([self.factor * 10], tf.int32))
        return Result(values, values)


@pytest.mark.parametrize(
    "compressor", [LongerThanStated(), OtherThanStated(2), OtherThanStated(0)]
)
def test_a_payload_of_another_size(compressor):
    with pytest.raises(ValueError, match=f"{type(compressor).__name__}.* states"):
        Simulation(compressor, [(2, 3)], 1).step([[np.zeros((2, 3))]])
    optimizer = tf_dgc.CompressedOptimizer(O.SGD(0.1), compressor, min_compress_size=0)
    with pytest.raises(ValueError, match=f"{type(compressor).__name__}.* states"):
        optimizer.apply([tf.zeros((2, 3))], [keras.Variable(np.zeros((2, 3)))])

"""`NovoGrad` compared with NumPy and by hand, and as an inner optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from contract import round_trip
from harness import Trainer
from keras import ops

import tf_dgc
from tf_dgc import NovoGrad

RATE = 0.125  # exact in float32, the dtype of Keras's variable


class Reference:
    """Algorithm 1 for one tensor."""

    def __init__(self, rate, beta_1=0.95, beta_2=0.98, decay=0.0):
        self.settings = rate, beta_1, beta_2, decay
        self.v = self.m = None

    def step(self, w, g):
        rate, beta_1, beta_2, decay = self.settings
        square = (g**2).sum()
        if self.v is None:
            self.v = square
            self.m = g / np.sqrt(self.v) + decay * w
        else:
            self.v = beta_2 * self.v + (1 - beta_2) * square
            self.m = beta_1 * self.m + (g / np.sqrt(self.v) + decay * w)
        return w - rate * self.m


def apply(optimizer, weights, gradients):
    """Return the weights after steps of `gradients[step][tensor]`."""
    variables = [keras.Variable(w, dtype=str(w.dtype)) for w in weights]
    for step in gradients:
        optimizer.apply([tf.constant(g) for g in step], variables)
    return [v.numpy() for v in variables]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equals_algorithm_1(decay):
    rng = np.random.default_rng(0)
    shapes = [(3, 4), (5,), ()]
    weights = [rng.normal(size=s) for s in shapes]
    gradients = [[np.asarray(rng.normal(size=s)) for s in shapes] for _ in range(6)]
    expected = list(weights)
    references = [Reference(RATE, decay=decay) for _ in shapes]
    for step in gradients:
        expected = [
            r.step(w, g) for r, w, g in zip(references, expected, step, strict=True)
        ]
    weights = [np.asarray(w) for w in weights]
    result = apply(NovoGrad(RATE, epsilon=0, weight_decay=decay), weights, gradients)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_by_hand():
    """m = (3, 4)/5; then v = 25/2 + 100/2 and m = m/2 + (6, 8)/sqrt(62.5)."""
    optimizer = NovoGrad(1.0, beta_1=0.5, beta_2=0.5, epsilon=0)
    first = apply(optimizer, [np.zeros(2)], [[np.array([3.0, 4.0])]])
    np.testing.assert_allclose(first[0], [-0.6, -0.8])
    optimizer = NovoGrad(1.0, beta_1=0.5, beta_2=0.5, epsilon=0)
    steps = [[np.array([3.0, 4.0])], [np.array([6.0, 8.0])]]
    (second,) = apply(optimizer, [np.zeros(2)], steps)
    m = np.array([0.3, 0.4]) + np.array([6.0, 8.0]) / np.sqrt(62.5)
    np.testing.assert_allclose(second, [-0.6, -0.8] - m)


def test_weight_decay_is_coupled_and_can_be_excluded():
    """With zero gradients, two steps: w - lr d w, then with momentum."""
    zero = [[np.zeros(1)], [np.zeros(1)]]
    (w,) = apply(NovoGrad(0.5, beta_1=0.5, weight_decay=0.1), [np.ones(1)], zero)
    after_one = 1 - 0.5 * 0.1
    np.testing.assert_allclose(w, after_one - 0.5 * (0.05 + 0.1 * after_one))
    optimizer = NovoGrad(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    variables = [keras.Variable(np.ones(1), name=n) for n in ("kernel", "bias")]
    optimizer.apply([tf.zeros(1), tf.zeros(1)], variables)
    assert variables[0].numpy() < 1
    assert variables[1].numpy() == 1


def test_scale_of_the_gradient_does_not_matter():
    rng = np.random.default_rng(0)
    gradients = [[rng.normal(size=(4, 5))] for _ in range(4)]
    scaled = [[1e6 * g for g in step] for step in gradients]
    weights = [np.zeros((4, 5))]
    for a, b in zip(
        apply(NovoGrad(epsilon=0), weights, gradients),
        apply(NovoGrad(epsilon=0), weights, scaled),
        strict=True,
    ):
        np.testing.assert_allclose(a, b)


def test_zero_gradients():
    zero, one = np.zeros(3, "float32"), np.ones(3, "float32")
    (w,) = apply(NovoGrad(0.1), [zero], [[zero], [zero], [one]])
    np.testing.assert_allclose(w, -0.1 / np.sqrt(3), rtol=1e-6)


def test_config_round_trip():
    optimizer = NovoGrad(
        keras.optimizers.schedules.CosineDecay(0.1, 10),
        beta_1=0.8,
        beta_2=0.5,
        epsilon=1e-6,
        weight_decay=0.01,
        clipnorm=1.0,
        use_ema=True,
        name="mine",
    )
    again = round_trip(optimizer)
    assert isinstance(again, NovoGrad)
    assert again.get_config() == optimizer.get_config()
    assert again.weight_decay == 0.01
    assert (
        tf_dgc.DGCOptimizer(
            again, corrections=tf_dgc.Corrections(adam=False)
        ).weight_decay
        == 0.01
    )


@pytest.mark.parametrize(
    "settings",
    [{"beta_1": 1.0}, {"beta_2": -0.1}, {"epsilon": -1}, {"weight_decay": -0.1}],
)
def test_bad_parameters(settings):
    with pytest.raises(ValueError, match=f"`{next(iter(settings))}` must be"):
        NovoGrad(**settings)


@pytest.mark.parametrize("compressor", ["none", "top_k"])
def test_two_workers(strategies, compressor):
    """The inner optimizer gets the sum; without compression it equals the reference."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(6, 8)), rng.normal(size=8)]
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(
            NovoGrad(RATE, weight_decay=0.01, epsilon=0),
            compressor,
            min_compress_size=0,
            corrections=tf_dgc.Corrections(adam=False),
        ),
        weights,
    )
    references = [Reference(RATE, decay=0.01) for _ in weights]
    for _ in range(3):
        local = [[rng.normal(size=w.shape) for w in weights] for _ in range(2)]
        trainer.step(local)
        sums = [a + b for a, b in zip(*local, strict=True)]
        weights = [
            r.step(w, s) for r, w, s in zip(references, weights, sums, strict=True)
        ]
    for copies in trainer.replica_weights():
        np.testing.assert_array_equal(copies[0], copies[1])
    if compressor == "none":
        for weight, expected in zip(trainer.weights(), weights, strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-10)
    else:
        assert np.all(np.isfinite(trainer.weights()[0]))


@pytest.mark.slow
def test_trains_and_loads(tmp_path, strategies):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 20)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    with strategies[2].scope():
        layers = [keras.layers.Dense(100, activation="relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((20,)), *layers])
        inner = NovoGrad(0.02)
        model.compile(
            tf_dgc.CompressedOptimizer(
                inner,
                tf_dgc.compressors.TopK(0.9),
                corrections=tf_dgc.Corrections(adam=False),
            ),
            "mse",
        )
    losses = model.fit(x, y, epochs=5, batch_size=32, verbose=0).history["loss"]
    assert losses[-1] < 0.3 * losses[0]
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.models.load_model(path)
    assert isinstance(again.optimizer.inner_optimizer, NovoGrad)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", [1e-5, 1e-4, 1.0, 30.0])
def test_only_the_direction_counts_whatever_the_size(dtype, size):
    """Also if squares in the variable's dtype underflow, or their sum overflows."""
    variable = keras.Variable(np.zeros((40, 50)), dtype=dtype)
    optimizer = NovoGrad(1.0, beta_1=0.0)
    for step in range(1, 3):
        optimizer.apply([tf.fill((40, 50), tf.cast(size, dtype))], [variable])
        values = ops.convert_to_numpy(ops.cast(variable, "float32"))
        np.testing.assert_allclose(values, -step / 2000**0.5, rtol=0.01)

"""`LGC` and its autoencoder against NumPy, and phase by phase."""

import numpy as np
import pytest
import tensorflow as tf
from selection import rows

from tf_dgc.compressors import LGC, lgc
from tf_dgc.testing import Simulation

HEADER, FLAG = 4 * 5, 4


class Reference:
    """The autoencoder in loops."""

    def __init__(self, weights, channels):
        self.layers = []
        c, half = channels, max(1, channels // 2)
        encoder = [
            (3, 1, c),
            (3, c, 2 * c),
            (3, 2 * c, 4 * c),
            (3, 4 * c, c),
            (1, c, 4),
        ]
        decoder = [(3, 4, half), (3, half, c), (3, c, 2 * c), (3, 2 * c, half)]
        for width, inputs, outputs in [*encoder, *decoder, (1, half, 1)]:
            size = width * inputs * outputs
            kernel = weights[:size].reshape(width, inputs, outputs)
            self.layers.append((kernel, weights[size : size + outputs]))
            weights = weights[size + outputs :]
        assert not weights.size

    @staticmethod
    def convolve(x, layer, stride):
        kernel, bias = layer
        padded = np.pad(x, [(len(kernel) // 2,) * 2, (0, 0)])
        return np.array(
            [
                sum(padded[at + i] @ tap for i, tap in enumerate(kernel)) + bias
                for at in range(0, len(x), stride)
            ]
        )

    @staticmethod
    def transposed(x, layer):
        kernel, bias = layer
        out = np.zeros((2 * len(x) + 2, kernel.shape[2]))
        for at, entry in enumerate(x):
            for i, tap in enumerate(kernel):
                out[2 * at + 2 - i] += entry @ tap
        return out[1:-1] + bias

    def encode(self, x):
        x = np.pad(x, (0, -len(x) % 16))[:, None]
        for layer in self.layers[:4]:
            x = leaky(self.convolve(x, layer, 2))
        return self.convolve(x, self.layers[4], 1).ravel()

    def decode(self, code, size):
        x = code.reshape(-1, 4)
        for layer in self.layers[5:9]:
            x = leaky(self.transposed(x, layer))
        return self.convolve(x, self.layers[9], 1)[:size, 0]

    def loss(self, vectors):
        code = np.mean([self.encode(x) for x in vectors], axis=0)
        decoded = self.decode(code, vectors.shape[1])
        return np.mean((decoded - vectors.mean(axis=0)) ** 2)


def leaky(x):
    return np.where(x < 0, 0.01 * x, x)


def random_weights(channels, seed=0):
    rng = np.random.default_rng(seed)
    weights = lgc.initial_weights(channels, rng)
    return weights + 0.1 * rng.normal(size=weights.shape)  # biases are 0 at first


@pytest.mark.parametrize(("channels", "size"), [(1, 5), (2, 16), (3, 37), (8, 64)])
def test_autoencoder(channels, size):
    weights = random_weights(channels)
    reference = Reference(weights, channels)
    vectors = np.random.default_rng(1).normal(size=(3, size))
    codes = lgc.encode_vectors(tf.constant(weights), channels, tf.constant(vectors))
    expected = np.array([reference.encode(x) for x in vectors])
    assert codes.shape == (3, 4 * -(-size // 16))
    np.testing.assert_allclose(codes, expected, rtol=1e-10, atol=1e-12)
    decoded = lgc.decode_vectors(tf.constant(weights), channels, codes, size)
    expected = np.array([reference.decode(c, size) for c in expected])
    np.testing.assert_allclose(decoded, expected, rtol=1e-10, atol=1e-12)


def test_number_of_weights():
    """The paper's layers have (width * inputs + 1) * outputs weights each."""
    encoder = 256 + 24_704 + 98_560 + 49_216 + 260
    decoder = 416 + 6_208 + 24_704 + 12_320 + 33
    assert lgc.num_weights(64) == encoder + decoder == 216_677


def test_training_follows_the_gradient():
    """Adam's moments after two steps, from differences of the reference's loss."""
    channels, step = 2, 1e-6
    weights = random_weights(channels)
    vectors = np.random.default_rng(1).normal(size=(2, 33))

    def slope(weights, i):
        sides = []
        for shift in (step, -step):
            shifted = weights.copy()
            shifted[i] += shift
            sides.append(Reference(shifted, channels).loss(vectors))
        return (sides[0] - sides[1]) / (2 * step)

    zero = tf.zeros(weights.shape, tf.float64)
    state = lgc.AutoencoderAdam(tf.constant(weights), zero, zero)
    after = []
    for i in range(2):
        state = lgc.train_autoencoder(
            state, channels, tf.constant(vectors), 0.01, tf.constant(i)
        )
        after.append([part.numpy() for part in state])
    for i in np.random.default_rng(2).choice(weights.size, 12, replace=False):
        g = [slope(weights, i), slope(after[0][0], i)]
        first = 0.9 * 0.1 * g[0] + 0.1 * g[1]
        second = 0.999 * 0.001 * g[0] ** 2 + 0.001 * g[1] ** 2
        np.testing.assert_allclose(after[1][1][i], first, rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(after[1][2][i], second, rtol=1e-3, atol=1e-12)
        if abs(g[0]) > 1e-6:
            move = after[0][0][i] - weights[i]
            np.testing.assert_allclose(move, -0.01 * np.sign(g[0]), rtol=1e-2)
        mean, size = first / (1 - 0.9**2), np.sqrt(second / (1 - 0.999**2))
        move = after[1][0][i] - after[0][0][i]
        np.testing.assert_allclose(move, -0.01 * mean / (size + 1e-8), rtol=1e-3)


def make_simulation(compiled=False, **settings):
    defaults = {
        "sparsity": 0.8,
        "dense_steps": 2,
        "learning_steps": 3,
        "channels": 4,
        "min_values": 16,
        "keep_loss": False,
    }
    return Simulation(
        LGC(**{**defaults, **settings}), [(12, 15)], 3, "float64", compiled=compiled
    )


def leader_of(corrected, positions):
    """Return the worker whose 36 largest entries are at these positions."""
    tops = [set(np.argsort(-np.abs(x).ravel())[:36]) for x in corrected]
    return tops.index(set(positions))


@pytest.mark.parametrize("compiled", rows([False, True], [False]))
def test_phases(compiled):
    rng = np.random.default_rng(0)
    simulation = make_simulation(compiled)
    # Two lengths of Elias-Fano streams: 2 low bits each, then 36 + 179 // 4 high bits.
    positions_bytes = 4 * (3 + 3)
    leaders = set()
    for step in range(9):
        gradients = rng.normal(size=(3, 12, 15))
        weights = simulation.common[0]["weights"]
        corrected = [
            g + r[0] for g, r in zip(gradients, simulation.residual, strict=True)
        ]
        (total,) = simulation.step([[g] for g in gradients])
        rest = 2 * HEADER + 8  # two headers, and the flag of the sum
        if step < 2:
            np.testing.assert_allclose(total, sum(gradients), rtol=1e-12)
            assert simulation.sent_bytes == rest + 8 * 180
            continue
        sent = np.array([worker[0].ravel() for worker in simulation.sent])
        at = np.flatnonzero(sent[0])
        assert len(at) == 36
        leader = leader_of(corrected, at)
        leaders.add(leader)
        values = np.array([x.ravel()[at] for x in corrected])
        np.testing.assert_allclose(sent[:, at], values, rtol=1e-12)
        for worker in range(3):
            assert not np.any(simulation.residual[worker][0].ravel()[at] > 1e-12)
        learned = np.any(simulation.common[0]["weights"] != weights)
        assert learned == (step < 5)
        rest += 8 + positions_bytes
        expected = values.sum(axis=0)
        if step < 5:
            assert simulation.sent_bytes == rest + 8 * 36
        else:
            assert simulation.sent_bytes == rest + 8 * 12
            scale = np.abs(values[leader]).max()
            reference = Reference(weights, 4)
            codes = [reference.encode(x / scale) for x in values]
            expected = 3 * scale * reference.decode(np.mean(codes, axis=0), 36)
        np.testing.assert_allclose(total.ravel()[at], expected, rtol=1e-8, atol=1e-10)
        assert np.count_nonzero(total) == 36
    assert len(leaders) > 1


def test_values_far_above_the_leader_are_clipped():
    simulation = make_simulation(dense_steps=0, learning_steps=1)
    rng = np.random.default_rng(0)
    first, *others = rng.normal(size=(3, 12, 15))
    simulation.step([[first], [others[0]], [others[1]]])
    gradients = [1e-3 * first, 1e3 * others[0], 1e3 * others[1]]
    for _ in range(12):  # until the first worker leads
        before = [r[0].copy() for r in simulation.residual]
        simulation.step([[g] for g in gradients])
        at = np.flatnonzero(simulation.sent[0][0])
        corrected = [g + r for g, r in zip(gradients, before, strict=True)]
        leader = leader_of(corrected, at)
        scale = np.abs(corrected[leader].ravel()[at]).max()
        for worker in range(3):
            sent = simulation.sent[worker][0].ravel()[at]
            limit = np.clip(corrected[worker].ravel()[at], -8 * scale, 8 * scale)
            np.testing.assert_allclose(sent, limit, rtol=1e-12)
            residual = simulation.residual[worker][0].ravel()[at]
            np.testing.assert_allclose(
                residual, corrected[worker].ravel()[at] - limit, atol=1e-9
            )


def common_rows(rng):
    """Return similar gradients of three workers, with nearly constant rows."""
    common = np.repeat(rng.normal(size=(12, 1)), 15, axis=1)
    return common + 0.1 * rng.normal(size=(3, 12, 15))


@pytest.mark.parametrize(
    ("learning_steps", "learned"), rows([(1, False), (80, True)], [(1, False)])
)
def test_loss_of_coding_stays_in_the_residual(learning_steps, learned):
    """If the decoded values are worse than zeros, coded entries are cleared instead."""
    rng = np.random.default_rng(0)
    simulation = make_simulation(
        learning_steps > 10,  # a few steps are faster than a trace
        dense_steps=0,
        learning_steps=learning_steps,
        learning_rate=0.01,
        keep_loss=True,
    )
    for step in range(learning_steps + 3):
        gradients = common_rows(rng)
        corrected = [
            g + r[0] for g, r in zip(gradients, simulation.residual, strict=True)
        ]
        simulation.step([[g] for g in gradients])
        if step < learning_steps:
            if not learned:  # an autoencoder worse than zeros
                for state in simulation.common:
                    state["weights"] = 3 * state["weights"]
            continue
        reference = Reference(simulation.common[0]["weights"], 4)
        at = np.flatnonzero(simulation.sent[0][0])
        leader = leader_of(corrected, at)
        scale = np.abs(corrected[leader].ravel()[at]).max()
        for worker in range(3):
            unit = corrected[worker].ravel()[at] / scale
            decoded = reference.decode(reference.encode(unit), 36)
            better = np.linalg.norm(unit - decoded) < np.linalg.norm(unit)
            assert better == learned
            sent = simulation.sent[worker][0].ravel()[at]
            expected = scale * (decoded if better else unit)
            np.testing.assert_allclose(sent, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("scale", rows([0.0, 1e-30, 1e30], []))
def test_coded_edge_inputs(scale):
    method = LGC(0.5, 0, 1, 2, min_values=5)
    shapes = [(4, 8), (7, 3)]
    simulation = Simulation(method, shapes, 2, "float32", compiled=True)
    rng = np.random.default_rng(0)
    for _ in range(3):
        gradients = [[scale * rng.normal(size=s) for s in shapes] for _ in range(2)]
        totals = simulation.step(gradients)
        assert all(np.all(np.isfinite(total)) for total in totals)
        assert any(map(np.any, totals)) == (scale > 0)
    for worker in range(2):
        for value in simulation.common[worker].values():
            assert np.all(np.isfinite(value))


@pytest.mark.slow
def test_learns_common_rows():
    """The decoder reproduces rows that all workers' gradients share."""
    rng = np.random.default_rng(0)
    simulation = make_simulation(
        True, sparsity=0.5, dense_steps=0, learning_steps=200, learning_rate=0.01
    )
    errors = []
    for step in range(220):
        gradients = common_rows(rng)
        simulation.residual = [[np.zeros((12, 15))] for _ in range(3)]
        (total,) = simulation.step([[g] for g in gradients])
        if step >= 200:
            sent = sum(worker[0] for worker in simulation.sent)
            errors.append(np.sum((total - sent) ** 2) / np.sum(sent**2))
    assert np.mean(errors) < 0.4


def test_few_values_are_not_coded():
    simulation = Simulation(LGC(0.5, 0, 1, 2, min_values=9), [(4, 4)], 2, "float64")
    weights = simulation.common[0]["weights"]
    rng = np.random.default_rng(0)
    for _ in range(3):
        (total,) = simulation.step([[g] for g in rng.normal(size=(2, 4, 4))])
        np.testing.assert_allclose(total, sum(w[0] for w in simulation.sent))
        assert np.count_nonzero(total) == 8
    np.testing.assert_array_equal(simulation.common[0]["weights"], weights)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"sparsity": 1.0}, "sparsity"),
        ({"dense_steps": -1}, "dense_steps"),
        ({"learning_steps": 0}, "learning_steps"),
        ({"channels": 1.5}, "channels"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"min_values": True}, "min_values"),
    ],
)
def test_bad_parameters(settings, name):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        LGC(**settings)

"""`LAQ` against NumPy and by hand."""

import numpy as np
import pytest
from selection import rows

from tf_dgc.compressors import LAQ
from tf_dgc.testing import Simulation

HEADER = 4 * 5


class Reference:
    """The paper's recursion for gradient descent, with its own weights and alpha."""

    def __init__(self, workers, size, bits, xi, memory, patience, alpha=0.37):
        self.q = np.zeros((workers, size))
        self.last_error = np.zeros(workers)
        self.skipped = np.full(workers, patience)
        self.weights = [np.zeros(size)]
        self.settings = bits, xi / memory, memory, patience, alpha
        self.uploads = None  # workers that uploaded in the last step

    def step(self, gradients):
        bits, weight, memory, patience, alpha = self.settings
        workers = len(gradients)
        moves = np.diff(self.weights[::-1], axis=0)[:memory]
        threshold = weight * np.sum(moves**2) / (alpha * workers) ** 2
        self.uploads = []
        for m, g in enumerate(gradients):
            radius = np.abs(g - self.q[m]).max()
            tau = 1 / (2**bits - 1)
            scaled = (g - self.q[m] + radius) / (2 * tau * radius)
            quantized = self.q[m] + 2 * tau * radius * np.floor(scaled + 0.5) - radius
            error = np.sum((g - quantized) ** 2)
            news = np.sum((quantized - self.q[m]) ** 2)
            lazy = news <= threshold + 3 * (error + self.last_error[m])
            if lazy and self.skipped[m] < patience:
                self.skipped[m] += 1
                continue
            self.uploads.append(m)
            self.q[m], self.last_error[m], self.skipped[m] = quantized, error, 0
        estimate = self.q.sum(axis=0)
        self.weights.append(self.weights[-1] - alpha * estimate)
        return estimate


def expected_bytes(uploads, size, bits, scalar=8):
    """Return the bytes of a round of one word and of a round that may be empty."""
    words = bits * -(-size // 32)
    return 2 * HEADER + 4 + (scalar + 4 * words if uploads else 0)


@pytest.mark.parametrize(
    ("bits", "xi", "memory", "patience"),
    rows(
        [(4, 0.8, 10, 100), (8, 20.0, 3, 4), (2, 0.8, 2, 3), (1, 0.1, 1, 2)],
        [(8, 20.0, 3, 4)],
    ),
)
def test_equals_the_recursion(bits, xi, memory, patience):
    """On quadratics, where gradients converge and uploads become rare."""
    rng = np.random.default_rng(0)
    workers, size = 3, 40
    curvature = rng.uniform(0.2, 0.5, size=(workers, size))
    centre = rng.normal(size=(workers, size))
    method = LAQ(bits, xi, memory, patience)
    simulation = Simulation(method, [(5, 8)], workers, "float64")
    reference = Reference(workers, size, bits, xi, memory, patience)
    weights, patterns = np.zeros(size), set()
    for _ in range(25):
        gradients = curvature * (weights - centre)
        expected = reference.step(gradients)
        (total,) = simulation.step([[g.reshape(5, 8)] for g in gradients])
        np.testing.assert_allclose(total.ravel(), expected, rtol=1e-9, atol=1e-12)
        for m in range(workers):
            sent = simulation.sent[m][0].ravel()
            np.testing.assert_allclose(sent, reference.q[m], rtol=1e-9, atol=1e-12)
        num_bytes = expected_bytes(reference.uploads, size, bits)
        assert simulation.sent_bytes == num_bytes
        patterns.add(len(reference.uploads))
        weights = weights - 0.3 * expected
    assert len(patterns) > 1  # some skipped, and some did not


def test_quantization_by_hand():
    """(3, -1, 0.4) with 2 bits: R = 3, levels -3, -1, 1, 3."""
    simulation = Simulation(LAQ(bits=2), [(3,)], 1, "float64")
    (total,) = simulation.step([[np.array([3.0, -1.0, 0.4])]])
    np.testing.assert_allclose(total, [3, -1, 1])


def test_skips_by_hand():
    """One worker, xi = 1 of one step: skip if |g - q| is at most |q|, when exact."""
    simulation = Simulation(LAQ(bits=8, xi=1.0, memory=1), [(1,)], 1, "float64")
    steps = [(1.0, 1.0), (1.9, 1.0), (0.1, 1.0), (2.5, 2.5), (0.6, 2.5), (-0.1, -0.1)]
    for gradient, expected in steps:
        (total,) = simulation.step([[np.array([gradient])]])
        np.testing.assert_allclose(total, [expected])
        uploaded = [0] if gradient == expected else []
        assert simulation.sent_bytes == expected_bytes(uploaded, 1, 8)


def test_patience():
    """A constant gradient is sent again after `patience` skips."""
    simulation = Simulation(LAQ(bits=4, patience=3), [(8,)], 2, "float32")
    gradient = np.linspace(-1, 1, 8).astype("float32")
    sent = []
    for _ in range(9):
        simulation.step([[gradient], [2 * gradient]])
        sent.append(simulation.sent_bytes > 2 * HEADER + 4)
    assert sent == [True, False, False, False] * 2 + [True]


def test_one_worker_uploads_for_all():
    """Other workers send zeros, and their last upload still counts."""
    simulation = Simulation(LAQ(bits=8), [(4,)], 2, "float64")
    still, moving = np.array([1.0, 0.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0, 0.0])
    simulation.step([[still], [moving]])
    (total,) = simulation.step([[still], [9 * moving]])
    np.testing.assert_allclose(total, [1, 9, 0, 0], atol=0.05)
    assert simulation.state[0][0]["may_skip"] == 99
    assert simulation.state[1][0]["may_skip"] == 100
    words = [message.words for message in simulation.messages[0]]
    assert not np.any(words[1].numpy()[5:])  # the first worker's, after the header


def test_compiled_steps_skip_too():
    simulation = Simulation(LAQ(bits=4), [(6, 7), (3,)], 2, compiled=True)
    rng = np.random.default_rng(0)
    gradients = [[rng.normal(size=s) for s in [(6, 7), (3,)]] for _ in range(2)]
    sizes = []
    for _ in range(3):
        simulation.step(gradients)
        sizes.append(simulation.sent_bytes)
    assert sizes[0] == 2 * HEADER + 8 + 4 * (1 + 4 * 2) + 4 * (1 + 4)
    assert sizes[1:] == [2 * HEADER + 8] * 2


@pytest.mark.slow
def test_full_batch_logistic_regression():
    """The paper's task (section 4): as good as gradient descent, with fewer bytes."""
    rng = np.random.default_rng(0)
    workers, steps, rate = 4, 200, 0.5
    inputs = rng.normal(size=(workers, 100, 20))
    labels = np.argmax(inputs @ rng.normal(size=(20, 3)), axis=-1)

    def loss_and_gradient(weights, m):
        logits = inputs[m] @ weights
        shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        loss = -np.mean(np.log(shares[np.arange(100), labels[m]]))
        return loss, inputs[m].T @ (shares - np.eye(3)[labels[m]]) / 100 / workers

    def train(method):
        simulation = Simulation(method, [(20, 3)], workers, "float64", compiled=True)
        weights, sent = np.zeros((20, 3)), 0
        for _ in range(steps):
            gradients = [loss_and_gradient(weights, m)[1] for m in range(workers)]
            (total,) = simulation.step([[g] for g in gradients])
            weights, sent = weights - rate * total, sent + simulation.sent_bytes
        return np.mean([loss_and_gradient(weights, m)[0] for m in range(workers)]), sent

    dense, dense_bytes = train("none")
    for bits in (4, 8):
        lazy, lazy_bytes = train(LAQ(bits))
        assert lazy < 1.02 * dense
        assert lazy_bytes < 0.15 * dense_bytes


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"bits": 0}, "bits"),
        ({"bits": 17}, "bits"),
        ({"xi": -1.0}, "xi"),
        ({"memory": 0}, "memory"),
        ({"patience": 1.5}, "patience"),
    ],
)
def test_bad_parameters(settings, name):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        LAQ(**settings)

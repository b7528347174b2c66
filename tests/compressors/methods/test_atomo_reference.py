"""`ATOMO` against NumPy and by hand."""

import numpy as np
import pytest
import tensorflow as tf
from selection import rows

from tf_dgc.compressors import ATOMO
from tf_dgc.compressors.atomo import probabilities
from tf_dgc.testing import Simulation


def algorithm_1(scales, budget):
    """The paper's recursion."""
    scales = np.asarray(scales, float)
    if not scales.any():
        return np.zeros(len(scales))
    if np.all(scales * budget <= scales.sum()):
        return scales * budget / scales.sum()
    return np.append(1.0, algorithm_1(scales[1:], budget - 1))


def sent_by(budget, matrix, keys_per_tensor):
    simulation = Simulation(
        ATOMO(budget), [matrix.shape] * keys_per_tensor, 1, "float64"
    )
    simulation.step([[matrix] * keys_per_tensor])
    return np.stack(simulation.sent[0])


def sent_in_turn(budget, matrix, keys_per_tensor):
    simulation = Simulation(ATOMO(budget), [matrix.shape], 1, "float64", compiled=True)
    sent = []
    for _ in range(keys_per_tensor):
        simulation.step([[matrix]])
        sent.append(simulation.sent[0][0])
    return np.stack(sent)


def with_scales(scales, rows=9, columns=8, seed=0):
    """Return a matrix with these singular values, and its singular vectors."""
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(rng.normal(size=(rows, columns)))[0][:, : len(scales)]
    v = np.linalg.qr(rng.normal(size=(columns, columns)))[0][:, : len(scales)]
    return (u * scales) @ v.T, u, v


@pytest.mark.parametrize(
    ("scales", "budget", "expected"),
    [
        ([1, 1, 1, 1], 2, [0.5, 0.5, 0.5, 0.5]),
        ([4, 2, 1, 1], 2, [1, 0.5, 0.25, 0.25]),
        ([10, 5, 1, 1], 2, [1, 5 / 7, 1 / 7, 1 / 7]),
        ([10, 9, 1, 1], 3, [1, 1, 0.5, 0.5]),
        ([3, 1, 0, 0], 3, [1, 1, 0, 0]),
        ([0, 0, 0, 0], 2, [0, 0, 0, 0]),
    ],
)
def test_probabilities_by_hand(scales, budget, expected):
    result = probabilities(tf.constant(scales, tf.float64), budget)
    np.testing.assert_allclose(result, expected, atol=1e-12)
    np.testing.assert_allclose(algorithm_1(scales, budget), expected, atol=1e-12)


def test_probabilities_equal_algorithm_1():
    rng = np.random.default_rng(0)
    for _ in range(50):
        size = int(rng.integers(2, 12))
        scales = np.sort(np.exp(3 * rng.normal(size=size)))[::-1].copy()
        budget = int(rng.integers(1, size))
        result = probabilities(tf.constant(scales), budget).numpy()
        np.testing.assert_allclose(result, algorithm_1(scales, budget), rtol=1e-9)
        assert result.sum() == pytest.approx(budget)


@pytest.mark.parametrize("keys_per_tensor", rows([100, 300], [100]))
def test_draws_components_with_their_probabilities(keys_per_tensor):
    """Each component is sent as lambda / p or not at all, two of them in each draw."""
    scales = np.array([4.0, 2.2, 1.4, 0.4])
    matrix, u, v = with_scales(scales)
    odds = scales / 4
    sent = sent_by(2, matrix, keys_per_tensor)
    weights = np.einsum("ri,drc,ci->di", u, sent, v, optimize=True)
    drawn = weights > 0.1
    np.testing.assert_allclose(weights, drawn * scales / odds, atol=1e-8)
    np.testing.assert_array_equal(drawn.sum(axis=1), 2)
    limit = 5 * np.sqrt(odds * (1 - odds) / keys_per_tensor) + 1e-12  # 5 deviations
    assert np.all(np.abs(drawn.mean(axis=0) - odds) <= limit)


@pytest.mark.parametrize("keys_per_tensor", rows([100, 400], [100]))
def test_variance_is_that_of_the_paper(keys_per_tensor):
    """It is `sum of lambda_i^2 (1 / p_i - 1)`, as with independent draws."""
    scales = np.array([5.0, 3.0, 2.0, 1.0, 0.5])
    matrix, _, _ = with_scales(scales)
    errors = np.sum((sent_by(2, matrix, keys_per_tensor) - matrix) ** 2, axis=(1, 2))
    expected = np.sum(scales**2 * (1 / algorithm_1(scales, 2) - 1))
    assert abs(errors.mean() - expected) < 5 * errors.std() / np.sqrt(keys_per_tensor)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
@pytest.mark.parametrize("keys_per_tensor", rows([300, 3000], [300]))
def test_components_outside_the_subspace_are_unbiased_too(shape, keys_per_tensor):
    """The subspace has 10 of 24 equal components; means are right to 5 deviations."""
    scales = np.ones(24)
    matrix, u, v = with_scales(scales, 40, 24)
    matrix = matrix if shape == matrix.shape else matrix.T
    sent = sent_in_turn(2, matrix, keys_per_tensor)
    errors = np.sum((sent - matrix) ** 2, axis=(1, 2))
    expected = np.sum(scales**2 * (1 / algorithm_1(scales, 2) - 1))
    assert (
        abs(errors.mean() - expected)
        < 5 * errors.std() / np.sqrt(keys_per_tensor) + 1e-9
    )
    left, right = (u, v) if shape == (40, 24) else (v, u)
    weights = np.einsum("ri,drc,cj->dij", left, sent, right, optimize=True)
    limit = 5 * weights.std(axis=0) / np.sqrt(keys_per_tensor) + 1e-9
    assert np.mean(np.abs(weights.mean(axis=0) - np.eye(24)) > limit) < 0.01


def test_variance_is_nearly_that_of_the_paper_if_the_subspace_is_small():
    """The singular values decay like those of gradients."""
    scales = 1 / np.arange(1, 41)
    matrix, _, _ = with_scales(scales, 60, 40)
    errors = np.sum((sent_in_turn(3, matrix, 300) - matrix) ** 2, axis=(1, 2))
    expected = np.sum(scales**2 * (1 / algorithm_1(scales, 3) - 1))
    assert 0.9 * expected < errors.mean() < 1.1 * expected


def test_low_rank_matrix_is_exact():
    matrix, _, _ = with_scales(np.array([3.0, 1.0]), 20, 15)
    simulation = Simulation(ATOMO(3), [(20, 15)], 2, "float64")
    (total,) = simulation.step([[matrix], [2 * matrix]])
    np.testing.assert_allclose(total, 3 * matrix, atol=1e-9)


def test_bytes():
    """Three components of 70 numbers, or all 25 entries if they are fewer."""
    for shape, entries in (((40, 30), 210), ((5, 8, 30), 210), ((5, 5), 25)):
        simulation = Simulation("atomo", [shape], 1)
        simulation.step([[np.ones(shape)]])
        assert simulation.sent_bytes == 4 * (5 + entries)


@pytest.mark.parametrize("budget", [0, 1.5, True])
def test_bad_parameters(budget):
    with pytest.raises(ValueError, match="`budget` must be a whole number"):
        ATOMO(budget)

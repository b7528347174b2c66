"""`DeMo` against NumPy, its transform written out as a sum."""

import itertools

import numpy as np
import pytest

from tf_dgc.compressors import DeMo
from tf_dgc.testing import Simulation


def cosine(k, i, length):
    unit = np.sqrt((1 if k == 0 else 2) / length)
    return unit * np.cos(np.pi * (2 * i + 1) * k / (2 * length))


def component(tile, k, q):
    height, width = tile.shape
    places = itertools.product(range(height), range(width))
    return sum(
        tile[i, j] * cosine(k, i, height) * cosine(q, j, width) for i, j in places
    )


def wave(shape, k, q):
    height, width = shape
    rows = [cosine(k, i, height) for i in range(height)]
    return np.outer(rows, [cosine(q, j, width) for j in range(width)])


def fast_part(momentum, side, number):
    """Return one worker's contribution of a matrix."""
    rows, columns = momentum.shape
    height, width = min(side, rows), min(side, columns)
    sent = np.zeros([rows + side, columns + side])
    padded = sent.copy()
    padded[:rows, :columns] = momentum
    corners = itertools.product(range(0, rows, height), range(0, columns, width))
    for top, left in corners:
        part = np.s_[top : top + height, left : left + width]
        tile = padded[part]
        frequencies = itertools.product(range(height), range(width))
        components = {(k, q): component(tile, k, q) for k, q in frequencies}
        best = sorted(components, key=lambda at: -abs(components[at]))[:number]
        sent[part] = sum(components[at] * wave(tile.shape, *at) for at in best)
    return sent[:rows, :columns]


@pytest.mark.parametrize("shape", [(8, 8), (10, 3), (2, 3, 5), (7,)])
@pytest.mark.parametrize("sign", [False, True])
def test_matches_numpy(shape, sign):
    method = DeMo(tile=4, per_tile=3, decay=0.875, sign=sign)
    simulation = Simulation(method, [shape], 2, "float64")
    matrix = (-1, shape[-1])
    momentum = np.zeros([2, *shape])
    rng = np.random.default_rng(0)
    for _ in range(3):
        gradients = rng.normal(size=[2, *shape])
        (total,) = simulation.step([[g] for g in gradients])
        momentum = 0.875 * momentum + gradients
        parts = [fast_part(m.reshape(matrix), 4, 3).reshape(shape) for m in momentum]
        expected = np.sign(sum(parts)) if sign else sum(parts)
        np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-12)
        momentum -= parts
        residuals = [worker[0] for worker in simulation.residual]
        np.testing.assert_allclose(residuals, momentum, rtol=1e-9, atol=1e-12)


def test_all_components_restore_the_gradient():
    simulation = Simulation(DeMo(4, 16, 1.0, sign=False), [(9, 6)], 1, "float64")
    gradient = np.random.default_rng(0).normal(size=(9, 6))
    (total,) = simulation.step([[gradient]])
    np.testing.assert_allclose(total, gradient, rtol=1e-12)

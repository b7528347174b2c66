"""`OneBit` against NumPy and by hand."""

import numpy as np
import pytest
from selection import in_turn

from tf_dgc.compressors import OneBit
from tf_dgc.testing import Simulation


def test_by_hand():
    """Columns (1, 3, -2) and (-4, 0, -1) have means 2 and -2, and 0 and -2.5."""
    simulation = Simulation(OneBit(), [(3, 2)], 1, "float64")
    (total,) = simulation.step([[[[1.0, -4.0], [3.0, 0.0], [-2.0, -1.0]]]])
    expected = [[2.0, -2.5], [2.0, 0.0], [-2.0, -2.5]]
    np.testing.assert_array_equal(total, expected)
    residual = [[-1.0, -1.5], [1.0, 0.0], [0.0, 1.5]]
    np.testing.assert_array_equal(simulation.residual[0][0], residual)
    (total,) = simulation.step([[np.zeros((3, 2))]])  # -1, 1, 0; -1.5, 0, 1.5
    expected = [[-1.0, -1.5], [0.5, 0.75], [0.5, 0.75]]
    np.testing.assert_array_equal(total, expected)


def column_means(matrix):
    """Replace every entry by the mean of its sign in its column."""
    result = np.empty_like(matrix)
    for column in range(matrix.shape[1]):
        negative = matrix[:, column] < 0
        for side in (negative, ~negative):
            if side.any():
                mean = np.float32(matrix[side, column].mean())
                result[side, column] = mean
    return result


@pytest.mark.parametrize(
    ("shape", "per_column"),
    in_turn([(3, 2, 7), (6, 9), (5, 1), (11,)], [True, False]),
)
def test_error_feedback(shape, per_column):
    rng = np.random.default_rng(0)
    columns = shape[-1] if per_column and len(shape) > 1 else 1
    simulation = Simulation(OneBit(per_column), [shape], 3, "float64")
    residual = np.zeros((3, *shape))
    for _ in range(4):
        gradients = rng.normal(size=(3, *shape))
        (total,) = simulation.step([[g] for g in gradients])
        residual += gradients
        sent = np.stack(
            [column_means(r.reshape(-1, columns)).reshape(shape) for r in residual]
        )
        residual -= sent
        np.testing.assert_allclose(total, sent.sum(axis=0), rtol=1e-5, atol=1e-6)


def test_means_are_the_best_two_values():
    """Any other value of either side has a larger squared error."""
    column = np.random.default_rng(0).normal(size=(40, 1))
    simulation = Simulation(OneBit(), [(40, 1)], 1, "float64")
    (total,) = simulation.step([[column]])
    error = np.sum((total - column) ** 2)
    for change in (1e-3, -1e-3):
        for side in (column < 0, column >= 0):
            assert np.sum((total + change * side - column) ** 2) > error


def test_bytes():
    """A bit per entry, and 2 float32 per column."""
    for per_column, columns in ((True, 32), (False, 1)):
        simulation = Simulation(OneBit(per_column), [(100, 32)], 1)
        simulation.step([[np.ones((100, 32))]])
        assert simulation.sent_bytes == 4 * 5 + 8 * columns + 3200 // 8

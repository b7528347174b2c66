"""`CountSketch` against NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from selection import rows

from tf_dgc.compressors import CountSketch, RandomKeys
from tf_dgc.compressors.common.sketch import Sketch
from tf_dgc.testing import Simulation

SIZE = 300


def matrices(cells, seeds):
    """Return the rows of a sketch, `[rows, cells, SIZE]`, by sketching unit vectors."""
    sketch = Sketch(SIZE, cells, seeds)
    columns = [sketch.of(tf.one_hot(i, SIZE, dtype=tf.float64)) for i in range(SIZE)]
    return np.stack([c.numpy() for c in columns], axis=-1)


def estimate(rows, table):
    """Return the median over rows of each entry's signed cell."""
    return np.median(np.einsum("rcn,rc->rn", rows, table), axis=0)


def check_largest(chosen, values, k):
    """Check positions; entries that share a cell have equal estimates."""
    assert chosen.size == k
    others = np.delete(np.abs(values), chosen)
    assert np.abs(values[chosen]).min() >= others.max() * (1 - 1e-12)


def seeds(kind, step, rows):
    keys = RandomKeys(0, tf.constant(step, tf.int64), 0, 0)
    return [getattr(keys, kind)(i + 1) for i in range(rows)]


def test_a_sketch_has_one_signed_cell_per_row_and_entry():
    rows = matrices(12, seeds("shared", 0, 5))
    assert set(np.unique(rows)) == {-1.0, 0.0, 1.0}
    np.testing.assert_array_equal(np.abs(rows).sum(axis=1), 1.0)
    assert np.abs(rows.sum(axis=(1, 2))).max() < 5 * np.sqrt(SIZE)  # both signs
    counts = np.abs(rows).sum(axis=2)  # 25 per cell, deviation 5
    assert counts.min() > 0 and counts.max() < 55
    assert not np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("num_rows", rows([1, 3, 5, 7], [1, 3]))
def test_estimates_are_medians(num_rows):
    row_seeds = seeds("shared", 0, num_rows)
    rows = matrices(12, row_seeds)
    values = np.random.default_rng(0).normal(size=SIZE)
    sketch = Sketch(SIZE, 12, row_seeds)
    table = sketch.of(tf.constant(values))
    np.testing.assert_allclose(table, np.einsum("rcn,n->rc", rows, values), atol=1e-12)
    np.testing.assert_allclose(sketch.estimates(table), estimate(rows, table))


def test_two_rounds():
    """Positions come from the estimates of the sum; values are exact."""
    rng = np.random.default_rng(0)
    simulation = Simulation(CountSketch(0.95, 3, 0.1), [(15, 20)], 3, "float64")
    residual = np.zeros((3, SIZE))
    for step in range(3):
        gradients = rng.normal(size=(3, SIZE))
        (total,) = simulation.step([[g.reshape(15, 20)] for g in gradients])
        residual += gradients
        rows = matrices(30, seeds("shared", step, 3))
        table = np.einsum("rcn,n->rc", rows, residual.sum(axis=0))
        chosen = np.flatnonzero(total)
        check_largest(chosen, estimate(rows, table), 15)
        expected = np.zeros(SIZE)
        expected[chosen] = residual.sum(axis=0)[chosen]
        residual[:, chosen] = 0
        np.testing.assert_allclose(total.ravel(), expected, atol=1e-12)
        for worker in range(3):
            result = simulation.residual[worker][0].ravel()
            np.testing.assert_allclose(result, residual[worker], atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fetchsgd(momentum):
    """Algorithm 1 with a learning rate of 1; cells of sent entries become 0."""
    rng = np.random.default_rng(0)
    compressor = CountSketch(0.95, 3, 0.1, second_round=False, momentum=momentum)
    simulation = Simulation(compressor, [(15, 20)], 3, "float64")
    rows = matrices(30, seeds("fixed", 0, 3))
    velocity, error = np.zeros((3, 30)), np.zeros((3, 30))
    for _ in range(4):
        gradients = rng.normal(size=(3, SIZE))
        (total,) = simulation.step([[g.reshape(15, 20)] for g in gradients])
        table = np.einsum("rcn,n->rc", rows, gradients.sum(axis=0))
        velocity = momentum * velocity + table
        error = error + velocity
        update = np.zeros(SIZE)
        estimates = estimate(rows, error)
        chosen = np.flatnonzero(total)
        check_largest(chosen, estimates, 15)
        update[chosen] = estimates[chosen]
        touched = np.abs(rows[:, :, chosen]).sum(axis=2) > 0
        error[touched] = 0
        velocity[touched] = 0
        np.testing.assert_allclose(total.ravel(), update, atol=1e-9)
        for worker in range(3):
            state = simulation.state[worker][0]
            np.testing.assert_allclose(state["error"], error, atol=1e-9)


def test_finds_entries_that_are_large_in_the_sum_only():
    """Each worker's largest entries cancel out."""
    rng = np.random.default_rng(0)
    size, hidden = 10_000, [17, 4000, 9999]
    opposite = 100 * rng.normal(size=size)
    local = [0.01 * rng.normal(size=size) for _ in range(2)]
    for part, sign in zip(local, (1, -1), strict=True):
        part += sign * opposite
        part[hidden] += 50
    simulation = Simulation(CountSketch(0.999), [(size,)], 2, "float64")
    (total,) = simulation.step([[part] for part in local])
    np.testing.assert_allclose(total[hidden], 100, atol=0.1)


def test_fixed_keys_do_not_depend_on_step_and_worker():
    first, second = (
        RandomKeys(0, tf.constant(s, tf.int64), 3, s).fixed(1) for s in (0, 9)
    )
    np.testing.assert_array_equal(first, second)
    for other in (RandomKeys(1, 0, 3, 0).fixed(1), RandomKeys(0, 0, 4, 0).fixed(1)):
        assert np.any(first != other)
    assert np.any(first != RandomKeys(0, 0, 3, 0).fixed(2))
    assert np.any(first != RandomKeys(0, 0, 3, 0).shared(1))


def test_bytes():
    """5 rows of 20 cells, 10 entries, and a flag per round."""
    for settings, numbers, rounds in (
        ({}, 5 * 20 + 10, 2),
        ({"second_round": False}, 5 * 20, 1),
        ({"columns": 0.2}, 1000, 1),  # as large as the tensor, which is sent whole
    ):
        simulation = Simulation(CountSketch(**settings), [(1000,)], 1)
        simulation.step([[np.arange(1000.0)]])
        assert simulation.sent_bytes == 4 * (numbers + rounds)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 4}, "rows=4"),
        ({"rows": 0}, "rows=0"),
        ({"columns": 0}, "columns=0"),
        ({"momentum": 0.9}, "second_round=True"),
        ({"momentum": 1.0, "second_round": False}, "momentum=1.0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        CountSketch(**settings)

"""Sums and contributions as sparse entries."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.requests import (
    AllReduce,
    Result,
    SparseEntries,
    position_mask,
    to_dense_tensor,
)
from tf_dgc.compressors import Sparsifier
from tf_dgc.steps.flat_buffer import flat_views
from tf_dgc.testing import Simulation


def make_entries(rng, size, number):
    """Return `number` entries of a tensor, some of them with value 0."""
    positions = np.sort(rng.choice(size, number, replace=False)).astype(np.int32)
    values = rng.integers(-2, 3, number).astype(np.float32)
    return SparseEntries(tf.constant(positions), tf.constant(values), size)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_entries_are_split_by_tensor(sizes, data):
    size = sum(sizes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = [make_entries(rng, size, rng.integers(0, size + 1)) for _ in range(3)]
    tensors = [TensorSpec(str(n), (n,), tf.float32, False) for n in sizes]
    (view,) = flat_views(tensors, entire_model=True)
    results = view.results(Result(rows, rows[0], entries=1), [{} for _ in sizes])
    ends = np.cumsum(sizes)[:-1]

    def concatenate(parts):
        return np.concatenate([to_dense_tensor(part).numpy() for part in parts])

    total = np.sum([to_dense_tensor(row).numpy() for row in rows], axis=0)
    np.testing.assert_array_equal(concatenate(r.sum for r in results), total)
    np.testing.assert_array_equal(
        concatenate(r.sent for r in results), to_dense_tensor(rows[0])
    )
    numbers = [part.sum() for part in np.split(position_mask(rows[0]).numpy(), ends)]
    assert [int(r.entries) for r in results] == numbers


class OneEntry(Sparsifier):
    """Sends one entry of each worker, at a position of its own."""

    name = "ones"
    reference = "this test"

    def __init__(self, positions, value):
        self.positions, self.value = positions, value

    def bytes(self, shape, dtype):
        return 4 * len(self.positions)

    def aggregate(self, values, state, keys):
        size = values.shape.num_elements()
        total = yield AllReduce(tf.fill([len(self.positions)], 1.0))
        rows = [
            SparseEntries(tf.constant([position]), 0 * total[:1] + self.value, size)
            for position in self.positions
        ]
        return Result(rows, rows[keys.worker], entries=1)


@pytest.mark.parametrize(("positions", "is_finite"), [((3, 3), False), ((3, 4), True)])
def test_overflowing_sum_of_entries_raises(positions, is_finite):
    simulation = Simulation(OneEntry(positions, 3e38), [(8,)], 2)
    gradients = [[np.zeros(8, np.float32)]] * 2
    if not is_finite:
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            simulation.step(gradients)
        return
    (total,) = simulation.step(gradients)
    np.testing.assert_array_equal(np.flatnonzero(total), positions)
    np.testing.assert_array_equal(simulation.sent[1][0] != 0, np.arange(8) == 4)

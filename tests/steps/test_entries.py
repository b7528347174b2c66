"""Sums and contributions that are known by the entries that are not 0."""

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


def entries(rng, size, number):
    """Return so many entries of a tensor, some of which are 0."""
    positions = np.sort(rng.choice(size, number, replace=False)).astype(np.int32)
    values = rng.integers(-2, 3, number).astype(np.float32)
    return SparseEntries(tf.constant(positions), tf.constant(values), size)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_parts_of_entries_are_those_of_the_whole(sizes, data):
    size = sum(sizes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = [entries(rng, size, rng.integers(0, size + 1)) for _ in range(3)]
    tensors = [TensorSpec(str(n), (n,), tf.float32, False) for n in sizes]
    (view,) = flat_views(tensors, entire_model=True)
    results = view.results(Result(rows, rows[0], entries=1), [{} for _ in sizes])
    ends = np.cumsum(sizes)[:-1]

    def joined(parts):
        return np.concatenate([to_dense_tensor(part).numpy() for part in parts])

    total = np.sum([to_dense_tensor(row).numpy() for row in rows], axis=0)
    np.testing.assert_array_equal(joined(r.sum for r in results), total)
    np.testing.assert_array_equal(
        joined(r.sent for r in results), to_dense_tensor(rows[0])
    )
    numbers = [part.sum() for part in np.split(position_mask(rows[0]).numpy(), ends)]
    assert [int(r.entries) for r in results] == numbers


class Ones(Sparsifier):
    """Sends an entry of the worker's own, at a place of its choice."""

    name = "ones"
    reference = "this test"

    def __init__(self, places, value):
        self.places, self.value = places, value

    def bytes(self, shape, dtype):
        return 4 * len(self.places)

    def aggregate(self, values, state, keys):
        size = values.shape.num_elements()
        total = yield AllReduce(tf.fill([len(self.places)], 1.0))
        rows = [
            SparseEntries(tf.constant([at]), 0 * total[:1] + self.value, size)
            for at in self.places
        ]
        return Result(rows, rows[keys.worker], entries=1)


@pytest.mark.parametrize(("places", "fits"), [((3, 3), False), ((3, 4), True)])
def test_entries_overflow_where_they_are_added_up(places, fits):
    simulation = Simulation(Ones(places, 3e38), [(8,)], 2)
    gradients = [[np.zeros(8, np.float32)]] * 2
    if not fits:
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            simulation.step(gradients)
        return
    (total,) = simulation.step(gradients)
    np.testing.assert_array_equal(np.flatnonzero(total), places)
    np.testing.assert_array_equal(simulation.sent[1][0] != 0, np.arange(8) == 4)

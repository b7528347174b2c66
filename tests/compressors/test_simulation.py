"""Simulations that mean nothing, and rounds of nobody."""

import numpy as np
import pytest

from tf_dgc.testing import Simulation, run_all


@pytest.mark.parametrize("num_workers", [0, -1, 1.5, True, "2"])
def test_numbers_of_workers_that_are_none(num_workers):
    with pytest.raises(ValueError, match="`num_workers` must be a whole number, 1 or"):
        Simulation("top_k", [(3, 3)], num_workers)


def test_numpy_s_numbers_of_workers():
    simulation = Simulation("none", [(2,)], np.int64(2))
    (total,) = simulation.step([[[1.0, 2.0]], [[3.0, 4.0]]])
    np.testing.assert_array_equal(total, [4.0, 6.0])


@pytest.mark.timeout(10)
def test_rounds_of_nobody_end():
    assert run_all([]) == []

"""Arguments of `Simulation` and `run_all`."""

import numpy as np
import pytest

from tf_dgc.testing import Simulation, run_all


@pytest.mark.parametrize("num_workers", [0, -1, 1.5, True, "2"])
def test_wrong_number_of_workers_raises(num_workers):
    with pytest.raises(ValueError, match="`num_workers` must be a whole number, 1 or"):
        Simulation("top_k", [(3, 3)], num_workers)


def test_number_of_workers_can_be_a_numpy_integer():
    simulation = Simulation("none", [(2,)], np.int64(2))
    (total,) = simulation.step([[[1.0, 2.0]], [[3.0, 4.0]]])
    np.testing.assert_array_equal(total, [4.0, 6.0])


@pytest.mark.timeout(10)
def test_run_all_without_workers_ends():
    assert run_all([]) == []

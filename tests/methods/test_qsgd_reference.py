"""`QSGD` against NumPy and against a case by hand."""

import numpy as np
import pytest

from tf_dgc.compressors import QSGD
from tf_dgc.compressors.simulate import Simulation


def sent_by(levels, bucket, values, draws=200):
    shape = np.shape(values)
    simulation = Simulation(QSGD(levels, bucket), [shape] * draws, 1, "float64")
    simulation.step([[values] * draws])
    return np.stack(simulation.sent[0])


def test_by_hand():
    """(3, 4) has norm 5; with one level, 3 is sent as 5 with odds 0.6, 4 with 0.8."""
    found = sent_by(1, 2, [3.0, -4.0])
    assert set(np.unique(found[:, 0])) == {0.0, 5.0}
    assert set(np.unique(found[:, 1])) == {-5.0, 0.0}
    # 5 deviations of 200 draws
    assert np.mean(found[:, 0] != 0) == pytest.approx(0.6, abs=0.174)
    assert np.mean(found[:, 1] != 0) == pytest.approx(0.8, abs=0.142)


@pytest.mark.parametrize(("levels", "bucket"), [(1, 4), (3, 5), (7, 512), (127, 64)])
def test_levels_are_next_to_the_value(levels, bucket):
    values = np.random.default_rng(0).normal(size=70)
    norms = np.concatenate(
        [
            np.full(len(part), np.linalg.norm(part))
            for part in np.split(values, range(bucket, 70, bucket))
        ]
    )
    exact = values * levels / norms
    found = sent_by(levels, bucket, values, 20) * levels / norms
    np.testing.assert_allclose(found, np.rint(found), atol=1e-9)
    assert np.all(np.abs(found - exact) < 1 + 1e-9)


def test_variance_is_that_of_the_paper():
    """`sum p (1 - p) (norm / s)^2`, with p the fraction above the level below."""
    values = np.random.default_rng(0).normal(size=30)
    step = np.linalg.norm(values) / 3
    p = np.abs(values) / step % 1
    errors = np.sum((sent_by(3, 30, values, 300) - values) ** 2, axis=1)
    expected = np.sum(p * (1 - p)) * step**2
    deviation = errors.std() / np.sqrt(300)
    assert abs(errors.mean() - expected) < 5 * deviation


def test_bytes():
    """4 bits per entry for 7 levels, and a float32 norm per 512 entries."""
    simulation = Simulation(QSGD(), [(1024,)], 1)
    simulation.step([[np.ones(1024)]])
    assert simulation.sent_bytes == 4 * (5 + 2 + 4 * 1024 // 32)

"""`Uniform8Bit` against NumPy and by hand."""

import numpy as np
import pytest

from tf_dgc.compressors import Uniform8Bit
from tf_dgc.testing import Simulation


def sent_by(values, dtype="float64", **settings):
    simulation = Simulation(Uniform8Bit(**settings), [np.shape(values)], 1, dtype)
    simulation.step([[values]])
    return simulation.sent[0][0]


def test_by_hand():
    """The step is 1; 0.5 and 2.5 are halfway and round to even."""
    values = [127.0, -127.0, 3.4, -3.6, 0.5, 2.5, 0.0]
    expected = [127.0, -127.0, 3.0, -4.0, 0.0, 2.0, 0.0]
    np.testing.assert_array_equal(sent_by(values), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sign", [1, -1])
def test_least_value_does_not_wrap(sign, dtype):
    """The code -128 is not used: it has no positive counterpart."""
    values = sign * np.array([-1.0, -1.0, 1.0, 0.999, -0.999, 1e-9])
    sent = sent_by(values, dtype)
    np.testing.assert_array_equal(sent[:3], values[:3].astype(dtype))
    np.testing.assert_array_equal(sent_by(-values, dtype), -sent)


@pytest.mark.parametrize("bucket", [None, 1, 10, 64, 1000])
def test_nearest_level(bucket):
    values = np.random.default_rng(0).normal(size=210)
    size = bucket or 210
    expected = np.concatenate(
        [
            np.rint(127 * part / np.abs(part).max()) * np.abs(part).max() / 127
            for part in np.split(values, range(size, 210, size))
        ]
    )
    np.testing.assert_allclose(sent_by(values, bucket=bucket), expected, rtol=1e-12)


def test_stochastic_by_hand():
    """With step 1, 0.25 becomes 1 in a quarter of 4000 cases, to 5 deviations."""
    sent = sent_by([127.0] + [0.25] * 4000 + [-0.25] * 4000, stochastic=True)
    assert set(np.unique(sent)) == {-1.0, 0.0, 1.0, 127.0}
    limit = 5 * np.sqrt(0.25 * 0.75 / 4000)
    assert np.mean(sent[1:4001]) == pytest.approx(0.25, abs=limit)
    assert np.mean(sent[4001:]) == pytest.approx(-0.25, abs=limit)


def test_error_feedback_compensates_rounding():
    """0.3 of a step is sent about every third time; without feedback, never."""
    values = np.array([127.0, 0.3])
    simulation = Simulation(Uniform8Bit(), [(2,)], 1, "float64")
    sums = [simulation.step([[values]])[0] for _ in range(10)]
    np.testing.assert_allclose(np.sum(sums, axis=0), [1270.0, 3.0])
    assert sent_by(values)[1] == 0


def test_bytes():
    """8 bits per entry, and a maximum per bucket in the type of the values."""
    for dtype, width in (("float32", 4), ("float64", 8)):
        for bucket, buckets in ((None, 1), (256, 5)):
            simulation = Simulation(Uniform8Bit(bucket), [(1031,)], 1, dtype)
            simulation.step([[np.ones(1031)]])
            assert simulation.sent_bytes == 4 * 5 + width * buckets + 1032


def test_error_feedback_depends_on_convergence():
    assert Uniform8Bit().error_feedback == "default"
    assert Uniform8Bit(stochastic=True).error_feedback == "forbidden"
    assert Uniform8Bit(2048, stochastic=True).error_feedback == "optional"
    assert Uniform8Bit(10**5, stochastic=True).error_feedback == "forbidden"


@pytest.mark.parametrize("bucket", [0, -1, 1.5, True, "a"])
def test_bad_bucket(bucket):
    with pytest.raises(ValueError, match="`bucket` must be a whole number"):
        Uniform8Bit(bucket)

"""`ChunkedTopK` against NumPy."""

import numpy as np
import pytest
from chunked_reference import reference

from tf_dgc.compressors import ChunkedTopK
from tf_dgc.testing import Simulation


@pytest.mark.parametrize(
    ("chunk", "per_chunk", "size"),
    [(16, 3, 160), (16, 3, 150), (64, 8, 40), (5, 5, 31)],
)
def test_matches_numpy(chunk, per_chunk, size):
    method = ChunkedTopK(chunk, per_chunk, decay=0.75)
    simulation = Simulation(method, [(size,)], 2, "float64")
    residual = np.zeros([2, size])
    rng = np.random.default_rng(0)
    for _ in range(4):
        # Chunks of different magnitude, which have different scales.
        gradients = rng.normal(size=[2, size]) * 10.0 ** -(np.arange(size) // chunk)
        (total,) = simulation.step([[g] for g in gradients])
        corrected = 0.75 * residual + gradients
        sent = np.stack([reference(c, chunk, per_chunk) for c in corrected])
        residual = corrected - sent
        np.testing.assert_allclose(total, sent.sum(axis=0), rtol=1e-12, atol=1e-15)
        residuals = [worker[0] for worker in simulation.residual]
        np.testing.assert_allclose(residuals, residual, rtol=1e-12, atol=1e-15)


def test_bytes():
    """A million entries take at most 1/210 of float32."""
    method = ChunkedTopK()
    assert method.bytes((1024, 1024), "float32") * 210 <= 4 * 2**20


def test_positions_of_equal_entries_are_chosen_evenly():
    method = ChunkedTopK(chunk=20, per_chunk=5)
    simulation = Simulation(method, [(100,)], 1, compiled=True)
    counts = np.zeros(100)
    for _ in range(200):
        simulation.residual[0][0][:] = 0
        simulation.step([[np.ones(100, "float32")]])
        counts += simulation.sent[0][0] != 0
    assert counts.sum() >= 0.97 * 200 * 25
    assert counts.min() > 20
    assert counts.max() < 90


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk": 0}, "`chunk` must be a whole number"),
        ({"chunk": 4, "per_chunk": 5}, "`per_chunk` must be at most `chunk`"),
        ({"decay": 0.0}, r"`decay` must be a number in \(0, 1\]"),
        ({"decay": 1.5}, r"`decay` must be a number in \(0, 1\]"),
    ],
)
def test_bad_arguments(settings, message):
    with pytest.raises(ValueError, match=message):
        ChunkedTopK(**settings)

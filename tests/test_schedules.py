"""Sparsity as a function of the iteration."""

import math

import pytest
import tensorflow as tf

from tf_dgc import schedules


@pytest.mark.parametrize(
    ("boundaries", "values"),
    [([2, 1], [0.1, 0.2, 0.3]), ([1], [0.1]), ([1], [0.5, 1.0]), ([], [math.nan])],
)
def test_piecewise_schedule(boundaries, values):
    with pytest.raises(ValueError, match="Received"):
        schedules.PiecewiseConstantSparsity(boundaries, values)


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": -1},
        {"warmup_steps": 0},
        {"warmup_steps": 1.5},
        {"stages": []},
        {"final_sparsity": 1.0},
    ],
)
def test_warmup_schedule(settings):
    with pytest.raises(ValueError, match="Received"):
        schedules.WarmupSparsity(**{"warmup_steps": 4, **settings})


def test_warmup_reaches_its_stages():
    warmup = schedules.WarmupSparsity(8)
    values = [float(warmup(tf.constant(step))) for step in range(10)]
    assert (
        values == [0.75] * 2 + [0.9375] * 2 + [0.984375] * 2 + [0.996] * 2 + [0.999] * 2
    )


@pytest.mark.parametrize(
    ("steps", "sparsity"),
    [
        (1, 0.75),
        (60, 0.75),
        (75, 0.8),
        (300, 1 - 15 / 300),
        (15_000, 0.999),
        (1e6, 0.999),
    ],
)
def test_sparsity_for_steps(steps, sparsity):
    assert schedules.for_steps(steps) == pytest.approx(sparsity, rel=1e-12)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "300"])
def test_bad_number_of_steps(steps):
    with pytest.raises(ValueError, match="Received: steps="):
        schedules.for_steps(steps)

"""Adam behind a compressed exchange: against NumPy, across dense steps, and saved."""

import keras
import numpy as np
import pytest
from adam_oracle import AdamOracle
from contract import round_trip
from harness import SHAPES, Trainer, initial_weights, make_gradients
from selection import rows

import tf_dgc
from tf_dgc.compressors import tie_offsets

O = keras.optimizers  # noqa: E741
STEPS = 25
FROM_DENSE = tf_dgc.schedules.PiecewiseConstantSparsity(
    [5, 10, 15, 18], [0.0, 0.9, 0.99, 0.0, 0.97]
)
CASES = {
    "adam": (lambda: O.Adam(0.125), {}),
    "adamw": (lambda: O.AdamW(0.125, weight_decay=0.1, beta_1=0.8, beta_2=0.9), {}),
    "no momentum": (lambda: O.Adam(0.125, beta_1=0.0, epsilon=0.5), {}),
    "masking": (lambda: O.Adam(0.125), {"factor_masking": True}),
    "schedule": (lambda: O.AdamW(0.125, weight_decay=0.1), {"sparsity": FROM_DENSE}),
    "clipnorm": (lambda: O.Adam(0.125, global_clipnorm=5.0), {"sparsity": FROM_DENSE}),
    "bfloat16": (lambda: O.Adam(0.125), {"value_dtype": "bfloat16"}),
}


def make_trainer(strategy, case, dtype="float64"):
    make_inner, settings = CASES[case]
    settings = {"sparsity": 0.97, **settings}
    return Trainer(
        strategy,
        lambda: tf_dgc.DGCOptimizer(make_inner(), **settings),
        initial_weights(dtype),
    )


def make_oracle(num_workers, case, dtype="float64"):
    make_inner, settings = CASES[case]
    settings = {"sparsity": 0.97, "factor_masking": False, **settings}
    if callable(settings["sparsity"]):
        settings["sparsity"] = lambda step: float(FROM_DENSE(step))
    inner, weights = make_inner(), initial_weights(dtype)
    norm = inner.global_clipnorm
    return AdamOracle(
        weights,
        num_workers,
        learning_rate=0.125,
        momentum=inner.beta_1,
        beta_2=inner.beta_2,
        epsilon=inner.epsilon,
        weight_decay=inner.weight_decay or 0.0,
        clipping={"global_clipnorm": norm} if norm else {},
        tie_offsets=lambda step: tie_offsets([w.size for w in weights], 0, step),
        **settings,
    )


def assert_near(mine, reference):
    for a, b in zip(mine, reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "num_workers"),
    rows(
        [(case, n) for case in CASES for n in (1, 2, 3)],
        [("adam", 2), ("adamw", 1), ("no momentum", 2), ("schedule", 2)]
        + [("schedule", 3), ("masking", 1), ("clipnorm", 2), ("bfloat16", 1)],
    ),
)
def test_matches_numpy(strategies, case, num_workers):
    trainer = make_trainer(strategies[num_workers], case)
    oracle = make_oracle(num_workers, case)
    for gradients in make_gradients(num_workers, STEPS):
        trainer.step(gradients)
        oracle.step(gradients)
        assert_near(trainer.weights(), oracle.weights)
    optimizer = trainer.optimizer
    for i, shape in enumerate(SHAPES):
        if len(shape) > 1 and np.prod(shape) >= 1024:
            for name, kept in (("residual", "residual"), ("second_moment", "moment")):
                variables = getattr(optimizer, name)
                local = [worker[i] for worker in trainer.local(variables)]
                assert_near(local, [getattr(w, kept)[i] for w in oracle.workers])

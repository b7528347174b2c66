"""The whole algorithm against a NumPy reimplementation of the paper."""

import keras
import numpy as np
import pytest
from harness import SHAPES, Trainer, initial_weights, make_gradients
from oracle import Oracle
from selection import in_turn, rows

import tf_dgc
from tf_dgc.compressors import tie_offsets

STEPS = 25
SCHEDULE = tf_dgc.schedules.PiecewiseConstantSparsity(
    [4, 8, 12, 16], [0.0, 0.3, 0.9, 0.99, 0.999]
)
RATE = keras.optimizers.schedules.PiecewiseConstantDecay(
    [4, 12], [0.125, 0.0625, 0.03125]
)
CASES = {
    "momentum": ({"momentum": 0.9}, {}),
    "nesterov": ({"momentum": 0.8, "nesterov": True}, {}),
    "no momentum": ({}, {}),
    "no masking": (
        {"momentum": 0.9},
        {"corrections": tf_dgc.Corrections(factor_masking=False), "sparsity": 0.995},
    ),
    "masking": (
        {"momentum": 0.9},
        {"corrections": tf_dgc.Corrections(factor_masking=True)},
    ),
    "masked schedule": (
        {"momentum": 0.9},
        {"corrections": tf_dgc.Corrections(factor_masking=True), "sparsity": SCHEDULE},
    ),
    "rate": ({"momentum": 0.9, "learning_rate": RATE}, {}),
    "rate when sent": (
        {"momentum": 0.9, "learning_rate": RATE},
        {
            "corrections": tf_dgc.Corrections(scale_before_accumulation=False),
            "sparsity": SCHEDULE,
        },
    ),
    "clipnorm": ({"momentum": 0.9, "clipnorm": 3.0}, {}),
    "global_clipnorm": ({"momentum": 0.9, "global_clipnorm": 5.0}, {}),
    "clipvalue": ({"momentum": 0.9, "clipvalue": 0.5}, {}),
    "schedule": ({"momentum": 0.9, "nesterov": True}, {"sparsity": SCHEDULE}),
    "all compressed": ({"momentum": 0.9}, {"min_compress_size": 0}),
    "one entry": ({"momentum": 0.9}, {"sparsity": 0.9999}),
    "bfloat16": ({"momentum": 0.9}, {"value_dtype": "bfloat16"}),
    "float16": ({"momentum": 0.9, "nesterov": True}, {"value_dtype": "float16"}),
    "float32": ({}, {"value_dtype": "float32"}),
    "mxint8": ({"momentum": 0.9}, {"value_dtype": "mxint8"}),
    "mxfp4": ({"momentum": 0.9}, {"value_dtype": "mxfp4"}),
    "sign": (
        {"momentum": 0.9},
        {"value_dtype": "sign", "sparsity": SCHEDULE, "min_compress_size": 0},
    ),
}


def make_pair(strategies, num_workers, case, dtype):
    sgd_settings, dgc_settings = CASES[case]
    settings = {"sparsity": 0.97, **dgc_settings}
    weights = initial_weights(dtype)
    trainer = Trainer(
        strategies[num_workers],
        lambda: tf_dgc.DGCOptimizer(
            keras.optimizers.SGD(**{"learning_rate": 0.125, **sgd_settings}), **settings
        ),
        weights,
    )
    sparsity = settings.pop("sparsity")
    if callable(sparsity):
        settings["sparsity"] = lambda step: float(SCHEDULE(step))
    else:
        settings["sparsity"] = sparsity
    clipping = {k: v for k, v in sgd_settings.items() if k.startswith(("clip", "glob"))}
    oracle = Oracle(
        weights,
        num_workers,
        learning_rate=_rate_of(sgd_settings),
        momentum=sgd_settings.get("momentum", 0.0),
        nesterov=sgd_settings.get("nesterov", False),
        clipping=clipping,
        tie_offsets=lambda step: tie_offsets([w.size for w in weights], 0, step),
        **settings,
    )
    return trainer, oracle


def _rate_of(settings):
    schedule = settings.get("learning_rate")
    if schedule is None:
        return 0.125  # exact in float32
    return lambda step: float(schedule(step))


# test_all_paths.py covers the other settings.
FEW = [
    "nesterov",
    "no masking",
    "masking",
    "clipnorm",
    "schedule",
    "rate",
    "rate when sent",
]
MORE_WORKERS = [("momentum", 4), ("bfloat16", 3), ("schedule", 3), ("schedule", 4)]


@pytest.mark.parametrize(
    ("case", "num_workers"),
    [
        *in_turn(CASES, [1, 2], FEW),
        *rows(MORE_WORKERS, []),
    ],
)
def test_matches_oracle_in_float64(strategies, case, num_workers):
    trainer, oracle = make_pair(strategies, num_workers, case, "float64")
    for gradients in make_gradients(num_workers, STEPS):
        trainer.step(gradients)
        oracle.step(gradients)
        for value, reference in zip(trainer.weights(), oracle.weights, strict=True):
            np.testing.assert_allclose(value, reference, rtol=1e-12, atol=1e-12)
    residuals = trainer.local(trainer.optimizer.residual)
    for residual, worker in zip(residuals, oracle.workers, strict=True):
        for r, reference in zip(residual, worker.residual, strict=True):
            np.testing.assert_allclose(r, reference, rtol=1e-12, atol=1e-12)
    if oracle.momentum:
        velocities = trainer.local(trainer.optimizer.velocity)
        for velocity, worker in zip(velocities, oracle.workers, strict=True):
            for v, reference in zip(velocity, worker.velocity, strict=True):
                np.testing.assert_allclose(v, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case", rows(["momentum", "nesterov", "schedule"], ["schedule"])
)
def test_matches_oracle_in_float32(strategies, case):
    # Rounding may swap two entries of nearly equal magnitude, which are then sent in
    # another order. So the tolerance applies to the mean, not to each entry.
    trainer, oracle = make_pair(strategies, 2, case, "float32")
    for gradients in make_gradients(2, STEPS, "float32"):
        trainer.step(gradients)
        oracle.step(gradients)
    for value, reference in zip(trainer.weights(), oracle.weights, strict=True):
        assert np.mean(np.abs(value - reference)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", rows([2, 3, 4], [4]))
def test_workers_stay_bit_identical(strategies, num_workers):
    trainer, _ = make_pair(strategies, num_workers, "schedule", "float32")
    for gradients in make_gradients(num_workers, STEPS, "float32"):
        trainer.step(gradients)
        for copies in trainer.replica_weights():
            for copy in copies[1:]:
                np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.parametrize(
    "value_dtype",
    rows(
        [None, "float32", "bfloat16", "float16", "sign", "mxint8", "mxfp4"],
        [None, "bfloat16", "sign", "mxfp4"],
    ),
)
def test_sent_plus_residual_equals_all_gradients(strategies, value_dtype):
    """Error feedback without momentum loses nothing."""
    weights = initial_weights()
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.DGCOptimizer(
            keras.optimizers.SGD(1.0), 0.99, value_dtype=value_dtype
        ),
        weights,
    )
    steps = make_gradients(2, STEPS)
    for gradients in steps:
        trainer.step(gradients)
    for i in range(len(SHAPES)):
        sent = weights[i] - trainer.weights()[i]
        residual = trainer.optimizer.residual[i].numpy()
        expected = sum(worker[i] for step in steps for worker in step)
        np.testing.assert_allclose(sent + residual, expected, rtol=1e-12, atol=1e-12)
    assert np.any(trainer.optimizer.residual[0].numpy())

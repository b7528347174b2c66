"""The methods that the contract runs over, and their settings."""

import functools
import json
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import compressors
from tf_dgc.testing import Simulation

# Settings to test in addition to a method's defaults.
VARIANTS = {
    "adacomp": [{"bin_size": 7, "per_bin": 1.5}],
    "atomo": [{"budget": 1}],
    "chunked_top_k": [{"chunk": 16, "per_chunk": 3, "decay": 0.75}],
    "count_sketch": [
        {"sparsity": 0.9, "rows": 1, "columns": 0.1},
        {"sparsity": 0.9, "rows": 3, "second_round": False, "momentum": 0.9},
    ],
    "demo": [{"tile": 4, "per_tile": 3, "decay": 1.0, "sign": False}],
    "diana": [{"levels": 1, "alpha": 0.5}],
    "global_top_k": [{"sparsity": 0.9, "value_dtype": "float16"}],
    "laq": [{"bits": 8, "xi": 100.0, "memory": 2, "patience": 2}],
    "lgc": [
        {
            "sparsity": 0.5,
            "dense_steps": 0,
            "learning_steps": 1,
            "channels": 2,
            "min_values": 60,
        }
    ],
    "one_bit": [{"per_column": False}],
    "power_sgd": [{"rank": 1, "warm_start": False}],
    "qsgd": [
        {"levels": 1, "bucket": 7},
        {"levels": 127},
        {"levels": 3, "coding": "elias"},
    ],
    "random_k": [{"sparsity": 0.5}, {"sparsity": 0.75, "unbiased": True}],
    "rotated_quantization": [{"levels": 2}, {"levels": 5, "block": 8}],
    "sampled_threshold": [{"sparsity": 0.8, "value_dtype": "bfloat16"}],
    "sbc": [{"sparsity": 0.5}],
    "scale_com": [{"sparsity": 0.5, "low_pass": 0.1}, {"sparsity": 0.9}],
    "stc": [{"sparsity": 0.9, "downstream": True}],
    "tern_grad": [{"clip": None}],
    "threshold": [
        {"threshold": 1.0, "capacity": 0.5, "value_dtype": "float16"},
        {"threshold": 0.5, "capacity": 0.3, "binary": True},
    ],
    "top_k": [
        {"sparsity": 0.9, "value_dtype": t} for t in ("bfloat16", "sign", "mxint8")
    ],
    "uniform_8bit": [{"bucket": 32}, {"bucket": 32, "stochastic": True}],
    "variance_based": [{"alpha": 0.5, "capacity": 0.5}],
}


class Case(NamedTuple):
    """A method and its settings, as JSON."""

    name: str
    settings: str

    def __str__(self):
        return "-".join([self.name, *map(str, json.loads(self.settings).values())])


CASES = [
    Case(name, json.dumps(settings))
    for name in compressors.METHODS
    for settings in ({}, *VARIANTS.get(name, []))
]
IDS = [str(case) for case in CASES]
# One case of every method: the one with the most settings.
ONE_EACH = list({case.name: case for case in CASES}.values())
# Also the defaults of methods that search a subspace, which may contain any row.
ONE_EACH_THAT_MAY_MOVE = [
    *ONE_EACH,
    *(case for case in CASES if str(case) in {"atomo", "power_sgd"}),
]


def make_compressor(case):
    return compressors.METHODS[case.name](**json.loads(case.settings))


def gradients(num_workers, shapes, dtype="float64", seed=0):
    """Return `gradients[worker][tensor]` of different scales."""
    rng = np.random.default_rng(seed)
    return [
        [
            rng.normal(size=s).astype(dtype) * 10.0 ** -(i % 3)
            for i, s in enumerate(shapes)
        ]
        for _ in range(num_workers)
    ]


# Rows of 14 entries: a tall matrix, a wide one, and a tensor of rank 3.
SHAPES_WITH_ROWS = [(30, 14), (14, 30), (5, 6, 14)]

_ONE_BIT = "One bit codes one of two values, neither of them 0."
_ROTATED = "Rounding a rotated block changes all of its entries."
_TRANSFORMED = "A component of a transformed tile changes all of the tile's entries."
_EVEN_LEVELS = "Equation 2 has an even number of levels, none of them 0."
_FEW = "Free places hold zeros, and a code of signs alone gives these a sign too."
# Settings that move rows without a gradient, and the reason.
MOVES_IDLE_ROWS = {
    "chunked_top_k-16-3-0.75": _FEW,
    "count_sketch-0.9-3-False-0.9": "Estimates from a sketch contain other entries.",
    "demo": _TRANSFORMED,
    "demo-4-3-1.0-False": _TRANSFORMED,
    "ef_sign_sgd": _ONE_BIT,
    "laq": _EVEN_LEVELS,
    "laq-8-100.0-2-2": _EVEN_LEVELS,
    "lgc-0.5-0-1-2-60": "An autoencoder decodes zeros to small numbers.",
    "one_bit": _ONE_BIT,
    "one_bit-False": _ONE_BIT,
    "rotated_quantization": _ROTATED,
    "rotated_quantization-2": _ROTATED,
    "rotated_quantization-5-8": _ROTATED,
    "stc-0.9-True": _FEW,
    "top_k-0.9-sign": _FEW,
}


def gradients_with_idle_rows(num_workers, shape, step):
    """Return gradients by worker; only the second of every three rows is not 0.

    In the first step a single row is not 0, so that a method may have more places than
    entries, and a low-rank factor has rank 1.
    """
    rng = np.random.default_rng([step, *shape])
    gradients = rng.normal(size=(num_workers, *shape))
    rows = gradients.reshape(num_workers, -1, shape[-1])
    active = (
        np.arange(rows.shape[1]) % 3 == 1 if step else np.arange(rows.shape[1]) == 4
    )
    rows[:, ~active] = 0
    return gradients


def idle_rows(values):
    """Return the rows that have no gradient in any step."""
    rows = values.reshape(-1, values.shape[-1])
    return rows[np.arange(len(rows)) % 3 != 1]


SAMPLED = np.random.default_rng(1).normal(size=(6, 14))


@functools.cache
def samples(case, count):
    """Return one worker's contribution of `SAMPLED` in `count` steps, as rows.

    All steps start from the same state; only their random keys differ.
    """
    simulation = Simulation(
        make_compressor(case), [SAMPLED.shape], 1, "float64", compiled=True
    )
    start = simulation.residual, simulation.state
    rows = []
    for _ in range(count):
        simulation.residual, simulation.state = start
        simulation.step([[SAMPLED]])
        rows.append(simulation.sent[0][0].ravel())
    return np.stack(rows)


def draws_anything(case):
    """Return whether the seed changes one worker's contribution."""
    sent = []
    for seed in range(6):
        compressor = make_compressor(case)
        simulation = Simulation(compressor, [SAMPLED.shape], 1, "float64", seed=seed)
        simulation.step([[SAMPLED]])
        sent.append(simulation.sent[0][0])
    return np.ptp(np.stack(sent), axis=0).any()


def overhead(message):
    """Return the bytes of a collective that belong to no tensor."""
    if isinstance(message, compressors.AllReduce):
        return message.values.dtype.size
    return 4 * 5


def num_bytes(message):
    return message[0].dtype.size * int(tf.size(message[0]))


def sum_tolerance(simulation):
    """Return the allowed difference, per entry, of a sum from the sum of `sent`.

    It covers rounding of the entry and, for methods that add in other coordinates,
    rounding of the largest entries in the type of the values.
    """
    wide = 4 * np.finfo(simulation.residual[0][0].dtype).eps
    unit = max(getattr(simulation.compressor, "unit_roundoff", 0.0), wide)
    tolerances = []
    for i in range(len(simulation.sent[0])):
        magnitude = sum(np.abs(worker[i]) for worker in simulation.sent)
        largest = np.max(magnitude, initial=0.0)
        tolerances.append(simulation.num_workers * (unit * magnitude + wide * largest))
    return tolerances


def round_trip(value):
    data = keras.saving.serialize_keras_object(value)
    return keras.saving.deserialize_keras_object(data)

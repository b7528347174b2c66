"""The methods that the contract runs over, and their settings."""

import functools
import json

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import compressors
from tf_dgc.compressors.simulate import Simulation

# Settings that a method is tested with beside its defaults.
VARIANTS = {
    "atomo": [{"budget": 1}],
    "diana": [{"levels": 1, "alpha": 0.5}],
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
    "power_sgd": [{"rank": 1, "warm_start": False}],
    "qsgd": [{"levels": 1, "bucket": 7}, {"levels": 127}],
    "random_k": [{"sparsity": 0.5}, {"sparsity": 0.75, "unbiased": True}],
    "top_k": [{"sparsity": 0.9, "value_dtype": t} for t in ("bfloat16", "sign")],
}
CASES = [
    (name, json.dumps(settings))
    for name in compressors.METHODS
    for settings in ({}, *VARIANTS.get(name, []))
]
IDS = ["-".join([name, *map(str, json.loads(text).values())]) for name, text in CASES]


def make(case):
    name, text = case
    return compressors.METHODS[name](**json.loads(text))


def gradients(num_workers, shapes, dtype="float64", seed=0):
    """Return `gradients[worker][tensor]`, of several scales."""
    rng = np.random.default_rng(seed)
    return [
        [
            rng.normal(size=s).astype(dtype) * 10.0 ** -(i % 3)
            for i, s in enumerate(shapes)
        ]
        for _ in range(num_workers)
    ]


SAMPLED = np.random.default_rng(1).normal(size=(6, 14))


@functools.cache
def samples(case, count):
    """Return what one worker sends of `SAMPLED` in `count` draws, as rows."""
    simulation = Simulation(make(case), [SAMPLED.shape] * count, 1, "float64")
    simulation.step([[SAMPLED] * count])
    return np.stack([sent.ravel() for sent in simulation.sent[0]])


def overhead(message):
    """Return the bytes of a collective that belong to no tensor."""
    if isinstance(message, compressors.Sum):
        return message.values.dtype.size
    return 4 * 5


def num_bytes(message):
    return message[0].dtype.size * int(tf.size(message[0]))


def sum_tolerance(simulation):
    """Return how far, per entry, a sum formed on the way may be from that of `sent`."""
    wide = np.finfo(simulation.residual[0][0].dtype).eps
    unit = max(simulation.compressor.rounding, 4 * wide)
    return [
        simulation.num_workers
        * unit
        * sum(np.abs(worker[i]) for worker in simulation.sent)
        for i in range(len(simulation.sent[0]))
    ]


def round_trip(thing):
    data = keras.saving.serialize_keras_object(thing)
    return keras.saving.deserialize_keras_object(data)

"""Counts the bytes of a model's step, by the dtype of its values.

    python benchmarks/sizes.py --model resnet50
    python benchmarks/sizes.py --positions

One worker takes a step with random gradients, without forward and backward pass. Bytes
are those of `optimizer.stats`, by dtypes of values and of uncompressed tensors.
`--positions` compares the bits per position with the least of any code of known size,
and with the mean of a code of variable size.
"""

import math
import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from common import models, progress, reporting

import tf_dgc
from tf_dgc.codecs import elias_fano

_SIZES_MODEL = flags.DEFINE_enum("model", "resnet50", list(models.MODELS), "The model.")
_SIZES_SPARSITY = flags.DEFINE_float("sparsity", 0.999, "Share of entries not sent.")
_POSITIONS = flags.DEFINE_bool("positions", False, "Compare codes of positions.")
_SIZES_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")

TYPES = [
    (None, None),
    ("bfloat16", None),
    ("mxint8", None),
    ("mxint8", "bfloat16"),
    ("mxint8", "mxint8"),
    ("mxfp4", "mxint8"),
]
COLUMNS = [
    ("value_dtype", "value_dtype", ""),
    ("uncompressed_dtype", "uncompressed_dtype", ""),
    ("entries", "entries", ",d"),
    ("exempt_entries", "of these exempt", ",d"),
    ("bytes_per_step", "bytes/step", ",d"),
    ("ratio", "ratio", ",.0f"),
]
POSITION_COLUMNS = [
    ("sparsity", "sparsity", ".2%"),
    ("least", "least, known size", ".2f"),
    ("elias_fano", "Elias-Fano", ".2f"),
    ("rice", "Rice, on the average", ".2f"),
    ("rice_at_most", "Rice, at most", ".2f"),
    ("more_bytes", "bytes above Rice", ",d"),
]
ENTRIES = 25_560_000


def measure(variables, value_dtype, uncompressed_dtype):
    """Return the row of one step."""
    optimizer = tf_dgc.DGCOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        _SIZES_SPARSITY.value,
        value_dtype=value_dtype,
        uncompressed_dtype=uncompressed_dtype,
        diagnostics=tf_dgc.Diagnostics(check_every=None),
    )
    optimizer.build(variables)
    gradients = [tf.random.stateless_normal(v.shape, [1, 2]) for v in variables]
    optimizer.apply(gradients, variables)
    stats = optimizer.stats
    small = [v for v in variables if len(v.shape) < 2]
    return {
        "model": _SIZES_MODEL.value,
        "value_dtype": str(value_dtype),
        "uncompressed_dtype": str(uncompressed_dtype),
        "entries": int(stats.entries_per_step),
        "exempt_entries": sum(v.shape.num_elements() for v in small),
        "bytes_per_step": int(stats.bytes_per_step),
        "ratio": stats.ratio,
    }


def compare_positions(sparsity):
    """Return the bits per position of each code, for random positions."""
    n, k = ENTRIES, round((1 - sparsity) * ENTRIES)
    positions = np.random.default_rng(0).choice(n, k, replace=False)
    gaps = np.diff(np.sort(positions), prepend=-1) - 1
    # Low bits, a quotient in unary and the bit that ends it.
    rice, low = min((low + 1 + np.mean(gaps >> low), low) for low in range(24))
    binomial_bits = _log2_factorial(n) - _log2_factorial(k) - _log2_factorial(n - k)
    fixed = sum(elias_fano.stream_bits(n, k)) / k
    return {
        "sparsity": sparsity,
        "least": binomial_bits / k,
        "elias_fano": fixed,
        "rice": rice,
        "rice_at_most": low + 1 + (n >> low) / k,
        "more_bytes": round((fixed - rice) * k / 8),
    }


def _log2_factorial(n):
    return math.lgamma(n + 1) / math.log(2)


def main(_):
    """Count the bytes of all dtypes, or compare codes of positions, and report."""
    if _POSITIONS.value:
        rows = [compare_positions(s) for s in (0.99, 0.999, 0.9999)]
        reporting.report(rows, POSITION_COLUMNS, "Positions", _SIZES_JSON.value)
        return
    variables = models.MODELS[_SIZES_MODEL.value]().trainable_variables
    pairs = progress.track(TYPES, "types", lambda pair: " and ".join(map(str, pair)))
    rows = [
        measure(variables, value_dtype, uncompressed_dtype)
        for value_dtype, uncompressed_dtype in pairs
    ]
    reporting.report(rows, COLUMNS, "Bytes of a step", _SIZES_JSON.value)


if __name__ == "__main__":
    app.run(main)

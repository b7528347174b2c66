"""The same step by the native operations: one pass over memory."""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.choice import choose
from tf_dgc.codecs import dense, header, wire
from tf_dgc.compressors.common.one_round import from_words
from tf_dgc.ops import loader
from tf_dgc.steps import operations
from tf_dgc.steps.accumulation import Gradient, divide, entries, flatten
from tf_dgc.steps.plan import LocalStep, Plan
from tf_dgc.transforms import clipping
from tf_dgc.transforms.preconditioning import Divisor


def is_live(variables: Sequence[keras.Variable]) -> bool:
    """Whether the native operations can be used for these accumulators, here and now.

    They run on CPUs and, but for float64, on GPUs if there are CUDA kernels.
    """
    if loader.native().library is None:
        return False
    if not is_on_gpu(variables):
        return True
    return all(is_on_gpu([v]) for v in variables) and _has_gpu_kernels(variables)


def is_on_gpu(variables: Sequence[keras.Variable]) -> bool:
    """Whether any of the variables is on a GPU."""
    return any("GPU" in v.value.device.upper() for v in variables)


def _has_gpu_kernels(variables: Sequence[keras.Variable]) -> bool:
    wide = any(v.dtype == "float64" for v in variables)
    return not wide and not loader.native().cuda_problem


@functools.cache
def warn_of_xla() -> None:
    """Warn once per process, if XLA is why the native operations are not used."""
    if loader.native().library is None:
        return
    warnings.warn(
        "XLA compiles this step (`jit_compile=True`) and does not know the native "
        "operations of tf_dgc; TensorFlow operations do the same and take several "
        "times as long. Compile the model with `jit_compile=False` to use them.",
        RuntimeWarning,
        stacklevel=2,
    )


def compress(step: LocalStep) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Do what `operations.compress` does; a large dense step is left to it."""

    def whole() -> tuple:
        if step.plan.is_exempt:
            return _compress_exempt(step)
        return operations.compress(step._replace(plan=step.plan._replace(dense=True)))

    def chosen() -> tuple:
        words = _compress(step)
        finite = tf.equal(words[header.FLAGS], 0)
        return tf.zeros([0], step.plan.summed_dtype), words, finite

    return choose(step.plan.dense, whole, chosen)


def unpack(
    plan: Plan, vector: tf.Tensor, buffers: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Do what `operations.unpack` does."""

    def chosen() -> tuple:
        nonfinite, sums = library().tf_dgc_sum(
            buffers=buffers,
            counts=counts(plan),
            T=[t.dtype for t in plan.layout],
            sizes=[t.size for t in plan.layout],
            **agreed(plan),
        )
        return sums, nonfinite

    return choose(plan.dense, lambda: dense.decode(vector, plan.layout), chosen)


def _compress_exempt(step: LocalStep) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Take all in one pass, as words, which are the vector's bits."""
    dtype = step.plan.summed_dtype
    if dtype == tf.bfloat16:
        step = step._replace(plan=step.plan.coded_as("bfloat16"))
    words = _compress(step)
    finite = tf.equal(words[header.FLAGS], 0)
    body = words[header.NUM_WORDS :]
    if dtype == tf.bfloat16:
        values = _halves(body, [t.size for t in step.plan.layout])
    else:
        values = from_words(body, dtype, [-1])
    return dense.encode([values], finite, dtype), tf.zeros([0], tf.int32), finite


def _halves(words: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Return bfloat16 numbers of tensors, each from a word of its own on."""
    halves = tf.reshape(tf.bitcast(words, tf.bfloat16), [-1])
    if not any(size % 2 for size in sizes):
        return halves
    padded = [size + size % 2 for size in sizes]
    parts = zip(tf.split(halves, padded), sizes, strict=True)
    return tf.concat([part[:size] for part, size in parts], axis=0)


def _compress(step: LocalStep) -> tf.Tensor:
    if not knows(step.divisors):
        step = _divided(step)
    gradients = _for_device(step)
    values = list(map(entries, gradients))
    words = library().tf_dgc_compress(
        gradients=values,
        velocity=[handle(v) for v in step.velocity or []],
        residual=[handle(v) for v in step.residual or []],
        momentum=tf.constant(step.momentum, tf.float64),
        scales=drop(values, step.scales, step.residual or []),
        counts=counts(step.plan),
        offsets=tf.stack(step.offsets),
        nesterov=step.nesterov,
        factor_masking=step.factor_masking,
        largest_exponents=_exponents(step.plan),
        **row_operands(gradients),
        **divisor_operands(step.divisors),
        **agreed(step.plan),
    )
    length = wire.sparse_words(step.plan.layout, step.plan.counts)
    return tf.ensure_shape(words, [length if isinstance(length, int) else None])


def drop(
    gradients: Sequence[tf.Tensor],
    scales: Sequence[clipping.Scale],
    variables: Sequence[keras.Variable],
) -> tf.Tensor:
    """Do what `clipping.drop` does, natively but on GPUs.

    Args:
        gradients: dense tensors, or the values of rows.
        scales: factor of each.
        variables: accumulators, which say where the step runs.
    """
    on_gpu = is_on_gpu(variables) or any("GPU" in g.device.upper() for g in gradients)
    return clipping.drop(gradients, scales, natively=not on_gpu)


def row_operands(gradients: Sequence[Gradient]) -> dict[str, Any]:
    """Return what operations take of the rows of sparse gradients."""
    rows = {
        i: g.indices for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)
    }
    return {"rows": list(rows.values()), "sparse": list(rows)}


def knows(divisors: Sequence[Divisor | None]) -> bool:
    """Whether the native operations can do these divisions."""
    return all(d is None or d.is_plain for d in divisors)


def divisor_operands(divisors: Sequence[Divisor | None]) -> dict[str, Any]:
    """Return what operations take of the divisors of gradients."""
    places = [i for i, d in enumerate(divisors) if d is not None]
    found = [d for d in divisors if d is not None]
    rows = [d.numbers for d in found]
    return {
        "moments": [handle(d.moment) for d in found],
        "divided": places,
        "divisors": tf.stack(rows) if rows else tf.zeros([0, 5], tf.float64),
    }


def _divided(step: LocalStep) -> LocalStep:
    """Return the step with its divisions done, for kernels that do not know them."""
    given, scales = divide(step.plan.layout, step.gradients, step.scales, step.divisors)
    return step._replace(gradients=given, scales=scales, divisors=())


def _for_device(step: LocalStep) -> list[Gradient]:
    """Return the gradients; without sparse ones on GPUs, whose kernel has none."""
    if not is_on_gpu(step.residual or []):
        return list(step.gradients)
    pairs = zip(step.gradients, step.plan.layout, strict=True)
    return [flatten(g, t) if entries(g) is not g else g for g, t in pairs]


def _exponents(plan: Plan) -> list[int]:
    """Return e of `largest`, which is 2**e; 1024 is beyond any number."""
    return [
        1024 if math.isinf(t.largest) else math.frexp(t.largest)[1] - 1
        for t in plan.layout
    ]


def agreed(plan: Plan) -> dict[str, Any]:
    """Return what all workers agree upon, as attributes of the operations."""
    return {
        "value_types": [t.wire_name for t in plan.layout],
        "fingerprint": wire.fingerprint(plan.layout),
    }


def counts(plan: Plan) -> tf.Tensor:
    """Return how many entries of each tensor are sent, int32 `[tensors]`."""
    if any(map(tf.is_tensor, plan.counts)):
        return tf.stack([tf.cast(k, tf.int32) for k in plan.counts])
    return tf.constant(plan.counts, tf.int32)


def handle(variable: keras.Variable) -> tf.Tensor:
    """Return the resource of this replica's value."""
    return variable.value.handle


def library() -> Any:
    """Return the module of the operations, one function each."""
    return loader.native().library

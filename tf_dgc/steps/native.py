"""The top-k step's arithmetic, and updates, with the native operations.

`tensorflow_ops.py` has the same functions with TensorFlow operations, which produce the
same bits.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tf_dgc import clipping, native_library
from tf_dgc.codecs import buffer
from tf_dgc.codecs.bits import to_words
from tf_dgc.compressors.common.one_round import from_words
from tf_dgc.conditions import smart_cond
from tf_dgc.steps import gpu_check, tensorflow_ops
from tf_dgc.steps.accumulation import Gradient, divide, flatten, gradient_values
from tf_dgc.steps.base import LocalStep, StepPlan, UpdateRule
from tf_dgc.steps.preconditioning import Divisor

_Compressed: TypeAlias = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
_Decoded: TypeAlias = tuple[list[tf.Tensor], tf.Tensor]


def is_available(variables: Sequence[keras.Variable]) -> bool:
    """Whether these accumulators have native operations: not in float64 on GPUs."""
    if native_library.load_library().library is None:
        return False
    if not is_on_gpu(variables):
        return True
    return (
        all(is_on_gpu([v]) for v in variables)
        and all(v.dtype != "float64" for v in variables)
        and gpu_check.uses_kernels()
    )


def rules_available(variables: Sequence[keras.Variable]) -> bool:
    """Whether `UpdateRule`s work for these variables: on CPUs (on GPUs, plain SGD)."""
    return is_available(variables) and not is_on_gpu(variables)


def is_on_gpu(variables: Sequence[keras.Variable]) -> bool:
    """Return whether any of the variables is on a GPU."""
    return any("GPU" in v.value.device.upper() for v in variables)


def has_gpus() -> bool:
    """Return whether this process has GPUs."""
    return bool(tf.config.get_visible_devices("GPU"))


@functools.cache
def warn_of_xla() -> None:
    """Warn once per process if the native operations are not used because of XLA."""
    if native_library.load_library().library is None:
        return
    warnings.warn(
        "XLA compiles this step (`jit_compile=True`) and does not support the native "
        "operations of tf_dgc; TensorFlow operations do the same and take several "
        "times as long. Compile the model with `jit_compile=False` to use them.",
        RuntimeWarning,
        stacklevel=2,
    )


# Compressing and decoding.


def compress(step: LocalStep) -> _Compressed:
    """Correct, select, mask and encode; see `tensorflow_ops.compress`.

    A dense step is native only if all tensors are uncompressed and of one dtype.
    """

    def encode_dense() -> _Compressed:
        if step.plan.is_uncompressed:
            return _encode_uncompressed(step)
        plan = step.plan._replace(dense=True)
        return tensorflow_ops.compress(step._replace(plan=plan))

    def encode_sparse() -> _Compressed:
        words = _encode(step)
        return tf.zeros([0], step.plan.summed_dtype), words, _is_finite(words)

    compressed: _Compressed = smart_cond(step.plan.dense, encode_dense, encode_sparse)
    return compressed


def decode_and_sum(plan: StepPlan, vector: tf.Tensor, buffers: tf.Tensor) -> _Decoded:
    """Decode the reply of the exchange; see `tensorflow_ops.decode_and_sum`."""

    def decode_sparse() -> _Decoded:
        nonfinite, sums = call(
            "tf_dgc_sum",
            buffers=buffers,
            sizes=[t.size for t in plan.layout],
            **_buffer_operands(plan),
        )
        return sums, nonfinite

    decoded: _Decoded = smart_cond(
        plan.dense, lambda: buffer.decode_dense(vector, plan.layout), decode_sparse
    )
    return decoded


def scales_or_nan(
    gradients: Sequence[tf.Tensor],
    scales: Sequence[clipping.Scale],
    variables: Sequence[keras.Variable],
) -> tf.Tensor:
    """Return `clipping.scales_or_nan`, native unless anything is on a GPU."""
    on_gpu = is_on_gpu(variables) or any("GPU" in g.device.upper() for g in gradients)
    return clipping.scales_or_nan(gradients, scales, use_native=not on_gpu)


def _encode_uncompressed(step: LocalStep) -> _Compressed:
    """Encode all entries in one pass; the words are the bits of the dense vector."""
    dtype = step.plan.summed_dtype
    if dtype == tf.bfloat16:
        step = step._replace(plan=step.plan.coded_as("bfloat16"))
    words = _encode(step)
    body = words[buffer.HEADER_WORDS :]
    if dtype == tf.bfloat16:
        values = _bfloat16_values(body, [t.size for t in step.plan.layout])
    else:
        values = from_words(body, dtype, [-1])
    finite = _is_finite(words)
    return buffer.encode_dense([values], finite, dtype), tf.zeros([0], tf.int32), finite


def _bfloat16_values(words: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Return the bfloat16 numbers of tensors that each begin with a new word."""
    values = tf.reshape(tf.bitcast(words, tf.bfloat16), [-1])
    if not any(size % 2 for size in sizes):
        return values
    padded = tf.split(values, [size + size % 2 for size in sizes])
    return tf.concat([p[:size] for p, size in zip(padded, sizes, strict=True)], axis=0)


def _encode(step: LocalStep) -> tf.Tensor:
    """Return the words of a sparse step; update velocity and residual."""
    gradients, scales, divisors = step.gradients, step.scales, step.divisors
    if not supports(divisors):
        gradients, scales = divide(step.plan.layout, gradients, scales, divisors)
        divisors = ()
    if is_on_gpu(step.residual or []):  # the GPU kernel has no sparse gradients
        gradients = [
            flatten(g, t) if isinstance(g, tf.IndexedSlices) else g
            for g, t in zip(gradients, step.plan.layout, strict=True)
        ]
    values = [gradient_values(g) for g in gradients]
    words = call(
        "tf_dgc_compress",
        gradients=values,
        velocity=[resource_handle(v) for v in step.velocity or []],
        residual=[resource_handle(v) for v in step.residual or []],
        momentum=tf.constant(step.momentum, tf.float64),
        scales=scales_or_nan(values, scales, step.residual or []),
        counts=entry_counts(step.plan),
        offsets=tf.stack(step.offsets),
        nesterov=step.nesterov,
        factor_masking=step.factor_masking,
        largest_exponents=_exponents(step.plan),
        **row_operands(gradients),
        **divisor_operands(divisors),
        **layout_attributes(step.plan),
    )
    length = buffer.sparse_words(step.plan.layout, step.plan.counts)
    return tf.ensure_shape(words, [length if isinstance(length, int) else None])


def _is_finite(words: tf.Tensor) -> tf.Tensor:
    return tf.equal(words[buffer.FLAGS_WORD], 0)


def _exponents(plan: StepPlan) -> list[int]:
    """Return e of each tensor's `largest`, 2**e; 1024 if it is infinite."""
    return [
        1024 if math.isinf(t.max_magnitude) else math.frexp(t.max_magnitude)[1] - 1
        for t in plan.layout
    ]


# Updating variables.


def decode_and_apply(
    plan: StepPlan, vector: tf.Tensor, buffers: tf.Tensor, rule: UpdateRule
) -> tf.Tensor:
    """Decode, sum, update variables; return how many gradients were not finite.

    Plain SGD touches only the entries that were sent, with the same bits as an update
    of all entries. Arguments are those of `decode_and_sum`.
    """
    # The sum of bfloat16 values has the accumulators' dtype from here on.
    plan_of_sum = plan.coded_as(None)
    vector = tf.cast(vector, plan_of_sum.summed_dtype)

    def apply_dense() -> tf.Tensor:
        if not rule.is_plain_sgd:
            ops().tf_dgc_apply_sums(**rule_operands(rule), sums=[vector], flat=True)
            return tf.cast(vector[0], tf.int32)
        if plan.is_uncompressed:
            return _apply_sgd_uncompressed(plan_of_sum, vector, rule)
        return _apply_sgd_dense(plan, vector, rule)

    def apply_sparse() -> tf.Tensor:
        if rule.is_plain_sgd:
            return _apply_sgd_sparse(plan, buffers, rule)
        return ops().tf_dgc_apply(
            **rule_operands(rule), buffers=buffers, **_buffer_operands(plan)
        )

    return smart_cond(plan.dense, apply_dense, apply_sparse)


def apply_decoded(
    decode: Callable[[], tuple[Sequence[tf.Tensor], tf.Tensor]], rule: UpdateRule
) -> tf.Tensor:
    """Update float32 variables and slots; `decode` is that of `StepOutcome`."""
    sums, nonfinite = decode()
    apply_sums(rule, [tf.cast(s, tf.float32) for s in sums])
    return nonfinite


def apply_sums(rule: UpdateRule, sums: Sequence[tf.Tensor]) -> None:
    """Update float32 variables and slots in one pass over each; sums are float32."""
    ops().tf_dgc_apply_sums(**rule_operands(rule), sums=list(sums), flat=False)


def assign_entries(
    plan: StepPlan, words: tf.Tensor, variables: Sequence[keras.Variable]
) -> tf.Tensor:
    """Assign the entries of one buffer, int32 `[w]`; return 1 if it is flagged, else 0.

    After a TensorFlow scatter, every later read would copy the whole variable.
    """
    return ops().tf_dgc_put(
        variables=[resource_handle(v) for v in variables],
        buffers=words[tf.newaxis],
        **_buffer_operands(plan),
    )


def _apply_sgd_dense(plan: StepPlan, vector: tf.Tensor, rule: UpdateRule) -> tf.Tensor:
    sums, nonfinite = buffer.decode_dense(vector, plan.layout)
    rate = _sgd_rate(rule)
    for v, s in zip(rule.variables, sums, strict=True):
        update = tf.reshape(s * tf.cast(rate, s.dtype), v.shape)
        tf.raw_ops.AssignSubVariableOp(resource=resource_handle(v), value=update)
    return nonfinite


def _apply_sgd_uncompressed(
    plan: StepPlan, vector: tf.Tensor, rule: UpdateRule
) -> tf.Tensor:
    """Apply a dense vector in one pass, as the buffer of a single worker."""
    length = buffer.sparse_words(plan.layout, plan.counts)
    fingerprint = buffer.layout_fingerprint(plan.layout)
    body = to_words(vector[1:])
    words = buffer.add_header(fingerprint, length, [body], tf.constant(True))
    applied = _apply_sgd_sparse(plan, words[tf.newaxis], rule)
    with tf.control_dependencies([applied]):
        return tf.cast(vector[0], tf.int32)


def _apply_sgd_sparse(
    plan: StepPlan, buffers: tf.Tensor, rule: UpdateRule
) -> tf.Tensor:
    return call(
        "tf_dgc_descend",
        variables=[resource_handle(v) for v in rule.variables],
        rate=_sgd_rate(rule),
        buffers=buffers,
        **_buffer_operands(plan),
    )


def _sgd_rate(rule: UpdateRule) -> tf.Tensor:
    return rule.hyperparameters["sgd"][2]


# Operands and attributes of the native operations.


def ops() -> Any:
    """Return the module of the native operations, one function each."""
    return native_library.load_library().library


def call(name: str, **operands: Any) -> Any:
    """Call a native operation that reads or writes words."""
    operation = getattr(ops(), name)
    # On a GPU, TensorFlow takes int32 tensors between eager operations for host memory,
    # and the words are in the GPU's. Within a function it knows, and copies.
    if tf.executing_eagerly() and has_gpus():
        operation = _traced(operation)
    return operation(**operands)


@functools.cache
def _traced(operation: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(operation)


def resource_handle(variable: keras.Variable) -> tf.Tensor:
    """Return the resource of this replica's value."""
    return variable.value.handle


def entry_counts(plan: StepPlan) -> tf.Tensor:
    """Return the number of entries sent of each tensor, int32 `[tensors]`."""
    if any(map(tf.is_tensor, plan.counts)):
        return tf.stack([tf.cast(k, tf.int32) for k in plan.counts])
    return tf.constant(plan.counts, tf.int32)


def layout_attributes(plan: StepPlan) -> dict[str, Any]:
    """Return the attributes for a layout, which are equal on all workers."""
    return {
        "value_types": [t.wire_name for t in plan.layout],
        "fingerprint": buffer.layout_fingerprint(plan.layout),
    }


def _buffer_operands(plan: StepPlan) -> dict[str, Any]:
    return {
        "counts": entry_counts(plan),
        "T": [t.dtype for t in plan.layout],
        **layout_attributes(plan),
    }


def row_operands(gradients: Sequence[Gradient]) -> dict[str, Any]:
    """Return the operands for the rows of sparse gradients."""
    rows = {
        i: g.indices for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)
    }
    return {"rows": list(rows.values()), "sparse": list(rows)}


def supports(divisors: Sequence[Divisor | None]) -> bool:
    """Return whether the native operations support these divisors."""
    return all(d is None or d.is_plain for d in divisors)


def divisor_operands(divisors: Sequence[Divisor | None]) -> dict[str, Any]:
    """Return the operands for dividing gradients."""
    by_place = {i: d for i, d in enumerate(divisors) if d is not None}
    numbers = [d.numbers for d in by_place.values()]
    return {
        "moments": [resource_handle(d.moment) for d in by_place.values()],
        "divided": list(by_place),
        "divisors": tf.stack(numbers) if numbers else tf.zeros([0, 5], tf.float64),
    }


def rule_operands(rule: UpdateRule) -> dict[str, Any]:
    """Return the operands for applying a rule."""
    names = list(dict.fromkeys(rule.names))
    updated = [
        variable
        for v, slots in zip(rule.variables, rule.slots, strict=True)
        for variable in (v, *slots)
    ]
    return {
        "rules": names,
        "rule_of": [names.index(name) for name in rule.names],
        "decays": list(rule.decays),
        "updated": [resource_handle(v) for v in updated],
        "hyperparameters": tf.stack([rule.hyperparameters[name] for name in names]),
    }

"""The same step by the native operations: one pass over memory."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc import clipping, native_library
from tf_dgc.codecs import buffer
from tf_dgc.compressors.common.one_round import from_words, to_words
from tf_dgc.smart_cond import smart_cond
from tf_dgc.steps import tensorflow_ops
from tf_dgc.steps.accumulation import Gradient, divide, flatten, gradient_values
from tf_dgc.steps.plan import LocalStep, StepPlan
from tf_dgc.steps.preconditioning import Divisor


def is_available(variables: Sequence[keras.Variable]) -> bool:
    """Whether the native operations can be used for these accumulators, here and now.

    They run on CPUs and, but for float64, on GPUs if there are CUDA kernels.
    """
    if native_library.load_library().library is None:
        return False
    if not is_on_gpu(variables):
        return True
    return all(is_on_gpu([v]) for v in variables) and _has_gpu_kernels(variables)


def is_on_gpu(variables: Sequence[keras.Variable]) -> bool:
    """Whether any of the variables is on a GPU."""
    return any("GPU" in v.value.device.upper() for v in variables)


def _has_gpu_kernels(variables: Sequence[keras.Variable]) -> bool:
    wide = any(v.dtype == "float64" for v in variables)
    return not wide and not native_library.load_library().cuda_problem


@functools.cache
def warn_of_xla() -> None:
    """Warn once per process, if XLA is why the native operations are not used."""
    if native_library.load_library().library is None:
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
        if step.plan.is_uncompressed:
            return _compress_exempt(step)
        return tensorflow_ops.compress(
            step._replace(plan=step.plan._replace(dense=True))
        )

    def chosen() -> tuple:
        words = _compress(step)
        finite = tf.equal(words[buffer.FLAGS_WORD], 0)
        return tf.zeros([0], step.plan.summed_dtype), words, finite

    return smart_cond(step.plan.dense, whole, chosen)


def decode_and_sum(
    plan: StepPlan, vector: tf.Tensor, buffers: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Do what `operations.unpack` does."""

    def chosen() -> tuple:
        nonfinite, sums = ops().tf_dgc_sum(
            buffers=buffers,
            counts=entry_counts(plan),
            T=[t.dtype for t in plan.layout],
            sizes=[t.size for t in plan.layout],
            **layout_attributes(plan),
        )
        return sums, nonfinite

    return smart_cond(
        plan.dense, lambda: buffer.decode_dense(vector, plan.layout), chosen
    )


def _compress_exempt(step: LocalStep) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Take all in one pass, as words, which are the vector's bits."""
    dtype = step.plan.summed_dtype
    if dtype == tf.bfloat16:
        step = step._replace(plan=step.plan.coded_as("bfloat16"))
    words = _compress(step)
    finite = tf.equal(words[buffer.FLAGS_WORD], 0)
    body = words[buffer.HEADER_WORDS :]
    if dtype == tf.bfloat16:
        values = _halves(body, [t.size for t in step.plan.layout])
    else:
        values = from_words(body, dtype, [-1])
    return buffer.encode_dense([values], finite, dtype), tf.zeros([0], tf.int32), finite


def _halves(words: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Return bfloat16 numbers of tensors, each from a word of its own on."""
    halves = tf.reshape(tf.bitcast(words, tf.bfloat16), [-1])
    if not any(size % 2 for size in sizes):
        return halves
    padded = [size + size % 2 for size in sizes]
    parts = zip(tf.split(halves, padded), sizes, strict=True)
    return tf.concat([part[:size] for part, size in parts], axis=0)


def _compress(step: LocalStep) -> tf.Tensor:
    if not supports(step.divisors):
        step = _divided(step)
    gradients = _for_device(step)
    values = list(map(gradient_values, gradients))
    words = ops().tf_dgc_compress(
        gradients=values,
        velocity=[resource_handle(v) for v in step.velocity or []],
        residual=[resource_handle(v) for v in step.residual or []],
        momentum=tf.constant(step.momentum, tf.float64),
        scales=zero_scales_if_nonfinite(values, step.scales, step.residual or []),
        counts=entry_counts(step.plan),
        offsets=tf.stack(step.offsets),
        nesterov=step.nesterov,
        factor_masking=step.factor_masking,
        largest_exponents=_exponents(step.plan),
        **row_operands(gradients),
        **divisor_operands(step.divisors),
        **layout_attributes(step.plan),
    )
    length = buffer.sparse_words(step.plan.layout, step.plan.counts)
    return tf.ensure_shape(words, [length if isinstance(length, int) else None])


def zero_scales_if_nonfinite(
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
    return clipping.scales_or_nan(gradients, scales, use_native=not on_gpu)


def row_operands(gradients: Sequence[Gradient]) -> dict[str, Any]:
    """Return what operations take of the rows of sparse gradients."""
    rows = {
        i: g.indices for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)
    }
    return {"rows": list(rows.values()), "sparse": list(rows)}


def supports(divisors: Sequence[Divisor | None]) -> bool:
    """Whether the native operations can do these divisions."""
    return all(d is None or d.is_plain for d in divisors)


def divisor_operands(divisors: Sequence[Divisor | None]) -> dict[str, Any]:
    """Return what operations take of the divisors of gradients."""
    places = [i for i, d in enumerate(divisors) if d is not None]
    found = [d for d in divisors if d is not None]
    rows = [d.numbers for d in found]
    return {
        "moments": [resource_handle(d.moment) for d in found],
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
    return [flatten(g, t) if gradient_values(g) is not g else g for g, t in pairs]


def _exponents(plan: StepPlan) -> list[int]:
    """Return e of `largest`, which is 2**e; 1024 is beyond any number."""
    return [
        1024 if math.isinf(t.largest) else math.frexp(t.largest)[1] - 1
        for t in plan.layout
    ]


def layout_attributes(plan: StepPlan) -> dict[str, Any]:
    """Return what all workers agree upon, as attributes of the operations."""
    return {
        "value_types": [t.wire_name for t in plan.layout],
        "fingerprint": buffer.layout_fingerprint(plan.layout),
    }


def entry_counts(plan: StepPlan) -> tf.Tensor:
    """Return how many entries of each tensor are sent, int32 `[tensors]`."""
    if any(map(tf.is_tensor, plan.counts)):
        return tf.stack([tf.cast(k, tf.int32) for k in plan.counts])
    return tf.constant(plan.counts, tf.int32)


def resource_handle(variable: keras.Variable) -> tf.Tensor:
    """Return the resource of this replica's value."""
    return variable.value.handle


def ops() -> Any:
    """Return the module of the operations, one function each."""
    return native_library.load_library().library


# --- The update of variables by the native operations, without sums in between.


class UpdateRule(NamedTuple):
    """An update that the native operations know, of some variables.

    Attributes:
        names: name of each variable's rule in `custom_ops/cpu/rules.h`.
        hyperparameters: numbers of the rules by name, float64 `[6]`; the learning rate
            is first.
        variables: variables of the model.
        slots: optimizer's variables of each variable, in its rule's order.
        decays: whether each variable's weights decay.
    """

    names: Sequence[str]
    hyperparameters: dict[str, tf.Tensor]
    variables: Sequence[keras.Variable]
    slots: Sequence[Sequence[keras.Variable]]
    decays: Sequence[bool]

    @property
    def descends(self) -> bool:
        """Whether entries are unchanged where the sum is 0."""
        return set(self.names) <= {"sgd"} and not any(self.decays)

    @property
    def is_narrow(self) -> bool:
        """Whether all variables are float32."""
        return all(v.dtype == "float32" for v in self.variables)

    def of(self, places: Sequence[int]) -> "UpdateRule":
        """Return the same update of some of these variables."""
        return self._replace(
            names=[self.names[i] for i in places],
            variables=[self.variables[i] for i in places],
            slots=[self.slots[i] for i in places],
            decays=[self.decays[i] for i in places],
        )


def rules_available(variables: Sequence[keras.Variable]) -> bool:
    """Whether rules can be applied to these variables here: on CPUs alone.

    Plain descent by `apply` runs where a step's other operations do.
    """
    return is_available(variables) and not is_on_gpu(variables)


def decode_and_apply(
    plan: StepPlan, vector: tf.Tensor, buffers: tf.Tensor, rule: UpdateRule
) -> tf.Tensor:
    """Decode, sum, and update this worker's variables and slots in place.

    Plain descent touches only what was sent; the result is that of the dense update,
    bit for bit.

    Args:
        plan: plan that was packed with.
        vector: sum of the dense vectors; ignored if sparse.
        buffers: buffers of all workers, int32 `[num_workers, words]`; ignored if dense.
        rule: update of the plan's tensors, where that is live; or descent.

    Returns:
        The number of workers whose gradient was not finite, scalar int32.
    """
    # A sum of what was coded is not coded itself.
    vector = tf.cast(vector, plan.coded_as(None).summed_dtype)
    if rule.descends:
        return _descend(plan, vector, buffers, rule)

    def whole() -> tf.Tensor:
        _apply_sums(rule, [vector], flat=True)
        return tf.cast(vector[0], tf.int32)

    def chosen() -> tf.Tensor:
        return ops().tf_dgc_apply(
            **rule_operands(rule),
            buffers=buffers,
            counts=entry_counts(plan),
            T=[t.dtype for t in plan.layout],
            **layout_attributes(plan),
        )

    return smart_cond(plan.dense, whole, chosen)


def assign_entries(
    plan: StepPlan, words: tf.Tensor, variables: Sequence[keras.Variable]
) -> tf.Tensor:
    """Set variables in place to what one buffer has, at the positions that it has.

    TensorFlow's own scatter leaves a variable behind of which every later read is a
    copy of all of it.

    Args:
        plan: plan of a sparse step, by which the buffer was encoded.
        words: buffer, int32 `[words]`.
        variables: variables of the plan's dtypes, where `is_live`.

    Returns:
        Whether the buffer is marked as of a gradient that is not finite, scalar int32.
    """
    return ops().tf_dgc_put(
        variables=[resource_handle(v) for v in variables],
        buffers=words[tf.newaxis],
        counts=entry_counts(plan),
        T=[t.dtype for t in plan.layout],
        **layout_attributes(plan),
    )


def apply_decoded(
    decode: Callable[[], tuple[Sequence[tf.Tensor], tf.Tensor]], rule: UpdateRule
) -> tf.Tensor:
    """Update by what a step's `Outcome.decode` returns, as `apply` does.

    Args:
        decode: function that returns sums, and the number of workers.
        rule: update of float32 variables, where that is live.
    """
    sums, nonfinite = decode()
    apply_sums(rule, [tf.cast(s, tf.float32) for s in sums])
    return nonfinite


def apply_sums(rule: UpdateRule, sums: Sequence[tf.Tensor]) -> None:
    """Update this worker's variables and slots by sums, in one pass over each.

    Args:
        rule: update of float32 variables, where that is live.
        sums: sum over workers of each variable, float32, of any shape.
    """
    _apply_sums(rule, list(sums), flat=False)


def _apply_sums(rule: UpdateRule, sums: list[tf.Tensor], flat: bool) -> None:
    ops().tf_dgc_apply_sums(**rule_operands(rule), sums=sums, flat=flat)


def rule_operands(rule: UpdateRule) -> dict:
    """Return what all operations that apply rules take."""
    rules = list(dict.fromkeys(rule.names))
    rows = [(v, *slots) for v, slots in zip(rule.variables, rule.slots, strict=True)]
    return {
        "rules": rules,
        "rule_of": [rules.index(name) for name in rule.names],
        "decays": list(rule.decays),
        "updated": [resource_handle(v) for row in rows for v in row],
        "hyperparameters": tf.stack([rule.hyperparameters[name] for name in rules]),
    }


def _descend(
    plan: StepPlan, vector: tf.Tensor, buffers: tf.Tensor, rule: UpdateRule
) -> tf.Tensor:
    rate = rule.hyperparameters["sgd"][2]

    def whole() -> tf.Tensor:
        if plan.is_uncompressed:
            return _descend_exempt(plan.coded_as(None), vector, rule, rate)
        sums, nonfinite = buffer.decode_dense(vector, plan.layout)
        for v, s in zip(rule.variables, sums, strict=True):
            update = tf.reshape(s * tf.cast(rate, s.dtype), v.shape)
            tf.raw_ops.AssignSubVariableOp(resource=resource_handle(v), value=update)
        return nonfinite

    return smart_cond(
        plan.dense, whole, lambda: _descend_sparse(plan, buffers, rule, rate)
    )


def _descend_sparse(
    plan: StepPlan, buffers: tf.Tensor, rule: UpdateRule, rate: tf.Tensor
) -> tf.Tensor:
    return ops().tf_dgc_descend(
        variables=[resource_handle(v) for v in rule.variables],
        rate=rate,
        buffers=buffers,
        counts=entry_counts(plan),
        T=[t.dtype for t in plan.layout],
        **layout_attributes(plan),
    )


def _descend_exempt(
    plan: StepPlan, vector: tf.Tensor, rule: UpdateRule, rate: tf.Tensor
) -> tf.Tensor:
    """Subtract the sums as if one worker alone had sent them, in one pass."""
    body = to_words(vector[1:])
    length = buffer.sparse_words(plan.layout, plan.counts)
    words = buffer.add_header(
        buffer.layout_fingerprint(plan.layout), length, [body], tf.constant(True)
    )
    done = _descend_sparse(plan, words[tf.newaxis], rule, rate)
    with tf.control_dependencies([done]):
        return tf.cast(vector[0], tf.int32)

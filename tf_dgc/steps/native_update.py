"""The update of variables by the native operations, without sums in between."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_dgc.choice import choose
from tf_dgc.codecs import dense, header, wire
from tf_dgc.compressors.common.one_round import to_words
from tf_dgc.steps import native
from tf_dgc.steps.plan import Plan


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


def is_live(variables: Sequence[keras.Variable]) -> bool:
    """Whether rules can be applied to these variables here: on CPUs alone.

    Plain descent by `apply` runs where a step's other operations do.
    """
    return native.is_live(variables) and not native.is_on_gpu(variables)


def apply(
    plan: Plan, vector: tf.Tensor, buffers: tf.Tensor, rule: UpdateRule
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
        return native.library().tf_dgc_apply(
            **operands(rule),
            buffers=buffers,
            counts=native.counts(plan),
            T=[t.dtype for t in plan.layout],
            **native.agreed(plan),
        )

    return choose(plan.dense, whole, chosen)


def put(plan: Plan, words: tf.Tensor, variables: Sequence[keras.Variable]) -> tf.Tensor:
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
    return native.library().tf_dgc_put(
        variables=[native.handle(v) for v in variables],
        buffers=words[tf.newaxis],
        counts=native.counts(plan),
        T=[t.dtype for t in plan.layout],
        **native.agreed(plan),
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
    native.library().tf_dgc_apply_sums(**operands(rule), sums=sums, flat=flat)


def operands(rule: UpdateRule) -> dict:
    """Return what all operations that apply rules take."""
    rules = list(dict.fromkeys(rule.names))
    rows = [(v, *slots) for v, slots in zip(rule.variables, rule.slots, strict=True)]
    return {
        "rules": rules,
        "rule_of": [rules.index(name) for name in rule.names],
        "decays": list(rule.decays),
        "updated": [native.handle(v) for row in rows for v in row],
        "hyperparameters": tf.stack([rule.hyperparameters[name] for name in rules]),
    }


def _descend(
    plan: Plan, vector: tf.Tensor, buffers: tf.Tensor, rule: UpdateRule
) -> tf.Tensor:
    rate = rule.hyperparameters["sgd"][2]

    def whole() -> tf.Tensor:
        if plan.is_exempt:
            return _descend_exempt(plan.coded_as(None), vector, rule, rate)
        sums, nonfinite = dense.decode(vector, plan.layout)
        for v, s in zip(rule.variables, sums, strict=True):
            update = tf.reshape(s * tf.cast(rate, s.dtype), v.shape)
            tf.raw_ops.AssignSubVariableOp(resource=native.handle(v), value=update)
        return nonfinite

    return choose(plan.dense, whole, lambda: _descend_sparse(plan, buffers, rule, rate))


def _descend_sparse(
    plan: Plan, buffers: tf.Tensor, rule: UpdateRule, rate: tf.Tensor
) -> tf.Tensor:
    return native.library().tf_dgc_descend(
        variables=[native.handle(v) for v in rule.variables],
        rate=rate,
        buffers=buffers,
        counts=native.counts(plan),
        T=[t.dtype for t in plan.layout],
        **native.agreed(plan),
    )


def _descend_exempt(
    plan: Plan, vector: tf.Tensor, rule: UpdateRule, rate: tf.Tensor
) -> tf.Tensor:
    """Subtract the sums as if one worker alone had sent them, in one pass."""
    body = to_words(vector[1:])
    length = wire.sparse_words(plan.layout, plan.counts)
    words = header.seal(
        wire.fingerprint(plan.layout), length, [body], tf.constant(True)
    )
    done = _descend_sparse(plan, words[tf.newaxis], rule, rate)
    with tf.control_dependencies([done]):
        return tf.cast(vector[0], tf.int32)

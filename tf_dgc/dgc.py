"""Deep Gradient Compression as a Keras optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import (
    _internals,
    checks,
    dense,
    local,
    monitor,
    native,
    ops,
    payload,
    schedules,
    takeover,
    values,
    wire,
)
from tf_dgc.choice import choose
from tf_dgc.compressors import NoCompression, TopK, tie_offsets
from tf_dgc.optimizer import CompressedOptimizer
from tf_dgc.packs import num_bytes
from tf_dgc.wire import TensorLayout


@keras.saving.register_keras_serializable(package="tf_dgc")
class DGCOptimizer(CompressedOptimizer):
    """Sends the largest entries of the gradient and keeps the rest until it has grown.

    Deep Gradient Compression (Lin et al., ICLR 2018) around any Keras optimizer:
    `CompressedOptimizer` with `TopK`, momentum correction, factor masking and a
    sparsity that may warm up, in one pass over memory. Use it as the optimizer of a
    model, created in the scope of the same strategy:

    >>> strategy = tf.distribute.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     model = build_model()
    ...     sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    ...     model.compile(optimizer=tf_dgc.DGCOptimizer(sgd), loss="mse")
    >>> model.fit(dataset)

    Momentum of an SGD (plain or Nesterov) becomes momentum correction; other
    optimizers get error feedback and apply their own rule to the sum. Clipping of the
    inner optimizer becomes local gradient clipping. With `sparsity=0` every step is
    what the inner optimizer does alone.

    Args:
        inner: a `keras.optimizers.Optimizer`, not yet built; it is copied. Or its name
            or config, as `keras.optimizers.get` takes them.
        sparsity: share of entries NOT sent, in [0, 1); or a schedule of the iteration
            such as `tf_dgc.schedules.WarmupSparsity`.
        momentum_correction: accumulate the local velocity instead of the gradient
            (section 3.2 of the paper). If False, momentum stays after the sum.
        factor_masking: clear the velocity where entries were sent (section 3.3).
        min_compress_size: tensors with fewer entries, and those of rank below 2, are
            exempt: sent whole, with momentum and without loss.
        value_dtype: how values are sent, beside some 12 bits for each position at
            99.9 %: None, in the type of `residual` (4 bytes per entry, or 8), or one of
            "float32" (4), "bfloat16" (2), "float16" (2; nothing below 6e-8) and
            "sign" (1/8: a sign, and one magnitude per tensor). What the coding loses
            stays in `residual`. Exempt tensors and dense steps are not coded.
        seed: of the order in which equal magnitudes are chosen.
        name: of the optimizer.
        track_staleness: as `CompressedOptimizer`'s, and so are the following.
        check_every: steps between looks whether workers differ, or None.
        on_divergence: "raise" or "warn".

    Attributes:
        inner_optimizer: the copy of `inner` that applies the update, without what was
            taken over. It owns the learning rate and the iterations.
        velocity: one variable per model variable and worker, the local momentum; empty
            without momentum correction.
        residual: one variable per model variable and worker, accumulated and not yet
            sent; empty with `sparsity=0`. Both are float64 for float64 variables and
            float32 for all others: in 8 bits of mantissa an accumulator stands still.

    Raises:
        ValueError: for settings outside the ranges above; at build time for a model
            without trainable variables, variables of other dtypes or of another
            strategy, and workers that were started with different models or settings.
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str | dict,
        sparsity: float | Callable = 0.999,
        *,
        momentum_correction: bool = True,
        factor_masking: bool = True,
        min_compress_size: int = 1024,
        value_dtype: str | None = None,
        seed: int = 0,
        name: str = "dgc_optimizer",
        track_staleness: bool = False,
        check_every: int | None = 1000,
        on_divergence: str = "raise",
    ):
        inner = takeover.get_inner(inner)
        sparsity = schedules.get(sparsity)
        values.check_choice(value_dtype)
        compresses = sparsity != 0
        super().__init__(
            inner,
            TopK(sparsity, value_dtype) if compresses else NoCompression(),
            momentum_correction=momentum_correction and compresses,
            factor_masking=factor_masking,
            min_compress_size=min_compress_size,
            seed=seed,
            name=name,
            track_staleness=track_staleness,
            check_every=check_every,
            on_divergence=on_divergence,
        )
        self.sparsity = sparsity
        self.value_dtype = value_dtype
        self.momentum_correction = bool(momentum_correction)
        ops.warn_if_missing()

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply one step of Deep Gradient Compression; call it in replica context.

        See `CompressedOptimizer.apply`. Where gathering would cost more than summing
        everything, the step goes dense.
        """
        grads, variables, indices, extra = self._match(grads, trainable_variables)
        layout = [self._layout[i] for i in indices]
        sparsity = schedules.current(self.sparsity, self.iterations.value)
        plan = payload.plan(layout, sparsity, self.num_workers)
        with tf.name_scope(self.name):
            step = self._local_step(plan, grads, variables, indices)
            if _internals.in_xla_context() and not isinstance(plan.dense, bool):
                return self._compiled_step(step, variables, indices, extra)
            self._step(step, variables, indices, extra)

    def _step(
        self, step: local.LocalStep, variables: list, indices: list[int], extra: int
    ) -> None:
        """Do a step, from the clipped gradients on."""
        plan = step.plan
        path = native if native.is_live(variables) else local
        # correct, compress, mask, encode
        vector, words, finite = path.compress(step)
        monitor.warn_at_first(self._counters, finite, self.iterations.value)
        self._record_sent(plan, words, indices)
        check = self._check(variables)
        total, buffers = self._exchange(
            plan.dense, vector, words, check, plan.dense_entries
        )
        asking = check.num_bytes(plan.dense, vector.dtype) if check else 0
        # decode, sum, update
        nonfinite = self._decode(plan, total, buffers, variables)
        monitor.count_step(
            self._counters,
            entries=plan.entries,
            sent_bytes=num_bytes(vector) + num_bytes(words) + asking + extra,
            dense_bytes=monitor.dense_bytes(variables) + extra,
            nonfinite=nonfinite,
        )

    def _compiled_step(
        self, step: local.LocalStep, variables: list, indices: list[int], extra: int
    ) -> None:
        """Do a step in XLA, which needs all shapes to be known beforehand.

        There is room for the most that the schedule ever sends.
        """
        plan = step.plan
        whole = step._replace(plan=plan._replace(dense=True))
        room = payload.in_fixed_shapes(plan, schedules.smallest(self.sparsity))
        chosen = step._replace(plan=room)
        tf.cond(
            plan.dense,
            lambda: self._step(whole, variables, indices, extra),
            lambda: self._step(chosen, variables, indices, extra),
        )

    def _local_step(
        self, plan: payload.Plan, grads: list, variables: list, indices: list[int]
    ) -> local.LocalStep:
        """Collect what this worker puts into the step."""
        gradients, scales = self._clip(grads, variables)
        sizes = [t.size for t in self._tensors]
        offsets = tie_offsets(sizes, self.seed, self.iterations.value)
        return local.LocalStep(
            plan,
            gradients,
            scales,
            velocity=[self.velocity[i] for i in indices] if self.velocity else None,
            residual=[self.residual[i] for i in indices] if self.residual else None,
            offsets=[offsets[i] for i in indices],
            momentum=self._took.momentum,
            nesterov=self._took.nesterov,
            factor_masking=self.factor_masking,
        )

    def _decode(
        self, plan: payload.Plan, total: tf.Tensor, buffers: tf.Tensor, variables: list
    ) -> tf.Tensor:
        """Decode, sum and update the model; return the workers that were not finite."""
        rule = self.inner_optimizer
        path = native if native.is_live(variables) else payload
        if not self.residual:
            total = self._checked(plan, total, variables)
        if path is native and takeover.is_plain_descent(rule, variables):
            nonfinite = native.descend(
                plan, total, buffers, variables, rule.learning_rate
            )
            rule.iterations.assign_add(1)
            return nonfinite
        sums, nonfinite = path.unpack(plan, total, buffers)
        self._update(sums, variables)
        return nonfinite

    def _checked(
        self, plan: payload.Plan, total: tf.Tensor, variables: list
    ) -> tf.Tensor:
        """Return the vector of a dense step, refused if sums overflow.

        With nothing kept back, what each worker sends is not bounded.
        """
        sums, _ = dense.decode(total, plan.layout)
        narrow = [tf.as_dtype(v.dtype) for v in variables]
        labels = [v.path for v in variables]
        return checks.finite_sums(sums, narrow, labels, total)

    def _record_sent(
        self, plan: payload.Plan, words: tf.Tensor, indices: list[int]
    ) -> None:
        """Remember for `staleness` what this worker is about to send."""
        last = self._last_sent
        if last is None:
            return
        last.count_step()
        if plan.taken is not None:
            mine, _ = payload.unpack(plan, words, words[tf.newaxis])
            return last.record_chosen(indices, [m != 0 for m in mine])

        def chosen() -> None:
            positions = wire.positions(words, plan.layout, plan.counts)
            last.record_positions(indices, positions)

        choose(plan.dense, lambda: last.record_all(indices), chosen)

    @property
    def _layout(self) -> Sequence[TensorLayout]:
        return [
            TensorLayout(
                t.size,
                t.dtype,
                t.exempt,
                self.value_dtype or t.dtype.name,
                t.largest,
            )
            for t in self._tensors
        ]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the current learning rate."""
        config = super().get_config()
        for settled in ("compressor", "error_feedback"):
            del config[settled]
        sparsity = schedules.config_of(self.sparsity)
        return {**config, "sparsity": sparsity, "value_dtype": self.value_dtype}

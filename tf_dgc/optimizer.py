"""Deep Gradient Compression as a Keras optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import (
    _internals,
    clipping,
    cluster,
    distribute,
    local,
    monitor,
    native,
    ops,
    payload,
    schedules,
    takeover,
    validation,
    wire,
)
from tf_dgc.compressors import tie_offsets
from tf_dgc.exchange import Exchange
from tf_dgc.state import PerWorkerVariable
from tf_dgc.wrapper import OptimizerWrapper


@keras.saving.register_keras_serializable(package="tf_dgc")
class DGCOptimizer(OptimizerWrapper):
    """Sends the largest entries of the gradient and keeps the rest until it has grown.

    Deep Gradient Compression (Lin et al., ICLR 2018) around any Keras optimizer. Use
    it as the optimizer of a model, created in the scope of the same strategy:

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
        inner: a `keras.optimizers.Optimizer`, not yet built. It is copied.
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
        inner: keras.optimizers.Optimizer,
        sparsity: float | Callable = 0.999,
        *,
        momentum_correction: bool = True,
        factor_masking: bool = True,
        min_compress_size: int = 1024,
        value_dtype: str | None = None,
        seed: int = 0,
        name: str = "dgc_optimizer",
    ):
        takeover.check_inner(inner)
        sparsity = schedules.get(sparsity)
        validation.check_settings(min_compress_size, value_dtype)
        strategy = distribute.prepare(tf.distribute.get_strategy())
        compresses = sparsity != 0
        rule, took = takeover.take_over(inner, momentum_correction and compresses)
        super().__init__(rule, took.loss_scale, name)
        self.sparsity = sparsity
        self.momentum_correction = bool(momentum_correction)
        self.factor_masking = bool(factor_masking)
        self.min_compress_size = int(min_compress_size)
        self.value_dtype = value_dtype
        self.seed = int(seed)
        self.velocity: list[PerWorkerVariable] = []
        self.residual: list[PerWorkerVariable] = []
        self._strategy = strategy
        self._exchange = Exchange(strategy)
        self._took = took
        self._compresses = compresses
        # With sparsity 0 clipping is Keras's own, whatever the number of workers.
        self._num_clip = self.num_workers if compresses else 1
        self._counters: Any = None
        ops.warn_if_missing()

    # --- one step -----------------------------------------------------------------

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply one step of Deep Gradient Compression; call it in replica context.

        Args:
            grads: one gradient per variable: a tensor, `tf.IndexedSlices` or None,
                already divided by the number of workers (Keras scales the loss).
            trainable_variables: the variables; the optimizer is built for those of the
                first call.

        Raises:
            ValueError: outside the replica context of the optimizer's strategy, and
                for variables the optimizer was not built with.
        """
        grads, variables = self._match(grads, trainable_variables)
        states = [_internals.variable_index(self, v) for v in variables]
        layout = [self._layout[i] for i in states]
        plan = payload.plan(layout, self._current_sparsity(), self.num_workers)
        path = native if native.is_live(variables) else local
        with tf.name_scope(self.name):
            step = self._local_step(plan, grads, variables, states)
            # clip, correct, compress, mask, encode
            vector, words, finite = path.compress(step)
            monitor.warn_at_first(self._counters, finite, self.iterations.value)
            total, buffers = self._exchange(plan.dense, vector, words)
            # decode, sum, update
            nonfinite = self._update(plan, total, buffers, variables)
            monitor.count_step(
                self._counters,
                entries=plan.entries,
                sent_bytes=tf.size(vector) * vector.dtype.size + 4 * tf.size(words),
                dense_bytes=sum(
                    v.shape.num_elements() * _itemsize(v) for v in variables
                ),
                nonfinite=nonfinite,
            )

    def _match(self, grads: Any, variables: Any) -> tuple[list, list]:
        """Build if needed; return gradients that exist, with their variables."""
        validation.check_strategy(self._strategy, "apply")
        validation.check_in_replica()
        if variables is None:
            variables = _internals.trainable_variables(self)
        variables = list(variables)
        if len(grads) != len(variables):
            raise ValueError(
                "There must be one gradient per variable. Received: "
                f"{len(grads)} gradients for {len(variables)} variables"
            )
        self.build(variables)
        _internals.check_known(self, variables)
        return _internals.drop_missing_gradients(self, grads, variables)

    def _local_step(
        self, plan: payload.Plan, grads: list, variables: list, states: list[int]
    ) -> local.LocalStep:
        """Collect what this worker puts into the step."""
        gradients, scales = clipping.clip(
            [local.to_dense(g, v) for g, v in zip(grads, variables, strict=True)],
            self._num_clip,
            loss_scale=self.loss_scale_factor,
            **self._took.clipping,
        )
        return local.LocalStep(
            plan,
            gradients,
            scales,
            velocity=[self.velocity[i] for i in states] if self.velocity else None,
            residual=[self.residual[i] for i in states] if self.residual else None,
            offsets=self._offsets(plan.layout),
            momentum=self._took.momentum,
            nesterov=self._took.nesterov,
            factor_masking=self.factor_masking,
        )

    def _update(
        self, plan: payload.Plan, total: tf.Tensor, buffers: tf.Tensor, variables: list
    ) -> tf.Tensor:
        """Decode, sum and update the model; return the workers that were not finite."""
        rule = self.inner_optimizer
        path = native if native.is_live(variables) else payload
        if path is native and takeover.is_plain_descent(rule, variables):
            nonfinite = native.descend(
                plan, total, buffers, variables, rule.learning_rate
            )
            rule.iterations.assign_add(1)
            return nonfinite
        sums, nonfinite = path.unpack(plan, total, buffers)
        rule.apply(
            [
                tf.cast(tf.reshape(s, v.shape), v.dtype)
                for s, v in zip(sums, variables, strict=True)
            ],
            variables,
        )
        return nonfinite

    def _current_sparsity(self) -> float | tf.Tensor:
        if callable(self.sparsity):
            return schedules.at(self.sparsity, self.iterations.value)
        return self.sparsity

    def _offsets(self, layout: Sequence[wire.TensorLayout]) -> list[tf.Tensor]:
        sizes = [t.size for t in layout]
        return tie_offsets(sizes, self.seed, self.iterations.value)

    # --- state --------------------------------------------------------------------

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create velocity and residual; all workers compare what they were given.

        Args:
            variables: the model's trainable variables.

        Raises:
            ValueError: see the class.
            RuntimeError: if another worker does not come within `TF_DGC_TIMEOUT`
                seconds.
        """
        if self.built:
            return
        variables = list(variables)
        validation.check_variables(self._strategy, variables)
        validation.check_strategy(self._strategy, "build")
        validation.check_precision(self._strategy)
        with tf.init_scope():  # the first call may come while a step is being traced
            cluster.agree(self._strategy, lambda: self._description(variables))
        self.inner_optimizer.build(variables)
        super().build(variables)
        self._layout = [self._describe(v) for v in variables]
        self._counters = monitor.make_counters()
        if self._compresses:
            self.residual = self._make_state(variables, "residual")
        if self._took.momentum:
            self.velocity = self._make_state(variables, "velocity")

    def _make_state(
        self, variables: list[keras.Variable], name: str
    ) -> list[PerWorkerVariable]:
        return [
            PerWorkerVariable(
                v.shape, t.dtype.name, f"{v.path.replace('/', '_')}_{name}"
            )
            for v, t in zip(variables, self._layout, strict=True)
        ]

    def _describe(self, variable: keras.Variable) -> wire.TensorLayout:
        size = variable.shape.num_elements()
        small = len(variable.shape) < 2 or size < max(1, self.min_compress_size)
        dtype = tf.float64 if variable.dtype == "float64" else tf.float32
        return wire.TensorLayout(size, dtype, small, self.value_dtype or dtype.name)

    def _description(self, variables: list[keras.Variable]) -> dict[str, Any]:
        """Return what must be equal on all workers."""
        config = self.get_config()
        config["inner"]["config"].pop("name")
        config.pop("name")
        shapes = {
            f"{i}": {"shape": str(tuple(v.shape)), "dtype": v.dtype}
            for i, v in enumerate(variables)
        }
        return {
            "version": {"tensorflow": tf.__version__, "keras": keras.__version__},
            "optimizer": config,
            "variable": shapes,
        }

    # --- what users read ----------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Replicas in sync."""
        return self._exchange.num_workers

    @property
    def stats(self) -> monitor.CompressionStats:
        """What was sent so far and in the last step, per worker."""
        return monitor.read(self._counters)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the current learning rate."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        inner["config"].update(self._took.taken)
        sparsity = self.sparsity
        if callable(sparsity):
            sparsity = keras.saving.serialize_keras_object(sparsity)
        return {
            "name": self.name,
            "inner": inner,
            "sparsity": sparsity,
            "momentum_correction": self.momentum_correction,
            "factor_masking": self.factor_masking,
            "min_compress_size": self.min_compress_size,
            "value_dtype": self.value_dtype,
            "seed": self.seed,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "DGCOptimizer":
        """Build an optimizer from `get_config`'s dictionary."""
        config = dict(config)
        for key in ("inner", "sparsity"):
            if isinstance(config[key], dict):
                config[key] = keras.saving.deserialize_keras_object(
                    config[key], custom_objects=custom_objects
                )
        return cls(**config)


def _itemsize(variable: keras.Variable) -> int:
    return tf.as_dtype(variable.dtype).size

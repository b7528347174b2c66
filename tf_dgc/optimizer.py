"""Deep Gradient Compression as a Keras optimizer."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _internals, clipping, cluster, distribute, monitor, payload
from tf_dgc import schedules, wire
from tf_dgc.compressors import tie_offsets
from tf_dgc.correction import correct
from tf_dgc.exchange import Exchange
from tf_dgc.state import PerWorkerVariable
from tf_dgc.takeover import check_inner, take_over

_DTYPES = ("float16", "bfloat16", "float32", "float64")


@keras.saving.register_keras_serializable(package="tf_dgc")
class DGCOptimizer(keras.optimizers.Optimizer):
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
        seed: int = 0,
        name: str = "dgc_optimizer",
    ):
        if isinstance(inner, DGCOptimizer):
            raise ValueError(
                "`inner` is itself a DGCOptimizer, and what is compressed once cannot "
                "be compressed again. Pass its own inner optimizer. "
                f"Received: inner={inner!r}"
            )
        check_inner(inner)
        sparsity = schedules.get(sparsity)
        if int(min_compress_size) != min_compress_size or min_compress_size < 0:
            raise ValueError(
                "`min_compress_size` must be a whole number of entries, 0 or more. "
                f"Received: min_compress_size={min_compress_size}"
            )
        strategy = distribute.prepare(tf.distribute.get_strategy())
        compresses = sparsity != 0
        rule, took = take_over(inner, momentum_correction and compresses)
        super().__init__(
            learning_rate=lambda: rule.learning_rate,
            name=name,
            loss_scale_factor=took.loss_scale,
        )
        _internals.share_iterations(self, rule)
        _internals.replace_all_reduce(rule, list)  # the sum is there already
        self.inner_optimizer = rule
        self.sparsity = sparsity
        self.momentum_correction = bool(momentum_correction)
        self.factor_masking = bool(factor_masking)
        self.min_compress_size = int(min_compress_size)
        self.seed = int(seed)
        self.velocity: list[PerWorkerVariable] = []
        self.residual: list[PerWorkerVariable] = []
        self._strategy = strategy
        self._exchange = Exchange(strategy)
        self._took = took
        self._compresses = compresses
        # With sparsity 0 clipping is Keras's own, whatever the number of workers.
        self._num_clip = self.num_workers if compresses else 1
        self._counters: keras.Variable | None = None

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
        with tf.name_scope(self.name):
            gradients = [self._local(g, t) for g, t in zip(grads, layout, strict=True)]
            gradients, finite = clipping.drop_nonfinite(gradients)
            self._warn_if_first(finite)
            gradients = clipping.clip(gradients, self._num_clip, **self._took.clipping)
            velocity, residual = self._correct(gradients, states)
            step = payload.plan(layout, self._current_sparsity(), self.num_workers)
            vector, words, velocity, residual = payload.pack(
                step, velocity, residual, finite, self._offsets(layout),
                self.factor_masking,
            )  # fmt: skip
            self._store(velocity, residual, states)
            total, buffers = self._exchange(step.dense, vector, words)
            sums, nonfinite = payload.unpack(step, total, buffers)
            monitor.count_step(
                self._counters,
                entries=step.entries,
                sent_bytes=tf.size(vector) * vector.dtype.size + 4 * tf.size(words),
                dense_bytes=sum(v.shape.num_elements() * _itemsize(v) for v in variables),
                nonfinite=nonfinite,
            )
        self.inner_optimizer.apply(
            [
                tf.cast(tf.reshape(s, v.shape), v.dtype)
                for s, v in zip(sums, variables, strict=True)
            ],
            variables,
        )

    def _match(self, grads: Any, variables: Any) -> tuple[list, list]:
        """Build if needed; return gradients that exist, with their variables."""
        self._check_context("apply")
        if variables is None:
            variables = self._trainable_variables
        variables = list(variables)
        if len(grads) != len(variables):
            raise ValueError(
                "There must be one gradient per variable. Received: "
                f"{len(grads)} gradients for {len(variables)} variables"
            )
        self.build(variables)
        _internals.check_known(self, variables)
        return _internals.drop_missing_gradients(self, grads, variables)

    def _local(self, gradient: Any, tensor: wire.TensorLayout) -> tf.Tensor:
        """Return a gradient as `[n]` of the accumulators' type, loss scale undone."""
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.scatter_nd(
                gradient.indices[:, tf.newaxis],
                gradient.values,
                tf.cast(gradient.dense_shape, gradient.indices.dtype),
            )
        gradient = tf.cast(tf.reshape(gradient, [tensor.size]), tensor.dtype)
        scale = self.loss_scale_factor
        return gradient if scale is None else gradient / scale

    def _warn_if_first(self, finite: tf.Tensor) -> None:
        """Say once on this worker's standard error that its gradient was dropped."""
        if _internals.in_xla_context():
            return  # XLA cannot print; `stats.nonfinite` counts all the same
        dropped_before = self._counters.value[monitor.NONFINITE]
        first = tf.logical_and(tf.logical_not(finite), dropped_before == 0)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group

        def warn() -> tf.Operation:
            return tf.print(
                "WARNING: tf_dgc: the gradient of replica", replica, "at iteration",
                self.iterations.value, "holds NaN or Inf; it is left out of this step. "
                "Further ones are counted in `optimizer.stats.nonfinite` and not "
                "reported.", output_stream=sys.stderr,
            )  # fmt: skip

        tf.cond(first, lambda: tf.group(warn()), tf.no_op)

    def _correct(self, gradients: list, states: list[int]) -> tuple[list, list]:
        """Accumulate into velocity and residual; return both, `[n]` per tensor."""
        if not self._compresses:
            return [None] * len(gradients), gradients
        corrected = [
            correct(
                g,
                _flat(self.velocity[i]) if self.velocity else None,
                _flat(self.residual[i]),
                self._took.momentum,
                self._took.nesterov,
            )
            for g, i in zip(gradients, states, strict=True)
        ]
        return [v for v, _ in corrected], [r for _, r in corrected]

    def _current_sparsity(self) -> float | tf.Tensor:
        if callable(self.sparsity):
            return schedules.at(self.sparsity, self.iterations.value)
        return self.sparsity

    def _offsets(self, layout: list[wire.TensorLayout]) -> list[tf.Tensor]:
        sizes = [t.size for t in layout]
        return tie_offsets(sizes, self.seed, self.iterations.value)

    def _store(self, velocity: list, residual: list, states: list[int]) -> None:
        if not self._compresses:
            return
        for i, v, r in zip(states, velocity, residual, strict=True):
            self.residual[i].assign(tf.reshape(r, self.residual[i].shape))
            if v is not None:
                self.velocity[i].assign(tf.reshape(v, self.velocity[i].shape))

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
        self._check_variables(variables)
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
        return wire.TensorLayout(
            size=size,
            dtype=tf.float64 if variable.dtype == "float64" else tf.float32,
            exempt=len(variable.shape) < 2 or size < self.min_compress_size,
        )

    def _description(self, variables: list[keras.Variable]) -> dict[str, Any]:
        """What must be equal on all workers."""
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

    def _check_context(self, what: str) -> None:
        if tf.distribute.get_strategy() is not self._strategy:
            raise ValueError(
                f"`{what}` was called under {tf.distribute.get_strategy()!r}, but this "
                f"DGCOptimizer was created under {self._strategy!r}. Create it, build "
                "it and use it within the scope of the same strategy as the model: "
                "`with strategy.scope(): model.compile(optimizer=DGCOptimizer(...))`."
            )
        if what == "apply" and tf.distribute.in_cross_replica_context():
            raise ValueError(
                "`apply` and `apply_gradients` must be called in replica context: "
                "within a function passed to `strategy.run`."
            )

    def _check_variables(self, variables: list[keras.Variable]) -> None:
        if not variables:
            raise ValueError(
                "The model has no trainable variables, so there is nothing to "
                "optimize. Set `trainable=True` on some layers, or build the model "
                "before the optimizer."
            )
        for v in variables:
            if not self._strategy.extended.variable_created_in_scope(v.value):
                raise ValueError(
                    "This DGCOptimizer and the model were created under different "
                    "strategies. Create both within the same `with strategy.scope():`. "
                    f"Received: variable {v.path}, and an optimizer of {self._strategy!r}"
                )
            if v.dtype not in _DTYPES or _internals.overwrites_with_gradient(v):
                raise ValueError(
                    f"DGCOptimizer trains variables of dtype {', '.join(_DTYPES)}. "
                    f"Received: variable {v.path} of dtype {v.dtype}"
                )
            if v.shape.num_elements() > tf.int32.max:
                raise ValueError(
                    "Positions are sent as int32, so a variable may have at most "
                    f"{tf.int32.max} entries. Received: variable {v.path} of shape "
                    f"{tuple(v.shape)}"
                )
        self._check_context("build")
        policy = keras.config.dtype_policy().name
        if policy == "mixed_float16" and cluster.is_multi_worker(self._strategy):
            raise ValueError(
                "`mixed_float16` is not supported with several workers: Keras's "
                "`LossScaleOptimizer` lets one worker skip a step while the others "
                "wait for it. Use `mixed_bfloat16`, which needs no loss scaling. "
                f"Received: dtype policy {policy}"
            )

    # --- what Keras asks of an optimizer ------------------------------------------

    @property
    def num_workers(self) -> int:
        """Replicas in sync."""
        return self._exchange.num_workers

    @property
    def stats(self) -> monitor.CompressionStats:
        """What was sent so far and in the last step, per worker."""
        return monitor.read(self._counters)

    @property
    def variables(self) -> list[keras.Variable]:
        """The optimizer's variables, those of the inner optimizer included."""
        own = _internals.own_variables(self)
        known = {id(v) for v in own}
        return own + [v for v in self.inner_optimizer.variables if id(v) not in known]

    @property
    def learning_rate(self) -> Any:
        """The learning rate, which belongs to the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """See `keras.optimizers.Optimizer.exclude_from_weight_decay`."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Let the inner optimizer set final values (moving averages)."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def save_own_variables(self, store: Any) -> None:
        """Save the state, summed over workers; call it on every worker.

        Keras saves the inner optimizer beside it.
        """
        for i, variable in enumerate(_internals.own_variables(self)):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Load the state, divided among the workers there are now.

        Raises:
            ValueError: if it was saved with other settings (for example without
                momentum correction), because what was not sent would be lost.
        """
        own = _internals.own_variables(self)
        if len(store.keys()) != len(own):
            raise ValueError(
                f"The saved DGCOptimizer has {len(store.keys())} variables, this one "
                f"has {len(own)}. Load with the settings it was saved with: sparsity "
                "above 0, momentum correction and the inner optimizer's momentum "
                "decide which variables there are."
            )
        for i, variable in enumerate(own):
            variable.assign(store[str(i)])

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


def find_dgc_optimizer(optimizer: Any) -> DGCOptimizer:
    """Return the `DGCOptimizer` that `optimizer` is, or that loss scaling wraps.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if isinstance(optimizer, DGCOptimizer):
        return optimizer
    raise ValueError(
        "The model's optimizer must be a `tf_dgc.DGCOptimizer`. "
        f"Received: optimizer={optimizer!r}"
    )


def _flat(variable: PerWorkerVariable) -> tf.Tensor:
    return tf.reshape(variable.local(), [-1])


def _itemsize(variable: keras.Variable) -> int:
    return tf.as_dtype(variable.dtype).size

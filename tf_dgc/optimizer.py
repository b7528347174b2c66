"""Any compression method as a Keras optimizer."""

from typing import Any

import keras
import tensorflow as tf

from tf_dgc import (
    cluster,
    compressors,
    divergence,
    local,
    monitor,
    rounds,
    takeover,
    validation,
)
from tf_dgc import values as coding
from tf_dgc.choice import add_up
from tf_dgc.compressors import Compressor, Draw, Result
from tf_dgc.compressors.base import draw_ties
from tf_dgc.divergence import Check
from tf_dgc.replicated import ReplicatedOptimizer
from tf_dgc.rounds import Outcome, Tensor


@keras.saving.register_keras_serializable(package="tf_dgc")
class CompressedOptimizer(ReplicatedOptimizer):
    """Exchanges gradients by a compression method, around any Keras optimizer.

    Use it as the optimizer of a model, created in the scope of the same strategy:

    >>> sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    >>> qsgd = tf_dgc.compressors.QSGD(levels=127)
    >>> model.compile(optimizer=tf_dgc.CompressedOptimizer(sgd, qsgd), loss="mse")

    The inner optimizer applies its rule, momentum included, to the sum over workers.
    Its clipping becomes local gradient clipping. `DGCOptimizer` is the ready-made case
    of `TopK` with momentum correction, and faster.

    Args:
        inner: a `keras.optimizers.Optimizer`, not yet built; it is copied. Or its name
            or config, as `keras.optimizers.get` takes them.
        compressor: a `tf_dgc.compressors.Compressor`, or the name of a method for its
            defaults; `tf-dgc methods` lists them.
        error_feedback: keep what is not sent in `residual` and add it to the next
            gradient. None for the method's own choice.
        momentum_correction: accumulate the local velocity of an `SGD` instead of the
            gradient (Lin et al., section 3.2); needs error feedback.
        factor_masking: clear that velocity where entries were sent (section 3.3), with
            methods that send some entries and not others.
        min_compress_size: tensors with fewer entries, and those of rank below 2, are
            exempt: sent whole and without loss.
        seed: of all random choices. TensorFlow's global seed is neither used nor set.
        name: of the optimizer.
        track_staleness: remember when each entry was last sent, for `staleness`; takes
            4 bytes per entry, which are not saved.
        check_every: steps from one in which the workers compare checksums of the
            model's variables, which travel with what is exchanged, to the next; the
            first step is one. None for never.
        on_divergence: what happens on all workers if variables differ: "raise", before
            anything is updated, or "warn"; both name workers and variables.

    Attributes:
        inner_optimizer: the copy of `inner` that applies the update.
        velocity: one variable per model variable and worker; empty without momentum
            correction.
        residual: one variable per model variable and worker, accumulated and not yet
            sent; empty without error feedback. Both are float64 for float64 variables,
            else float32.
        compressor_state: of each model variable, the method's own state by name.

    Raises:
        ValueError: for settings that do not go together; at build time for a model
            without trainable variables, variables of other dtypes or of another
            strategy, and workers that were started with different models or settings.
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str | dict,
        compressor: Compressor | str = "top_k",
        *,
        error_feedback: bool | None = None,
        momentum_correction: bool = False,
        factor_masking: bool = True,
        min_compress_size: int = 1024,
        seed: int = 0,
        name: str = "compressed_optimizer",
        track_staleness: bool = False,
        check_every: int | None = 1000,
        on_divergence: str = "raise",
    ):
        compressor = compressors.get(compressor)
        feedback = validation.uses_error_feedback(compressor, error_feedback)
        validation.check_momentum_correction(momentum_correction, feedback)
        super().__init__(
            takeover.get_inner(inner),
            compressor,
            feedback,
            bool(momentum_correction),
            min_compress_size,
            seed,
            name,
            track_staleness,
        )
        divergence.check_settings(check_every, on_divergence)
        self.check_every = check_every and int(check_every)
        self.on_divergence = on_divergence
        self.error_feedback = error_feedback
        self.momentum_correction = bool(momentum_correction)
        self.factor_masking = bool(factor_masking)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Apply one step; call it in replica context.

        Args:
            grads: one gradient per variable: a tensor, `tf.IndexedSlices` or None,
                already divided by the number of workers (Keras scales the loss).
            trainable_variables: the variables; the optimizer is built for those of the
                first call.

        Raises:
            ValueError: outside the replica context of the optimizer's strategy, and
                for variables the optimizer was not built with.
        """
        grads, variables, indices, extra = self._match(grads, trainable_variables)
        with tf.name_scope(self.name):
            gradients, scales = self._clip(grads, variables)
            velocity, values, finite = self._correct(gradients, scales, indices)
            monitor.warn_at_first(self._counters, finite, self.iterations.value)
            check = self._check(variables)
            outcome = self._communicate(values, finite, indices, check)
            self._keep(velocity, values, outcome.results, indices)
            self._update([r.sum for r in outcome.results], variables)
            self._count(outcome, variables, extra)

    def _correct(
        self, gradients: list, scales: list, indices: list[int]
    ) -> tuple[list, list, tf.Tensor]:
        """Accumulate; return velocity, what may be sent, and whether all is finite."""
        return local.accumulate(
            _pick(self._tensors, indices),
            gradients,
            scales,
            _pick(self.velocity, indices) or None,
            _pick(self.residual, indices) or None,
            self._took.momentum,
            self._took.nesterov,
        )

    def _communicate(
        self,
        values: list[tf.Tensor],
        finite: tf.Tensor,
        indices: list[int],
        check: Check | None,
    ) -> Outcome:
        """Compress, encode, exchange, decode and sum, in as many rounds as it takes."""
        context = tf.distribute.get_replica_context()
        worker, step = context.replica_id_in_sync_group, self.iterations.value
        states = self._read_state(indices)
        tensors = _pick(self._tensors, indices)
        ties = draw_ties(self.seed, step, len(self._tensors))
        draws = [
            Draw(self.seed, step, i, worker, ties, t.largest)
            for i, t in zip(indices, tensors, strict=True)
        ]
        # Other sums are as wide as their terms, and are refused when they overflow.
        bounds = not self.compressor.respects_largest
        within = [
            coding.at_most(v, t.largest) if bounds and t.narrow else v
            for t, v in zip(tensors, values, strict=True)
        ]
        parts = rounds.start(self.compressor, tensors, within, states, draws)
        return self._exchange.run(rounds.merge(parts, finite), check)

    def _check(self, variables: list) -> Check | None:
        """Return what asks whether workers differ, unless there is one, or no wish."""
        if self.num_workers == 1 or not self.check_every:
            return None
        return Check(
            self._strategy,
            variables,
            self.iterations.value,
            self.check_every,
            self.on_divergence,
        )

    def _read_state(self, indices: list[int]) -> list[dict[str, tf.Tensor]]:
        """Return what the method remembers, and the residual if it reads that."""
        states = [
            {name: variable.local() for name, variable in state.items()}
            for state in _pick(self.compressor_state, indices)
        ]
        if not self.compressor.reads_residual:
            return states
        kept = [r.local() for r in _pick(self.residual, indices)]
        if not kept:
            kept = [tf.zeros(t.shape, t.dtype) for t in _pick(self._tensors, indices)]
        return [{**s, "residual": r} for s, r in zip(states, kept, strict=True)]

    def _keep(
        self,
        velocity: list[tf.Tensor],
        values: list[tf.Tensor],
        results: list[Result],
        indices: list[int],
    ) -> None:
        """Store what was not sent, velocity where nothing was sent, and the state."""
        sent = [tf.reshape(r.sent, [-1]) for r in results]
        kept = [v - s for v, s in zip(values, sent, strict=True)]
        local.store(_pick(self.residual, indices), kept)
        if self._last_sent:
            self._last_sent.count_step()
            self._last_sent.record_chosen(indices, [_chosen(r) for r in results])
        if self.velocity:
            tensors = _pick(self._tensors, indices)
            masked = [
                self._mask(t, v, r)
                for t, v, r in zip(tensors, velocity, results, strict=True)
            ]
            local.store(_pick(self.velocity, indices), masked)
        for state, result in zip(
            _pick(self.compressor_state, indices), results, strict=True
        ):
            for name, value in (result.state or {}).items():
                state[name].assign(value)

    def _mask(self, tensor: Tensor, velocity: tf.Tensor, result: Result) -> tf.Tensor:
        """Clear the velocity where entries went out, unless all did."""
        partial = (
            self.compressor.kind == "sparsification" and result.entries is not None
        )
        if not (self.factor_masking and partial):
            return velocity
        if result.chosen is None:
            raise ValueError(
                f"{self.compressor!r} sends some entries and not others, so its "
                "`Result` must say which: pass `chosen`, or `factor_masking=False` to "
                f"the optimizer. Received: entries={result.entries}, chosen=None"
            )
        zeros = tf.zeros_like(velocity)
        masked = tf.where(_chosen(result), zeros, velocity)
        return tf.where(tf.equal(result.entries, tensor.size), velocity, masked)

    def _count(self, outcome: Outcome, variables: list, extra: int) -> None:
        sizes = [v.shape.num_elements() for v in variables]
        sent = [
            n if r.entries is None else r.entries
            for n, r in zip(sizes, outcome.results, strict=True)
        ]
        monitor.count_step(
            self._counters,
            entries=add_up(sent),
            sent_bytes=outcome.sent_bytes + extra,
            dense_bytes=monitor.dense_bytes(variables) + extra,
            nonfinite=outcome.nonfinite,
        )

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the current learning rate."""
        return {
            "name": self.name,
            "inner": self._inner_config(),
            "compressor": keras.saving.serialize_keras_object(self.compressor),
            "error_feedback": self.error_feedback,
            "momentum_correction": self.momentum_correction,
            "factor_masking": self.factor_masking,
            "min_compress_size": self.min_compress_size,
            "seed": self.seed,
            "track_staleness": self.track_staleness,
            "check_every": self.check_every,
            "on_divergence": self.on_divergence,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "CompressedOptimizer":
        """Build an optimizer from `get_config`'s dictionary."""
        arguments = {
            key: keras.saving.deserialize_keras_object(value, custom_objects)
            if isinstance(value, dict)
            else value
            for key, value in config.items()
        }
        with cluster.loading():
            return cls(**arguments)


def _pick(items: list, indices: list[int]) -> list:
    return [items[i] for i in indices] if items else []


def _chosen(result: Result) -> tf.Tensor:
    """Return whether each entry went out, by value where the method does not say."""
    chosen = tf.not_equal(result.sent, 0) if result.chosen is None else result.chosen
    return tf.reshape(chosen, [-1])

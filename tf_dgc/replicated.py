"""What an optimizer does around its steps on several workers."""

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import _internals, clipping, cluster, local, monitor, takeover, validation
from tf_dgc.compressors import Compressor
from tf_dgc.distribute import prepare
from tf_dgc.exchange import Exchange
from tf_dgc.rounds import Tensor
from tf_dgc.staleness import LastSent, Staleness
from tf_dgc.state import SAME_CHECKPOINT, PerWorkerVariable, State, make_state
from tf_dgc.wrapper import OptimizerWrapper


class ReplicatedOptimizer(OptimizerWrapper):
    """Knows its strategy and its tensors, owns the state, and counts what is sent.

    Args:
        inner: the user's optimizer; it is copied, and momentum (if `correct_momentum`),
            clipping and loss scale are taken out of the copy.
        compressor: the method.
        error_feedback: whether what is not sent is kept in `residual`.
        correct_momentum: whether momentum is accumulated locally, in `velocity`.
        min_compress_size: tensors with fewer entries are exempt.
        seed: of all randomness.
        name: of the optimizer.
        track_staleness: whether to remember when entries were last sent.
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        compressor: Compressor,
        error_feedback: bool,
        correct_momentum: bool,
        min_compress_size: int,
        seed: int,
        name: str,
        track_staleness: bool,
    ):
        takeover.check_inner(inner)
        validation.check_min_compress_size(min_compress_size)
        strategy = prepare(tf.distribute.get_strategy())
        rule, took = takeover.take_over(inner, correct_momentum)
        super().__init__(rule, took.loss_scale, name)
        self.compressor = compressor
        self.min_compress_size = int(min_compress_size)
        self.seed = int(seed)
        self.velocity: list[PerWorkerVariable] = []
        self.residual: list[PerWorkerVariable] = []
        self.compressor_state: list[State] = []
        self.track_staleness = bool(track_staleness)
        self._keeps_residual = error_feedback
        self._strategy = strategy
        self._exchange = Exchange(strategy)
        self._took = took
        # Where nothing is left out, clipping is Keras's own, whatever the workers.
        self._num_clip = 1 if compressor.lossless else self.num_workers
        self._counters: Any = None
        self._last_sent: LastSent | None = None

    # --- before the first step ------------------------------------------------------

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create the state; all workers compare what they were given.

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
        with tf.init_scope():  # the first call may come while a step is being traced
            cluster.agree(self._strategy, lambda: self._description(variables))
        self.inner_optimizer.build(variables)
        super().build(variables)
        self._tensors = [self._describe(v) for v in variables]
        self._counters = monitor.make_counters()
        if self._keeps_residual:
            self.residual = self._make_accumulators("residual")
            if self.track_staleness:
                self._last_sent = LastSent(self._tensors)
        if self._took.momentum:
            self.velocity = self._make_accumulators("velocity")
        self.compressor_state = [
            make_state(self._specs(t), t.dtype.name, t.label.replace("/", "_"), i)
            for i, t in enumerate(self._tensors)
        ]

    def _make_accumulators(self, name: str) -> list[PerWorkerVariable]:
        return [
            PerWorkerVariable(
                t.shape, t.dtype.name, f"{t.label.replace('/', '_')}_{name}"
            )
            for t in self._tensors
        ]

    def _specs(self, tensor: Tensor) -> dict:
        return {} if tensor.exempt else self.compressor.state(tensor.shape)

    def _describe(self, variable: keras.Variable) -> Tensor:
        shape = tuple(variable.shape)
        size = variable.shape.num_elements()
        small = len(shape) < 2 or size < max(1, self.min_compress_size)
        dtype = tf.float64 if variable.dtype == "float64" else tf.float32
        return Tensor(variable.path, shape, dtype, small)

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

    # --- in every step --------------------------------------------------------------

    def _match(self, grads: Any, variables: Any) -> tuple[list, list, list[int]]:
        """Build if needed; return gradients that exist, their variables and indices."""
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
        grads, variables = _internals.drop_missing_gradients(self, grads, variables)
        return grads, variables, [_internals.variable_index(self, v) for v in variables]

    def _clip(self, grads: list, variables: list) -> tuple[list, list]:
        """Return gradients, and what each is to be multiplied by."""
        return clipping.clip(
            [local.to_dense(g, v) for g, v in zip(grads, variables, strict=True)],
            self._num_clip,
            loss_scale=self.loss_scale_factor,
            **self._took.clipping,
        )

    def _update(self, sums: Sequence[tf.Tensor], variables: list) -> None:
        """Let the inner optimizer apply the sums."""
        self.inner_optimizer.apply(
            [
                tf.cast(tf.reshape(s, v.shape), v.dtype)
                for s, v in zip(sums, variables, strict=True)
            ],
            variables,
        )

    # --- saving ---------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """Save the state of all workers; call it on every worker.

        Raises:
            ValueError: on all workers, if two of them write to the same file.
            RuntimeError: if a worker does not come within `TF_DGC_TIMEOUT` seconds.
        """
        cluster.check_own_file(self._strategy, _internals.path_being_saved())
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the state; call it on every worker, with the same file or a copy of it.

        Another number of workers than saved it divides it: see `elastic.share`.

        Raises:
            ValueError: for the state of other settings, and on all workers, if they
                load different files.
            RuntimeError: if a worker does not come within `TF_DGC_TIMEOUT` seconds.
        """
        super().load_own_variables(store)
        checksums = (zlib.crc32(store[key].data) for key in sorted(store.keys()))
        cluster.agree(
            self._strategy,
            lambda: {"checksum of the saved state": list(checksums)},
            SAME_CHECKPOINT,
        )

    # --- what users read ------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Replicas in sync."""
        return self._exchange.num_workers

    @property
    def stats(self) -> monitor.CompressionStats:
        """What was sent so far and in the last step, per worker."""
        return monitor.read(self._counters)

    @property
    def staleness(self) -> Staleness | None:
        """How long entries have waited on this worker; None unless it is tracked.

        Call it outside of a step. It is local: workers differ, and none waits.
        """
        if not self.track_staleness:
            return None
        if self._last_sent is None:  # not built, or nothing is ever kept back
            return Staleness(0.0, 0.0, 0.0)
        with self._strategy.scope():
            return self._last_sent.read(self.residual)

    def _inner_config(self) -> dict[str, Any]:
        """Return the config of what the user passed as `inner`."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        inner["config"].update(self._took.taken)
        return inner

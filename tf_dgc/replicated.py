"""What an optimizer does around its steps on several workers."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import (
    _internals,
    clipping,
    cluster,
    keras_saving,
    local,
    monitor,
    overwriting,
    takeover,
    validation,
)
from tf_dgc import values as coding
from tf_dgc.compressors import Compressor
from tf_dgc.distribute import prepare, zeros_expected
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

    saved_by_all_workers = True  # each has a part

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
        validation.check_min_compress_size(min_compress_size)
        strategy = prepare(tf.distribute.get_strategy())
        rule, took = takeover.take_over(inner, correct_momentum)
        super().__init__(rule, took, name)
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
        variables = list(map(_internals.as_keras_variable, variables))
        validation.check_variables(self._strategy, variables)
        validation.check_strategy(self._strategy, "build")
        with tf.init_scope():  # the first call may come while a step is being traced
            cluster.agree(self._strategy, lambda: self._description(variables))
        with zeros_expected(self._strategy):
            self._create(variables)

    def _create(self, variables: list[keras.Variable]) -> None:
        self.inner_optimizer.build(variables)
        _internals.remember_variables(self, variables)
        trained, _ = overwriting.split(variables, variables)
        self._tensors = [self._describe(v) for v, _ in trained]
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
        own = tf.as_dtype(variable.dtype)
        dtype = tf.float64 if own == tf.float64 else tf.float32
        narrow = own if own.size < dtype.size else None
        bound = coding.largest_share(own, self.num_workers)
        largest = bound if self._keeps_residual else math.inf
        return Tensor(variable.path, shape, dtype, small, narrow, largest)

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
            "optimizer": _without_identities(config),
            "variable": shapes,
        }

    # --- in every step --------------------------------------------------------------

    def _match(self, grads: Any, variables: Any) -> tuple[list, list, list[int], int]:
        """Build if needed, and overwrite variables that want it.

        Returns:
            Gradients that exist, their variables and indices, and the bytes that
            overwriting took.
        """
        validation.check_strategy(self._strategy, "apply")
        validation.check_in_replica()
        if variables is None:
            variables = _internals.trainable_variables(self)
        variables = list(map(_internals.as_keras_variable, variables))
        if len(grads) != len(variables):
            raise ValueError(
                "There must be one gradient per variable. Received: "
                f"{len(grads)} gradients for {len(variables)} variables"
            )
        self.build(variables)
        _internals.check_known(self, variables)
        variables = _internals.known_variables(self, variables)
        grads, variables = _internals.drop_missing_gradients(self, grads, variables)
        trained, overwritten = overwriting.split(grads, variables)
        num_bytes = overwriting.overwrite(self._exchange, overwritten)
        grads, variables = map(list, zip(*trained, strict=True))
        indices = [_internals.variable_index(self, v) for v in variables]
        return grads, variables, indices, num_bytes

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
        # Not `apply`: a trainer calls this, and a subclass may have its own.
        self.inner_optimizer.apply_gradients(
            [
                (tf.cast(tf.reshape(s, v.shape), v.dtype), v)
                for s, v in zip(sums, variables, strict=True)
            ]
        )

    # --- saving ---------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """Save the state of all workers; call it on every worker.

        Raises:
            ValueError: on all workers, if two of them write to the same file.
            RuntimeError: if a worker does not come within `TF_DGC_TIMEOUT` seconds.
        """
        keras_saving.end_together(self._strategy)
        super().save_own_variables(store)

    def in_checkpoint(self) -> None:
        """Let a checkpoint be complete on all workers when it is on one."""
        keras_saving.end_checkpoint_together(self._strategy)

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
    def num_entries(self) -> int:
        """Entries of all variables; 0 before the optimizer is built."""
        return sum(t.size for t in self._tensors) if self.built else 0

    @property
    def num_compressed(self) -> int:
        """Variables that are not exempt; 0 before the optimizer is built."""
        return sum(not t.exempt for t in self._tensors) if self.built else 0

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
        stated = inner["config"].keys()
        inner["config"].update(
            {name: value for name, value in self._took.taken.items() if name in stated}
        )
        return inner


def _without_identities(config: Any) -> Any:
    """Leave out what Keras adds while it saves and loads: addresses in this process."""
    if isinstance(config, list | tuple):
        return [_without_identities(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {
        key: _without_identities(value)
        for key, value in config.items()
        if key != "shared_object_id"
    }

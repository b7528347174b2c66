"""A Keras optimizer whose update is computed by a parameter server."""

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tf_dgc import arguments, compressors, metrics
from tf_dgc._internals import keras_optimizers
from tf_dgc.compressors import Compressor, NoCompression
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers import gradients, state
from tf_dgc.optimizers import validation as common
from tf_dgc.optimizers.base import OptimizerWrapper
from tf_dgc.optimizers.config import Exclusions
from tf_dgc.optimizers.corrections import Corrections, check_corrections
from tf_dgc.optimizers.inner import extract_hyperparameters, get_inner_optimizer
from tf_dgc.server import embedding_tables, process, validation
from tf_dgc.server.staleness_correction import StalenessCorrection
from tf_dgc.server.worker import ServerWorker
from tf_dgc.steps.base import WorkerState
from tf_dgc.steps.state import create_worker_state


@keras.saving.register_keras_serializable(package="tf_dgc")
class ServerOptimizer(OptimizerWrapper):
    """Pushes compressed gradients to a server that holds weights and optimizer state.

    Use it as the optimizer of a model on every worker, without a strategy, and start
    the script with `tf-dgc run --servers S --workers N`, which distributes the
    variables over the servers:

    >>> sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    >>> model.compile(tf_dgc.ServerOptimizer(sgd, mode="ssp", staleness=3), loss="mse")
    >>> model.fit(dataset)

    The first worker sends its initial weights and the config of the inner optimizer to
    the server, which creates the inner optimizer and all its state; the other workers
    start from the same weights. In every step a worker pushes its gradient, divided by
    N and compressed with error feedback, and pulls the weights. `mode` decides which
    pushes form a step of the inner optimizer:

    - `"sync"`: the pushes of all workers, as in `DGCOptimizer` with
      `Corrections(scale_before_accumulation=False)`.
    - `"async"`: each push.
    - `"ssp"`: each push, but no worker is more than `staleness` completed steps ahead
      of the slowest.
    - `"backup"`: the first `quorum` pushes computed with the same weights (Chen et al.
      2016). Later ones return to the residual of their worker.

    The workers apply the momentum of an SGD, as momentum correction, and clipping, as
    local gradient clipping; see `DGCOptimizer`. One optimizer per process trains at a
    time. In a process that is a server according to `TF_CONFIG`, the constructor
    serves and then ends the process.

    Args:
        inner: a `keras.optimizers.Optimizer`, not yet built, or its name or config. It
            is copied. The server evaluates learning rate schedules by its own clock; a
            learning rate that a callback sets on a worker is sent with the push.
        mode: "sync", "async", "ssp" or "backup".
        staleness: maximum number of completed steps that a worker is ahead of the
            slowest, in mode "ssp". With 0 each worker's next pushes form one step.
        compressor: a stateless `tf_dgc.compressors.Compressor` that compresses each
            worker's gradient independently, or its name. The default sends 0.1 %.
        quorum: number of pushes that form a step, in mode "backup".
        staleness_correction: a `StalenessCorrection`, in mode "async", and in "ssp"
            with a staleness above 0. None for no correction.
        error_feedback: whether entries that are not sent accumulate in `residual`. None
            for the compressor's default.
        corrections: a `tf_dgc.Corrections`, for delayed entries. With momentum
            correction by default, if there is error feedback and the compressor is
            lossy. `adam` and `scale_before_accumulation` have no effect: the server
            applies the inner optimizer's rule, and its learning rate, to the sum.
        pull: "whole" to pull all weights, or "sparse" to pull those that differ most
            from the worker's, for which the server stores a copy of the model per
            worker.
        pull_sparsity: share of entries that a sparse pull leaves out, in [0, 1). None
            for as many entries as N pushes have, which requires `TopK` with a constant
            sparsity; with plain SGD no others change in N pushes.
        rows: regular expressions; a variable whose path contains a match of one of them
            must be used for lookups alone, for example `["embeddings"]`. Only rows with
            a gradient are pushed, and only changed rows are pulled. Requires plain SGD
            or Adagrad.
        min_compress_size: tensors with fewer entries, and those of rank below 2, are
            sent uncompressed in both directions.
        seed: seed of the compressor's random numbers.
        name: name of the optimizer.

    Attributes:
        inner_optimizer: copy of `inner` whose config is sent to the server. Its state
            on the worker is unused; its `iterations` are the server's clock.
        velocity: variables, one per model variable, the local momentum; empty without
            momentum correction.
        residual: variables, one per model variable that is not in `rows`, with the
            entries accumulated and not yet sent; empty without error feedback.

    Raises:
        ValueError: for incompatible settings, for a `TF_CONFIG` without a server, in
            the scope of a strategy, and at build time for variables that a server
            cannot train.
        RuntimeError: in the first step, if the server cannot be reached, or refuses
            this worker because its model or settings differ from the first worker's.
    """

    config_keys: ClassVar[tuple[str, ...]] = (
        "mode",
        "staleness",
        "compressor",
        "quorum",
        "staleness_correction",
        "error_feedback",
        "corrections",
        "pull",
        "pull_sparsity",
        "rows",
        "min_compress_size",
        "seed",
    )
    fixed = frozenset(config_keys)

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str | dict,
        mode: str = "sync",
        staleness: int | None = None,
        *,
        compressor: Compressor | str = "top_k",
        quorum: int | None = None,
        staleness_correction: StalenessCorrection | None = None,
        error_feedback: bool | None = None,
        corrections: Corrections = Corrections(),
        pull: str = "whole",
        pull_sparsity: float | None = None,
        rows: Sequence[str] | None = None,
        min_compress_size: int = 1024,
        seed: int = 0,
        name: str = "server_optimizer",
    ):
        validation.check_mode(mode, staleness, quorum)
        compressor = compressors.get(compressor)
        validation.check_compressor(compressor)
        validation.check_pull(pull, pull_sparsity, compressor)
        validation.check_staleness_correction(
            staleness_correction, mode, staleness, pull
        )
        check_corrections(corrections)
        feedback = common.uses_error_feedback(compressor, error_feedback)
        common.check_momentum_correction(bool(corrections.momentum), feedback)
        common.check_min_compress_size(min_compress_size)
        validation.check_strategy()
        inner = get_inner_optimizer(inner)
        common.check_one_momentum(compressor, inner)
        validation.check_inner(inner, compressor)
        rows = embedding_tables.check_table_settings(
            rows, inner, mode, staleness_correction
        )
        corrects_momentum = corrections.momentum
        if corrects_momentum is None:
            corrects_momentum = feedback and not isinstance(compressor, NoCompression)
        inner, hyperparameters = extract_hyperparameters(inner, bool(corrects_momentum))
        task = process.find_worker_task()
        if task:
            validation.check_backup(mode, quorum, feedback, task.num_workers)
        super().__init__(
            inner, hyperparameters, Exclusions(), name, tf.distribute.get_strategy()
        )
        self._task = task
        self.backup_subfolder = f"worker-{task.worker}" if task else ""
        self.mode = mode
        self.staleness = None if staleness is None else int(staleness)
        self.compressor = compressor
        self.quorum = None if quorum is None else int(quorum)
        self.staleness_correction = staleness_correction
        self.error_feedback = error_feedback
        self.corrections = corrections
        self.pull = pull
        self.pull_sparsity = pull_sparsity
        self.rows = rows
        self.min_compress_size = int(min_compress_size)
        self.seed = arguments.check_seed(seed)
        self.velocity: list[PerWorkerVariable] = []
        self.residual: list[PerWorkerVariable] = []
        self._counters: keras.Variable | None = None
        self._worker: ServerWorker | None = None

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create this worker's state.

        Args:
            variables: the model's trainable variables.

        Raises:
            ValueError: for variables that a server cannot train.
        """
        if self.built:
            return
        variables = keras_optimizers.distinct_variables(self, variables)
        if not variables:
            self.build_without_variables()
            return
        common.check_variables(variables)
        validation.check_variables(variables)
        validation.check_num_variables(self._task, variables)
        self.check_copies()
        self._exclusions.warn_of_unmatched(variables)
        with keras_optimizers.tracked():
            is_table = embedding_tables.find_tables(
                self.rows, variables, self.inner_optimizer
            )
            worker_state = self._create_worker_state(
                [v for v, table in zip(variables, is_table, strict=True) if not table]
            )
            keras_optimizers.remember_variables(self, variables)
            # Keras saves the attributes of the optimizer.
            self._counters = worker_state.counters
            self.residual = list(worker_state.residual)
            self.velocity = list(worker_state.velocity)
        self._worker = ServerWorker(
            self, variables, is_table, worker_state, self._hyperparameters, self._task
        )

    def _create_worker_state(self, variables: Sequence[keras.Variable]) -> WorkerState:
        feedback = common.uses_error_feedback(self.compressor, self.error_feedback)
        tensors = [
            state.tensor_spec(
                variable,
                state.is_small(variable, self.min_compress_size)
                or variable in self._exclusions,
                feedback,
                self.num_workers,
            )
            for variable in variables
        ]
        return create_worker_state(
            tensors,
            self.compressor,
            keeps_residual=feedback,
            keeps_velocity=bool(self._hyperparameters.momentum),
            keeps_second_moment=False,
            keeps_largest_moment=False,
            tracks_staleness=False,
        )

    def join(self) -> None:
        """Join the run: send the model spec and set the variables to the server's.

        The first step joins by itself, in `fit` before it runs. Call this before a
        custom loop that takes eager steps: its first step would otherwise compute
        gradients with this worker's own weights. The optimizer must be built.

        Raises:
            RuntimeError: if the server cannot be reached, or refuses this worker.
            ValueError: before the optimizer is built.
        """
        self._built_worker("join").join()

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Push the gradients and pull the weights.

        Args:
            grads: one gradient per variable, a tensor or `tf.IndexedSlices`, of the
                mean over this worker's batch.
            trainable_variables: the variables; the first call builds the optimizer for
                them.

        Raises:
            ValueError: for variables the optimizer was not built with, for variables
                without a gradient, and in XLA.
            tf.errors.InvalidArgumentError: when run, if the server cannot be reached
                within `TF_DGC_TIMEOUT` seconds, or refuses this worker.
        """
        validation.check_not_compiled()
        grads, variables = gradients.add_repeated(
            *gradients.match_gradients(self, grads, trainable_variables)
        )
        if not grads:
            return
        worker = self._built_worker("apply")
        validation.check_num_gradients(len(grads), worker.variables)
        with tf.init_scope():
            worker.join()
        with tf.name_scope(self.name):
            worker.step(grads, variables)

    def pull_weights(self) -> None:
        """Set the model's variables to the server's current weights.

        Raises:
            ValueError: before the optimizer is built.
            RuntimeError: if the server cannot be reached, or refuses this worker.
        """
        self._built_worker("pull_weights").pull()

    def leave(self) -> None:
        """Leave the run, as at the process's end or when another optimizer joins."""
        if self._worker is not None:
            self._worker.leave()

    def _built_worker(self, method: str) -> ServerWorker:
        if self._worker is None:
            raise ValueError(
                f"`{method}` needs a built optimizer: call "
                "`optimizer.build(model.trainable_variables)` before. "
                f"Received: {self!r}"
            )
        return self._worker

    @property
    def num_workers(self) -> int:
        """Number of workers in `TF_CONFIG`, N; 1 without a cluster."""
        return self._task.num_workers if self._task else 1

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, or the only one."""
        return self._task is None or self._task.worker == 0

    @property
    def stats(self) -> metrics.CompressionStats:
        """What this worker pushed, in total and in the last step."""
        return metrics.read_stats(self._counters, "server")

    @property
    def bytes_per_pull(self) -> int:
        """Bytes of weights pulled in a step, of rows in the last step; 0 if unbuilt."""
        return self._worker.bytes_per_pull if self._worker else 0

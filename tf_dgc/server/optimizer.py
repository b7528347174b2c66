"""A Keras optimizer whose rule runs on a parameter server."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import arguments, compressors, metrics
from tf_dgc._internals import keras_optimizers
from tf_dgc.compressors import Compressor
from tf_dgc.multiworker import tf_config
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers import gradients
from tf_dgc.optimizers import validation as common
from tf_dgc.optimizers.base import OptimizerWrapper
from tf_dgc.optimizers.config import parse_config
from tf_dgc.optimizers.inner import extract_hyperparameters, get_inner_optimizer
from tf_dgc.optimizers.inner_hyperparameters import Serialize
from tf_dgc.server import embedding_tables, process, validation
from tf_dgc.server.worker import ServerWorker, create_worker_memory

# --- Configs of a `ServerOptimizer`: its arguments, as Keras saves them.

SERVER_CONFIG_KEYS = (
    "mode",
    "staleness",
    "compressor",
    "quorum",
    "correction",
    "correction_strength",
    "error_feedback",
    "momentum_correction",
    "factor_masking",
    "pull",
    "pull_sparsity",
    "rows",
    "min_compress_size",
    "seed",
)


def server_config_of(optimizer: Any, serialize: Serialize) -> dict[str, Any]:
    """Return the arguments of a `ServerOptimizer`, with the current learning rate."""
    return {
        "name": optimizer.name,
        "inner": optimizer.inner_config(serialize),
        **{name: serialize(getattr(optimizer, name)) for name in SERVER_CONFIG_KEYS},
    }


@keras.saving.register_keras_serializable(package="tf_dgc")
class ServerOptimizer(OptimizerWrapper):
    """Pushes compressed gradients to a server, which keeps weights and optimizer.

    Use it as the optimizer of a model on every worker, without a strategy, and start
    the script by `tf-dgc run --servers S --workers N`; variables are shared out then:

    >>> sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    >>> model.compile(tf_dgc.ServerOptimizer(sgd, mode="ssp", staleness=3), loss="mse")
    >>> model.fit(dataset)

    The first worker hands a server its first weights and the config of the inner
    optimizer, whose rule runs there with all its state; others begin with these. In
    every step a worker pushes its gradient, divided by N, compressed with error
    feedback, and pulls the weights. In mode "sync" the pushes of all workers are one
    step, as without a server and rate correction; in mode "async" each is one; in
    mode "ssp" too, but no worker is more than `staleness` completed steps ahead of the
    slowest; in mode "backup" the first `quorum` pushes by the same weights are one step
    (Chen et al. 2016), and what comes later goes back into its worker's residual.

    Momentum of SGD becomes momentum correction, and clipping local gradient clipping,
    on the workers, as in `DGCOptimizer`. Of a process one trains at a time. In one that
    `TF_CONFIG` says is the server, making one serves, and then ends the process.

    Args:
        inner: a `keras.optimizers.Optimizer`, not yet built; it is copied. Or its name
            or config. Schedules of the learning rate are evaluated by the server's
            clock; a rate that a callback sets on a worker is sent along.
        mode: way in which workers wait: "sync", "async", "ssp" or "backup".
        staleness: number of completed steps that a worker may be ahead of the slowest
            one, in mode "ssp"; 0 makes the pushes of a clock one step.
        compressor: a `tf_dgc.compressors.Compressor` without a state, of one worker at
            a time, or its name; the default sends 0.1 %.
        quorum: number of pushes that make a step, in mode "backup".
        correction: correction for staleness: None; "rate" divides the learning rate of
            a push by the updates since its weights (Zhang et al. 2016); "delay" adds
            how the gradient may have changed since (DC-ASGD, Zheng et al. 2017), for
            which the server keeps a copy of the model for each worker.
        correction_strength: lambda of "delay"; None for 0.04.
        error_feedback: whether to keep what is not sent in `residual`. None for the
            method's own choice.
        momentum_correction: whether to accumulate the local velocity of an `SGD`. None:
            wherever there is error feedback and something is left out.
        factor_masking: whether to clear that velocity where entries were sent. None: as
            in `DGCOptimizer`.
        pull: weights that a worker gets in a step: "whole" for all, or "sparse" for
            those that differ most from what it has, of which the server keeps a copy.
        pull_sparsity: share of entries that a sparse pull leaves out, in [0, 1). None
            for as many entries as the pushes of N workers have, by `TopK` of a fixed
            sparsity; with plain SGD these are all that change in N pushes.
        rows: regular expressions, of which one has to be found in the path of a
            variable that is only looked up, as `["embeddings"]`: rows are pushed, and
            pulled if they have changed. For plain SGD or Adagrad.
        min_compress_size: number of entries below which tensors, and those of rank
            below 2, are sent whole, in both directions.
        seed: seed of all random choices of the method.
        name: name of the optimizer.

    Attributes:
        inner_optimizer: copy of `inner` whose config the server is given; its state
            here stays empty. Its iterations are the server's clock.
        velocity: variables, one per model variable, the local momentum; empty without
            momentum correction.
        residual: variables, one per model variable of which no rows travel, accumulated
            and not yet sent; empty without error feedback.

    Raises:
        ValueError: for settings that do not go together; without a server in
            `TF_CONFIG`; within the scope of a strategy; at build time for variables
            that a server cannot train.
        RuntimeError: in the first step, if the server cannot be reached, or refuses
            this worker as its model or settings differ from the first one's.
    """

    fixed = frozenset(SERVER_CONFIG_KEYS)

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str | dict,
        mode: str = "sync",
        staleness: int | None = None,
        *,
        compressor: Compressor | str = "top_k",
        quorum: int | None = None,
        correction: str | None = None,
        correction_strength: float | None = None,
        error_feedback: bool | None = None,
        momentum_correction: bool | None = None,
        factor_masking: bool | None = None,
        pull: str = "whole",
        pull_sparsity: float | None = None,
        rows: Sequence[str] | None = None,
        min_compress_size: int = 1024,
        seed: int = 0,
        name: str = "server_optimizer",
    ):
        validation.check_mode(mode, staleness, quorum)
        compressor = compressors.get(compressor)
        validation.check_method(compressor)
        validation.check_pull(pull, pull_sparsity, compressor)
        by = correction, correction_strength
        validation.check_correction(*by, mode, staleness, pull)
        feedback = common.uses_error_feedback(compressor, error_feedback)
        common.check_momentum_correction(bool(momentum_correction), feedback)
        common.check_min_compress_size(min_compress_size)
        validation.check_strategy()
        inner = get_inner_optimizer(inner)
        common.check_one_momentum(compressor, inner)
        validation.check_inner(inner, compressor)
        rows = embedding_tables.check_table_settings(rows, inner, mode, correction)
        corrects = momentum_correction
        if corrects is None:
            corrects = feedback and not compressor.lossless
        rule, hyperparameters = extract_hyperparameters(inner, bool(corrects))
        task = process.find_task()
        if task:
            validation.check_backup(mode, quorum, feedback, task.num_workers)
        super().__init__(rule, hyperparameters, name, tf.distribute.get_strategy())
        self._task = task
        self.own_backup = f"worker-{task.worker}" if task else ""
        self.mode = mode
        self.staleness = None if staleness is None else int(staleness)
        self.compressor = compressor
        self.quorum = None if quorum is None else int(quorum)
        self.correction = correction
        self.correction_strength = correction_strength
        self.error_feedback = error_feedback
        self.momentum_correction = momentum_correction
        self.factor_masking = arguments.check_choice("factor_masking", factor_masking)
        self.pull = pull
        self.pull_sparsity = pull_sparsity
        self.rows = rows
        self.min_compress_size = int(min_compress_size)
        self.seed = arguments.check_seed(seed)
        self.velocity: list[PerWorkerVariable] = []
        self.residual: list[PerWorkerVariable] = []
        self._counters: keras.Variable | None = None
        self._worker: ServerWorker | None = None

    # --- before the first step ------------------------------------------------------

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create what stays on this worker.

        Args:
            variables: model's trainable variables.

        Raises:
            ValueError: see the class.
        """
        if self.built or self.skips_build(variables):
            return
        variables = keras_optimizers.distinct_variables(self, variables)
        if not variables:
            self.build_without_variables()
            return
        common.check_variables(variables)
        validation.check_variables(variables)
        validation.check_number(self._task, variables)
        self.check_copies()
        with keras_optimizers.tracked():
            tables = embedding_tables.find_tables(
                self.rows, variables, self.inner_optimizer
            )
            plain = [v for v, t in zip(variables, tables, strict=True) if not t]
            worker_state = create_worker_memory(
                self, plain, self._hyperparameters.momentum
            )
            keras_optimizers.remember_variables(self, variables)
            # Keras saves what is an attribute of the optimizer.
            self._counters = worker_state.counters
            self.residual = list(worker_state.residual)
            self.velocity = list(worker_state.velocity)
        self._worker = ServerWorker(
            self, variables, tables, worker_state, self._hyperparameters, self._task
        )

    def join(self) -> None:
        """Take part now: give the server what it needs, and take its weights.

        The first step does so by itself, within `fit` before it runs. Call this before
        a loop of your own that takes eager steps, of which the first would begin with
        this worker's own weights; the optimizer must be built.

        Raises:
            RuntimeError: see the class.
            ValueError: before the optimizer is built.
        """
        self._built_worker("join").join()

    # --- in every step --------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Push the gradients and pull the weights.

        Args:
            grads: one gradient per variable, a tensor or `tf.IndexedSlices`, of the
                mean over this worker's batch.
            trainable_variables: the variables; the optimizer is built for those of the
                first call.

        Raises:
            ValueError: for variables the optimizer was not built with, and without a
                gradient; within XLA.
            tf.errors.InvalidArgumentError: when run, if the server cannot be reached
                within `TF_DGC_TIMEOUT` seconds, or refuses this worker.
        """
        validation.check_not_compiled()
        found = gradients.match_gradients(self, grads, trainable_variables)
        grads, variables = gradients.add_repeated(*found)
        if not grads:
            return
        worker = self._built_worker("apply")
        validation.check_gradients(len(grads), worker.variables)
        with tf.init_scope():
            worker.join()
        with tf.name_scope(self.name):
            worker.step(grads, variables)

    # --- outside of steps -----------------------------------------------------------

    def pull_weights(self) -> None:
        """Set the model's variables to the server's weights as they are now.

        Raises:
            ValueError: before the optimizer is built.
            RuntimeError: if the server cannot be reached, or refuses this worker.
        """
        self._built_worker("pull_weights").pull()

    def leave(self) -> None:
        """Take part no longer, as at the process's end, or when another one begins."""
        if self._worker is not None:
            self._worker.leave()

    def _built_worker(self, what: str) -> ServerWorker:
        if self._worker is None:
            raise ValueError(
                f"`{what}` needs a built optimizer: call "
                "`optimizer.build(model.trainable_variables)` before. "
                f"Received: {self!r}"
            )
        return self._worker

    @property
    def num_workers(self) -> int:
        """Workers that `TF_CONFIG` names, N; 1 without a cluster."""
        return self._task.num_workers if self._task else 1

    @property
    def stats(self) -> metrics.CompressionStats:
        """What this worker pushed so far and in the last step."""
        return metrics.read_stats(self._counters, "server")

    @property
    def bytes_per_pull(self) -> int:
        """Bytes of weights of a step, of rows of the last; 0 before it is built."""
        return self._worker.bytes_per_pull if self._worker else 0

    def collect_config(self, serialize: Serialize) -> dict[str, Any]:
        """Return the constructor's arguments: see `OptimizerWrapper`."""
        return server_config_of(self, serialize)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "ServerOptimizer":
        """Build an optimizer from `get_config`'s dictionary."""
        arguments, _ = parse_config(config, custom_objects)
        with tf_config.loading_config():
            return cls(**arguments)

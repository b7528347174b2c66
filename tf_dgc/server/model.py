"""The server's model: its variables and the inner optimizer with all its state."""

import collections
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import keras_optimizers
from tf_dgc.compressors import Compressor
from tf_dgc.optimizers import update
from tf_dgc.optimizers.state import tensor_spec
from tf_dgc.server import model_spec, pulls
from tf_dgc.server.embedding_rows import TableRows
from tf_dgc.server.embedding_tables import EmbeddingTables, sum_rows
from tf_dgc.server.messages import Push
from tf_dgc.server.model_spec import ModelSpec
from tf_dgc.server.pulls import WorkerCopies
from tf_dgc.steps import native
from tf_dgc.steps.base import StepOutcome, TouchedEntries
from tf_dgc.steps.push import PushReceiver

DEFAULT_STRENGTH = 0.04
"""Lambda of DC-ASGD-c on CIFAR-10 (Zheng et al., ICML 2017, section 6.1)."""


class ServerModel:
    """A server's part of the model, updated by pushes."""

    def __init__(self, spec: ModelSpec):
        settings, num_workers = spec["settings"], spec["num_workers"]
        self.clock = 0
        self.ages: collections.Counter[int] = collections.Counter()
        self.optimizer = model_spec.create_from_config(spec["optimizer"])
        compressor: Compressor = model_spec.create_from_config(spec["compressor"])
        self.variables = model_spec.create_variables(spec)
        pairs = list(zip(self.variables, spec["variables"], strict=True))
        self._plain = [v for v, described in pairs if not described["table"]]
        tables = [v for v, described in pairs if described["table"]]
        self._rate_correction: LearningRateCorrection | None = None
        self._compensation: DelayCompensation | None = None
        if settings["correction"] == "rate":
            self._rate_correction = LearningRateCorrection(self.optimizer, num_workers)
        if settings["correction"] == "delay":
            self._compensation = DelayCompensation(
                self.variables,
                settings["correction_strength"] or DEFAULT_STRENGTH,
                num_workers,
            )
        undecayed = [v for v, described in pairs if not described["decays"]]
        if undecayed:
            self.optimizer.exclude_from_weight_decay(var_list=undecayed)
        self.optimizer.build(self.variables)
        self._tables = EmbeddingTables(tables, self.optimizer) if tables else None
        feedback = settings["error_feedback"]
        tensors = [
            tensor_spec(v, described["exempt"], feedback, num_workers)
            for v, described in pairs
            if not described["table"]
        ]
        self._has_native_rules = native.rules_available(self._plain)
        self._receiver = PushReceiver(
            compressor,
            tensors,
            feedback,
            settings["seed"],
            native.is_available(self._plain),
        )
        self._step_functions: dict[tuple[int, ...], Callable] = {}
        self._cached_words: tuple[int, np.ndarray] | None = None
        self._copies: WorkerCopies | None = None
        if settings["pull"] == "sparse" and self._plain:
            layout = pulls.pull_layout(
                tensors, compressor, num_workers, settings["pull_sparsity"]
            )
            self._copies = WorkerCopies(self._plain, layout)

    @property
    def num_words(self) -> int:
        """Number of words of all variables."""
        return pulls.num_words(self.variables)

    def load(self, words: np.ndarray) -> None:
        """Assign the variables from their bits, int32 `[num_words]`."""
        pulls.assign_words(self.variables, tf.constant(words))
        self._cached_words = None

    def state(self) -> np.ndarray:
        """Return the bits of all variables, also the optimizer's, int32 `[w]`."""
        # Without the learning rate, which is a variable in some models only.
        return pulls.collect_words(self._all_variables()).numpy()

    def restore(self, words: np.ndarray, clock: int, learning_rate: float) -> None:
        """Restore the result of `state`; the learning rate only without a schedule."""
        variables = self._all_variables()
        expected = pulls.num_words(variables)
        if len(words) != expected:
            raise ValueError(f"it has {len(words)} words of state, and not {expected}")
        pulls.assign_words(variables, tf.constant(words))
        self.clock = clock
        if self._rate_correction:
            self._rate_correction.restore(learning_rate)
        elif isinstance(self.optimizer.learning_rate, keras.Variable):
            self.set_learning_rate(learning_rate)

    def _all_variables(self) -> list[keras.Variable]:
        rate = self.optimizer.learning_rate
        state = [v for v in self.optimizer.variables if v is not rate]
        return [*self.variables, *state]

    def full_pull(self, worker: int) -> np.ndarray:
        """Return a worker's pull of all variables, int32 `[num_words]`."""
        if self._copies:
            self._copies.reset(worker)
        if self._compensation:
            self._compensation.store_weights(worker)
        if self._tables:
            self._tables.reset(worker, self.clock)
        if self._cached_words is None or self._cached_words[0] != self.clock:
            words = pulls.collect_words(self.variables).numpy()
            self._cached_words = self.clock, words
        return self._cached_words[1]

    def pull(self, worker: int) -> np.ndarray:
        """Return a worker's pull after its push, int32 `[w]`."""
        if not (self._copies or self._tables):
            return self.full_pull(worker)
        parts = []
        if self._copies:
            parts.append(self._copies.pull(worker).numpy())
        elif self._plain:
            parts.append(pulls.collect_words(self._plain).numpy())
        if self._tables:
            parts.append(self._tables.pull(worker, self.clock))
        return np.concatenate(parts)

    def forget(self, worker: int) -> None:
        """Delete what is stored for a worker that is gone."""
        if self._copies:
            self._copies.forget(worker)
        if self._compensation:
            self._compensation.forget(worker)
            self._step_functions = {
                workers: function
                for workers, function in self._step_functions.items()
                if worker not in workers
            }
        if self._tables:
            self._tables.forget(worker)

    @property
    def learning_rate(self) -> float:
        """Learning rate, before any correction."""
        if self._rate_correction:
            return self._rate_correction.learning_rate
        return float(self.optimizer.learning_rate)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate."""
        if self._rate_correction:
            self._rate_correction.set_learning_rate(learning_rate)
        else:
            self.optimizer.learning_rate = learning_rate

    def apply(self, pushes: Sequence[Push]) -> int:
        """Take one step with the sum of pushes; return how many were not finite."""
        # An invalid push raises before anything is updated.
        steps = {push.step for push in pushes}
        if len(steps) > 1:
            raise ValueError(
                "Pushes of one step must have been planned by the same clock. "
                f"Received: {sorted(steps)}"
            )
        if self._rate_correction:
            self._rate_correction.set_age(self.clock - pushes[0].step)
        contents = [self._read(push) for push in pushes]
        rows = [
            sum_rows(of_table)
            for of_table in zip(*(rows for rows, _ in contents), strict=True)
        ]
        words = [tf.constant(plain_words) for _, plain_words in contents]
        workers = tuple(push.worker for push in pushes)
        nonfinite, touched = self._step_function(workers)(
            words, tf.constant(workers), tf.constant(steps.pop(), tf.int64), rows
        )
        if self._copies:
            positions = None
            if touched is not None and not touched[1]:
                positions = [p.numpy() for p in touched[0]]
            self._copies.record(positions)
        if self._tables:
            self._tables.record(rows, self.clock + 1)
        self.ages.update(self.clock - push.step for push in pushes)
        self.clock += 1
        return int(nonfinite)

    def can_read(self, push: Push) -> bool:
        """Return whether a push is valid by itself; updates nothing."""
        try:
            _, words = self._read(push)
            if self._plain:
                self._receiver.receive(
                    [tf.constant(words)],
                    [tf.constant(push.worker)],
                    tf.constant(push.step, tf.int64),
                ).decode()
        except Exception:  # any class of error, as the message may be anything
            return False
        return True

    def _read(self, push: Push) -> tuple[list[TableRows], np.ndarray]:
        """Return a push's rows of each table, and the words of the other variables."""
        if self._tables is None:
            return [], push.words
        rows, words = self._tables.read(push.words)
        if not self._plain and len(words):
            raise ValueError(f"{len(words)} words follow the last row")
        return rows, words

    def _step_function(self, workers: tuple[int, ...]) -> Callable:
        """Return the traced step for pushes of some workers, of any length."""
        key = workers if self._compensation else (len(workers),)
        if key not in self._step_functions:
            signature = [
                [tf.TensorSpec([None], tf.int32)] * len(workers),
                tf.TensorSpec([len(workers)], tf.int32),
                tf.TensorSpec([], tf.int64),
                self._tables.row_specs if self._tables else [],
            ]
            step = functools.partial(self._step, workers[0])
            self._step_functions[key] = tf.function(step, input_signature=signature)
        return self._step_functions[key]

    def _step(
        self,
        first_worker: int,
        words: Sequence[tf.Tensor],
        workers: tf.Tensor,
        step: tf.Tensor,
        rows: Sequence[TableRows],
    ) -> tuple[tf.Tensor, TouchedEntries | None]:
        learning_rate = tf.convert_to_tensor(self.optimizer.learning_rate)
        touched = None
        if self._plain:
            outcome = self._receiver.receive(words, tf.unstack(workers), step)
            if self._copies and self._changes_only_touched and outcome.touched:
                touched = outcome.touched()
            if self._compensation:
                outcome = self._compensation.apply(outcome, first_worker)
            nonfinite = update.apply_update(
                self.optimizer, outcome, self._plain, self._has_native_rules
            )
        else:
            nonfinite = tf.constant(0)
            self.optimizer.iterations.assign_add(1)
        with tf.control_dependencies([nonfinite]):  # fails for an invalid push
            if self._tables:
                self._tables.update(rows, learning_rate)
        return nonfinite, touched

    @property
    def _changes_only_touched(self) -> bool:
        rule = update.find_native_rule(self.optimizer, self._plain)
        return rule is not None and rule.is_plain_sgd


class LearningRateCorrection:
    """Divides a push's learning rate by its age (Zhang et al., IJCAI 2016, eq. 6)."""

    # A push is a gradient divided by N, so the learning rate is multiplied by N / (age
    # + 1). With workers of equal speed, ages are N - 1 and the factor is 1.

    def __init__(self, optimizer: keras.optimizers.Optimizer, num_workers: int):
        self._num_workers = num_workers
        self._factor = tf.Variable(1.0, trainable=False)
        self._read_rate = keras_optimizers.scale_rate(optimizer, self._factor)

    @property
    def learning_rate(self) -> float:
        """Learning rate before correction."""
        return float(self._read_rate())

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate, which must have no schedule."""
        variable = self._read_rate()
        assert isinstance(variable, keras.Variable)
        variable.assign(learning_rate)

    def restore(self, learning_rate: float) -> None:
        """Set the learning rate, unless it has a schedule."""
        if isinstance(self._read_rate(), keras.Variable):
            self.set_learning_rate(learning_rate)

    def set_age(self, age: int) -> None:
        """Set the age of the next step's push, in updates."""
        self._factor.assign(self._num_workers / (age + 1))


class DelayCompensation:
    """Corrects a gradient for updates since its weights (DC-ASGD, ICML 2017)."""

    # It becomes `g + strength * g * g * (weights - old weights)` (Zheng et al., eq. 10)
    # for entries that were pushed. Stores a copy of the model per worker.

    def __init__(
        self, variables: Sequence[keras.Variable], strength: float, num_workers: int
    ):
        self._variables = variables
        self._factor = strength * num_workers  # a push is divided by N
        self._weights: dict[int, list[tf.Variable]] = {}

    def store_weights(self, worker: int) -> None:
        """Store the current weights as those that a worker has."""
        weights = [tf.convert_to_tensor(v.value) for v in self._variables]
        if worker not in self._weights:
            self._weights[worker] = [tf.Variable(w, trainable=False) for w in weights]
        for copy, value in zip(self._weights[worker], weights, strict=True):
            copy.assign(value)

    def forget(self, worker: int) -> None:
        """Delete the weights of a worker that is gone."""
        self._weights.pop(worker, None)

    def apply(self, outcome: StepOutcome, worker: int) -> StepOutcome:
        """Return the corrected outcome of one worker's push."""
        old_weights = self._weights[worker]

        def decode() -> tuple[list[tf.Tensor], tf.Tensor]:
            gradients, nonfinite = outcome.decode()
            corrected = [
                self._correct(gradient, variable, old)
                for gradient, variable, old in zip(
                    gradients, self._variables, old_weights, strict=True
                )
            ]
            return corrected, nonfinite

        return StepOutcome(decode, 0, 0)

    def _correct(
        self, gradient: tf.Tensor, variable: keras.Variable, old: tf.Variable
    ) -> tf.Tensor:
        g = tf.reshape(gradient, old.shape)
        change = tf.cast(tf.convert_to_tensor(variable.value) - old, g.dtype)
        return g + tf.cast(self._factor, g.dtype) * g * g * change


def initial_model(spec: ModelSpec, words: np.ndarray) -> ServerModel:
    """Return the model with a worker's initial weights."""
    expected = model_spec.model_words(spec)
    if len(words) != expected:
        raise ValueError(
            f"The initial weights must be {expected} words, as the model spec says. "
            f"Received: {len(words)} words"
        )
    try:
        model = ServerModel(spec)
        model.load(words)
    except Exception as error:  # any class, from Keras or for lack of memory
        raise ValueError(
            "The server cannot create the optimizer or the compressor from their "
            "configs; it supports those of Keras and of tf_dgc. Received: an error, "
            f"{error}"
        ) from error
    return model


class RestoredModel(NamedTuple):
    """Content of a checkpoint; settings come from the workers that join."""

    path: pathlib.Path
    spec: ModelSpec  # model spec of the server that wrote it
    words: np.ndarray  # bits of all variables, including the optimizer's, int32 `[w]`
    clock: int  # number of updates
    learning_rate: float

    def difference(self, spec: ModelSpec) -> str | None:
        """Return why workers with a model spec cannot resume; None if they can."""
        difference = model_spec.spec_difference(
            _saved_part(self.spec), _saved_part(spec), compare_learning_rates=False
        )
        if difference is None:
            return None
        return (
            f"{difference}, as in the checkpoint {self.path}. Train the model and "
            "optimizer of the checkpoint, or remove it to start anew"
        )

    def create_model(self, spec: ModelSpec) -> ServerModel:
        """Return the model in the checkpoint's state, with the workers' settings."""
        try:
            model = ServerModel(spec)
            model.restore(self.words, self.clock, self.learning_rate)
        except Exception as error:  # any class, from Keras or for lack of memory
            raise ValueError(f"{self.path} does not match: {error}") from error
        learning_rate = model_spec.learning_rate_of(spec)
        if learning_rate is not None and learning_rate != model.learning_rate:
            model.set_learning_rate(learning_rate)
        return model


def _saved_part(spec: ModelSpec) -> ModelSpec:
    """Return the part of a model spec that a checkpoint's words depend on."""
    return {
        "version": spec["version"],
        "shard": spec["shard"],
        "optimizer": spec["optimizer"],
        "variables": [
            {"shape": v["shape"], "dtype": v["dtype"]} for v in spec["variables"]
        ],
    }

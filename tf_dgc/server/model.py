"""The server's model: its variables, and the inner optimizer with all of its state."""

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

# --- Corrections for staleness: what a push of old weights counts.

STRENGTH = 0.04
"""Lambda of DC-ASGD-c on CIFAR-10 (Zheng et al., ICML 2017, section 6.1)."""


class ByLearningRate:
    """Divides the learning rate of a push by its age (Zhang et al., IJCAI 2016, eq. 6).

    A push is a gradient divided by N, so its rate is multiplied by N / (age + 1): that
    of workers of one speed, each of which is N - 1 updates old, is left as it is.

    Args:
        optimizer: inner optimizer of the server, not yet built.
        num_workers: number of workers, N.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, num_workers: int):
        self._num_workers = num_workers
        self._factor = tf.Variable(1.0, trainable=False)
        self._rate = keras_optimizers.scale_rate(optimizer, self._factor)

    @property
    def rate(self) -> float:
        """Learning rate before it is divided."""
        return float(self._rate())

    def set_rate(self, rate: float) -> None:
        """Set the learning rate, which no schedule has then."""
        variable = self._rate()
        assert isinstance(variable, keras.Variable)
        variable.assign(rate)

    def restore(self, rate: float) -> None:
        """Set the learning rate, unless it has a schedule."""
        if isinstance(self._rate(), keras.Variable):
            self.set_rate(rate)

    def begin(self, age: int) -> None:
        """Make the next step one of a push of that age, in updates."""
        self._factor.assign(self._num_workers / (age + 1))


class DelayCompensation:
    """Moves a gradient to the weights of now (DC-ASGD, Zheng et al., ICML 2017).

    `g + strength * g * g * (weights - weights that the worker had)` (eq. 10), for which
    it keeps a copy of the model for each worker; of what a push does not have, nothing.

    Args:
        variables: variables of the server.
        strength: lambda of the paper.
        num_workers: number of workers, N, by which a push is divided.
    """

    def __init__(
        self, variables: Sequence[keras.Variable], strength: float, num_workers: int
    ):
        self._variables = variables
        self._factor = strength * num_workers
        self._had: dict[int, list[tf.Variable]] = {}

    def note(self, worker: int) -> None:
        """Note that a worker is given the weights as they are."""
        now = [tf.convert_to_tensor(v.value) for v in self._variables]
        if worker not in self._had:
            self._had[worker] = [tf.Variable(w, trainable=False) for w in now]
        for variable, weights in zip(self._had[worker], now, strict=True):
            variable.assign(weights)

    def forget(self, worker: int) -> None:
        """Forget what a worker has, which is gone."""
        self._had.pop(worker, None)

    def apply(self, outcome: StepOutcome, worker: int) -> StepOutcome:
        """Return the outcome of a push, moved.

        Args:
            outcome: outcome of it alone.
            worker: index of the worker that it is from.
        """
        had = self._had[worker]

        def decode() -> tuple[list[tf.Tensor], tf.Tensor]:
            sums, nonfinite = outcome.decode()
            every = zip(sums, self._variables, had, strict=True)
            return [self._moved(*of_one) for of_one in every], nonfinite

        return StepOutcome(decode, 0, 0)

    def _moved(
        self, pushed: tf.Tensor, variable: keras.Variable, had: tf.Variable
    ) -> tf.Tensor:
        pushed = tf.reshape(pushed, had.shape)
        moved = tf.cast(tf.convert_to_tensor(variable.value) - had, pushed.dtype)
        return pushed + tf.cast(self._factor, pushed.dtype) * pushed * pushed * moved


class ServerModel:
    """Variables of the model, updated by what is pushed.

    Args:
        handed: description that workers handed over.

    Attributes:
        clock: number of updates.
        ages: number of pushes by their age, the updates since they were computed.

    Raises:
        ValueError, TypeError: if Keras knows no such optimizer or compressor.
    """

    def __init__(self, handed: ModelSpec):
        settings = handed["settings"]
        self.clock = 0
        self.ages: collections.Counter[int] = collections.Counter()
        self.optimizer = model_spec.parse_model_spec(handed["optimizer"])
        compressor: Compressor = model_spec.parse_model_spec(handed["compressor"])
        self.variables = model_spec.create_variables(handed)
        pairs = list(zip(self.variables, handed["variables"], strict=True))
        tables = [v for v, described in pairs if described["table"]]
        plain = [(v, described) for v, described in pairs if not described["table"]]
        self._plain = [v for v, _ in plain]
        number = handed["num_workers"]
        self._by_rate: ByLearningRate | None = None
        self._compensation: DelayCompensation | None = None
        if settings["correction"] == "rate":
            self._by_rate = ByLearningRate(self.optimizer, number)
        if settings["correction"] == "delay":
            strength = settings["correction_strength"] or STRENGTH
            self._compensation = DelayCompensation(self.variables, strength, number)
        excluded = [v for v, described in pairs if not described["decays"]]
        if excluded:
            self.optimizer.exclude_from_weight_decay(var_list=excluded)
        self.optimizer.build(self.variables)
        feedback = settings["error_feedback"]
        self._tables = EmbeddingTables(tables, self.optimizer) if tables else None
        found = [tensor_spec(v, d["exempt"], feedback, number) for v, d in plain]
        live = native.is_available(self._plain)
        self._natively = native.rules_available(self._plain)
        self._receiver = PushReceiver(
            compressor, found, feedback, settings["seed"], live
        )
        self._steps: dict[tuple[int, ...], Callable] = {}
        self._whole: tuple[int, np.ndarray] | None = None
        self._copies: WorkerCopies | None = None
        if settings["pull"] == "sparse" and plain:
            by = compressor, number, settings["pull_sparsity"]
            self._copies = WorkerCopies(self._plain, pulls.pull_layout(found, *by))

    @property
    def num_words(self) -> int:
        """Words of all variables."""
        return pulls.pull_words(self.variables)

    def load(self, words: np.ndarray) -> None:
        """Set the variables.

        Args:
            words: bits of all of them, as `whole` returns them.
        """
        pulls.assign_entries(self.variables, tf.constant(words))
        self._whole = None

    def state(self) -> np.ndarray:
        """Return the bits of all variables, the optimizer's too, int32 `[w]`.

        But for the learning rate, a variable in some models only.
        """
        return pulls.collect_entries(self._everything()).numpy()

    def restore(self, words: np.ndarray, clock: int, rate: float) -> None:
        """Set all of that.

        Args:
            words: bits of all variables, as `state` returns them.
            clock: number of updates that they have had.
            rate: learning rate, which is not used if there is a schedule.

        Raises:
            ValueError: for another number of words.
        """
        everything = self._everything()
        number = pulls.pull_words(everything)
        if len(words) != number:
            raise ValueError(f"it has {len(words)} words of state, and not {number}")
        pulls.assign_entries(everything, tf.constant(words))
        self.clock = clock
        if self._by_rate:
            self._by_rate.restore(rate)
        elif isinstance(self.optimizer.learning_rate, keras.Variable):
            self.set_rate(rate)

    def _everything(self) -> list[keras.Variable]:
        rate = self.optimizer.learning_rate
        return [
            *self.variables,
            *(v for v in self.optimizer.variables if v is not rate),
        ]

    def whole(self, worker: int) -> np.ndarray:
        """Return the bits of all variables, int32 `[num_words]`, for a worker."""
        if self._copies:
            self._copies.reset(worker)
        if self._compensation:
            self._compensation.note(worker)
        if self._tables:
            self._tables.reset(worker, self.clock)
        if self._whole is None or self._whole[0] != self.clock:
            self._whole = self.clock, pulls.collect_entries(self.variables).numpy()
        return self._whole[1]

    def pull(self, worker: int) -> np.ndarray:
        """Return what a worker is sent behind a push, int32 `[w]`."""
        if not (self._copies or self._tables):
            return self.whole(worker)
        found = []
        if self._copies:
            found.append(self._copies.pull(worker).numpy())
        elif self._plain:
            found.append(pulls.collect_entries(self._plain).numpy())
        if self._tables:
            found.append(self._tables.pull(worker, self.clock))
        return np.concatenate(found)

    def forget(self, worker: int) -> None:
        """Forget what a worker has, which is gone."""
        if self._copies:
            self._copies.forget(worker)
        if self._compensation:
            self._compensation.forget(worker)
            self._steps = {of: s for of, s in self._steps.items() if worker not in of}
        if self._tables:
            self._tables.forget(worker)

    @property
    def rate(self) -> float:
        """Learning rate."""
        owner = self._by_rate
        return owner.rate if owner else float(self.optimizer.learning_rate)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        if self._by_rate:
            self._by_rate.set_rate(rate)
        else:
            self.optimizer.learning_rate = rate

    def apply(self, pushes: Sequence[Push]) -> int:
        """Take one step by the sum of some pushes.

        Args:
            pushes: pushes of one step, by different workers.

        Returns:
            How many of them were left out, as their gradients were not finite.

        Raises:
            ValueError: if their steps differ, or rows are none.
            tf.errors.InvalidArgumentError: if one is not what was agreed upon; nothing
                is updated then.
        """
        steps = {push.step for push in pushes}
        if len(steps) > 1:
            raise ValueError(
                "Pushes of one step must have been planned by the same clock. "
                f"Received: {sorted(steps)}"
            )
        if self._by_rate:
            self._by_rate.begin(self.clock - pushes[0].step)
        each = [self._read(push) for push in pushes]
        given = [
            sum_rows(some) for some in zip(*(rows for rows, _ in each), strict=True)
        ]
        words = [tf.constant(rest) for _, rest in each]
        workers = tuple(push.worker for push in pushes)
        step = self._traced(workers)
        number = tf.constant(steps.pop(), tf.int64)
        nonfinite, touched = step(words, tf.constant(workers), number, given)
        if self._copies:
            self._copies.note(_known(touched) if touched else None)
        if self._tables:
            self._tables.note(given, self.clock + 1)
        self.ages.update(self.clock - push.step for push in pushes)
        self.clock += 1
        return int(nonfinite)

    def can_read(self, push: Push) -> bool:
        """Whether a push by itself is what was agreed upon; nothing is updated."""
        try:
            _, rest = self._read(push)
            given = [tf.constant(rest)], [tf.constant(push.worker)]
            number = tf.constant(push.step, tf.int64)
            if self._plain:
                self._receiver.receive(*given, number).decode()
        except Exception:  # of what it may be there is no end
            return False
        return True

    def _read(self, push: Push) -> tuple[list[TableRows], np.ndarray]:
        """Return the rows that were pushed, and the message of what is no table.

        Raises:
            ValueError: if they are none.
        """
        if self._tables is None:
            return [], push.words
        found, rest = self._tables.read(push.words)
        if not self._plain and len(rest):
            raise ValueError(f"{len(rest)} words follow the last row")
        return found, rest

    def _traced(self, pushed: tuple[int, ...]) -> Callable:
        """Return the function of a step of pushes of these workers, of any length.

        It is that of all steps of so many, but where a worker's own weights matter.
        """
        number = len(pushed)
        key = pushed if self._compensation else (number,)
        if key not in self._steps:
            words = [tf.TensorSpec([None], tf.int32)] * number
            workers = tf.TensorSpec([number], tf.int32)
            rows = self._tables.specs if self._tables else []
            signature = [words, workers, tf.TensorSpec([], tf.int64), rows]
            step = functools.partial(self._step, pushed[0])
            self._steps[key] = tf.function(step, input_signature=signature)
        return self._steps[key]

    def _step(
        self,
        first: int,
        words: Sequence[tf.Tensor],
        workers: tf.Tensor,
        step: tf.Tensor,
        given: Sequence[TableRows],
    ) -> tuple[tf.Tensor, TouchedEntries | None]:
        rate = tf.convert_to_tensor(self.optimizer.learning_rate)
        touched = None
        if self._plain:
            outcome = self._receiver.receive(words, tf.unstack(workers), step)
            if self._copies and self._leaves_others and outcome.touched:
                touched = outcome.touched()
            if self._compensation:
                outcome = self._compensation.apply(outcome, first)
            by = self.optimizer, outcome, self._plain, self._natively
            nonfinite = update.apply_update(*by)
        else:
            nonfinite = tf.constant(0)
            self.optimizer.iterations.assign_add(1)
        with tf.control_dependencies([nonfinite]):  # unless the others are refused
            if self._tables:
                self._tables.update(given, rate)
        return nonfinite, touched

    @property
    def _leaves_others(self) -> bool:
        """Whether an update changes nothing where the sum is 0."""
        rule = update.find_native_rule(self.optimizer, self._plain)
        return rule is not None and rule.is_plain_sgd


def _known(touched: TouchedEntries) -> list[np.ndarray] | None:
    positions, is_any = touched
    return None if is_any else [p.numpy() for p in positions]


# --- What a server begins with: weights of a worker, or its own checkpoint.
#
# Of a checkpoint are weights and the optimizer's state. How they are trained from
# there,
# and by how many workers, is said by the workers that come, as at every beginning.


def initial_model(handed: ModelSpec, words: np.ndarray) -> ServerModel:
    """Return the model that a worker gives its first weights.

    Args:
        handed: description of what the server is to be.
        words: bits of all variables, int32 `[w]`.

    Raises:
        ValueError: if it cannot be; for another number of words before there is any.
    """
    number = model_spec.model_words(handed)
    if len(words) != number:
        raise ValueError(
            f"The first weights must be {number} words, as the variables that were "
            f"handed over are. Received: {len(words)} words"
        )
    try:
        model = ServerModel(handed)
        model.load(words)
    except Exception as error:  # Keras raises any, and TensorFlow where it is too large
        raise ValueError(
            "The server cannot make the optimizer or the compressor of their configs; "
            f"it knows those of Keras and of tf_dgc. It says: {error}"
        ) from error
    return model


class RestoredModel(NamedTuple):
    """What a checkpoint has.

    Attributes:
        path: path of its file.
        handed: description of what the server was.
        words: bits of all variables, of the optimizer too, int32 `[w]`.
        clock: number of updates that they have had.
        rate: learning rate.
    """

    path: pathlib.Path
    handed: ModelSpec
    words: np.ndarray
    clock: int
    rate: float

    def difference(self, handed: ModelSpec) -> str | None:
        """Return why workers cannot go on from it; None if they can.

        Args:
            handed: description of what the server is to be.
        """
        found = model_spec.spec_difference(
            _of_state(self.handed), _of_state(handed), rates=False
        )
        if found is None:
            return None
        return (
            f"{found}, as in the checkpoint {self.path}. Train with what that is of; "
            "or remove it, to begin anew"
        )

    def model(self, handed: ModelSpec) -> ServerModel:
        """Return the model as it was, to be trained as workers say.

        Args:
            handed: description of what the server is to be.

        Raises:
            ValueError: if it cannot be.
        """
        try:
            model = ServerModel(handed)
            model.restore(self.words, self.clock, self.rate)
        except Exception as error:  # as above
            raise ValueError(f"{self.path} does not go with it: {error}") from error
        rate = model_spec.learning_rate_of(handed)
        if rate is not None and rate != model.rate:
            model.set_rate(rate)
        return model


def _of_state(handed: ModelSpec) -> ModelSpec:
    """Return what the words of a checkpoint are of."""
    kept = {name: handed[name] for name in ("version", "shard", "optimizer")}
    forms = [{"shape": v["shape"], "dtype": v["dtype"]} for v in handed["variables"]]
    return {**kept, "variables": forms}

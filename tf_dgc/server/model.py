"""The server's model: its variables, and the inner optimizer with all of its state."""

import collections
import functools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.compressors import Compressor
from tf_dgc.inner import native_rules, updating
from tf_dgc.optimizers import tensors
from tf_dgc.server import handing, pulls
from tf_dgc.server.copies import Copies
from tf_dgc.server.corrections import STRENGTH, ByRate, Compensation
from tf_dgc.server.handing import Handed
from tf_dgc.server.messages import Push
from tf_dgc.server.rows import Some
from tf_dgc.server.tables import Tables, add_up
from tf_dgc.steps import native, native_update
from tf_dgc.steps.base import Touched
from tf_dgc.steps.receiving import Receiver


class Model:
    """Variables of the model, updated by what is pushed.

    Args:
        handed: description that workers handed over.

    Attributes:
        clock: number of updates.
        ages: number of pushes by their age, the updates since they were computed.

    Raises:
        ValueError, TypeError: if Keras knows no such optimizer or compressor.
    """

    def __init__(self, handed: Handed):
        settings = handed["settings"]
        self.clock = 0
        self.ages: collections.Counter[int] = collections.Counter()
        self.optimizer = handing.deserialize(handed["optimizer"])
        compressor: Compressor = handing.deserialize(handed["compressor"])
        self.variables = handing.make_variables(handed)
        pairs = list(zip(self.variables, handed["variables"], strict=True))
        tables = [v for v, described in pairs if described["table"]]
        plain = [(v, described) for v, described in pairs if not described["table"]]
        self._plain = [v for v, _ in plain]
        number = handed["num_workers"]
        self._by_rate: ByRate | None = None
        self._compensation: Compensation | None = None
        if settings["correction"] == "rate":
            self._by_rate = ByRate(self.optimizer, number)
        if settings["correction"] == "delay":
            strength = settings["correction_strength"] or STRENGTH
            self._compensation = Compensation(self.variables, strength, number)
        excluded = [v for v, described in pairs if not described["decays"]]
        if excluded:
            self.optimizer.exclude_from_weight_decay(var_list=excluded)
        self.optimizer.build(self.variables)
        feedback = settings["error_feedback"]
        self._tables = Tables(tables, self.optimizer) if tables else None
        found = [tensors.describe(v, d["exempt"], feedback, number) for v, d in plain]
        live = native.is_live(self._plain)
        self._natively = native_update.is_live(self._plain)
        self._receiver = Receiver(compressor, found, feedback, settings["seed"], live)
        self._steps: dict[tuple[int, ...], Callable] = {}
        self._whole: tuple[int, np.ndarray] | None = None
        self._copies: Copies | None = None
        if settings["pull"] == "sparse" and plain:
            by = compressor, number, settings["pull_sparsity"]
            self._copies = Copies(self._plain, pulls.form_of(found, *by))

    @property
    def num_words(self) -> int:
        """Words of all variables."""
        return pulls.num_words(self.variables)

    def load(self, words: np.ndarray) -> None:
        """Set the variables.

        Args:
            words: bits of all of them, as `whole` returns them.
        """
        pulls.assign(self.variables, tf.constant(words))
        self._whole = None

    def state(self) -> np.ndarray:
        """Return the bits of all variables, the optimizer's too, int32 `[w]`.

        But for the learning rate, a variable in some models only.
        """
        return pulls.collect(self._everything()).numpy()

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
        number = pulls.num_words(everything)
        if len(words) != number:
            raise ValueError(f"it has {len(words)} words of state, and not {number}")
        pulls.assign(everything, tf.constant(words))
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
            self._whole = self.clock, pulls.collect(self.variables).numpy()
        return self._whole[1]

    def pull(self, worker: int) -> np.ndarray:
        """Return what a worker is sent behind a push, int32 `[w]`."""
        if not (self._copies or self._tables):
            return self.whole(worker)
        found = []
        if self._copies:
            found.append(self._copies.pull(worker).numpy())
        elif self._plain:
            found.append(pulls.collect(self._plain).numpy())
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
        given = [add_up(some) for some in zip(*(rows for rows, _ in each), strict=True)]
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

    def _read(self, push: Push) -> tuple[list[Some], np.ndarray]:
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
        given: Sequence[Some],
    ) -> tuple[tf.Tensor, Touched | None]:
        rate = tf.convert_to_tensor(self.optimizer.learning_rate)
        touched = None
        if self._plain:
            outcome = self._receiver.receive(words, tf.unstack(workers), step)
            if self._copies and self._leaves_others and outcome.touched:
                touched = outcome.touched()
            if self._compensation:
                outcome = self._compensation.apply(outcome, first)
            by = self.optimizer, outcome, self._plain, self._natively
            nonfinite = updating.update(*by)
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
        rule = native_rules.find(self.optimizer, self._plain)
        return rule is not None and rule.descends


def _known(touched: Touched) -> list[np.ndarray] | None:
    positions, is_any = touched
    return None if is_any else [p.numpy() for p in positions]

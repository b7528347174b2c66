"""Keras's training loops under a prepared strategy: what they exchange, and when.

Stock Keras reduces the loss and every metric over all workers in every step, and
TensorFlow asks in every step whether some worker still has a batch. Here the
gradients' exchange is the only meeting of a step. Its logs are those of this worker;
the logs of an epoch are those of all.

What is changed are `reduce` and `experimental_distribute_dataset` of the strategy
instance, and what a model instance calls within its `fit`, `evaluate` and `predict`.
"""

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_trainer, tf_collectives
from tf_dgc.multiworker import consensus, consensus_weights, failures, watchdog
from tf_dgc.multiworker.batch_iterators import (
    BatchIterator,
    DistributedBatches,
    wait_for_released,
)
from tf_dgc.multiworker.layer_statistics import (
    average_statistics,
    average_statistics_of,
    count_examples,
)
from tf_dgc.multiworker.stopping import StopSignal, StopTogether

# --- How many batches the workers of a loop have, and whether that is known.

_UNKNOWN, _INFINITE = -2, -1  # numbers of batches


def number_of_batches(loop: keras_trainer.Loop, batches: DistributedBatches) -> int:
    """Return how many batches this worker has, or a negative number.

    Args:
        loop: loop of Keras that is about to begin an epoch.
        batches: its distributed data set.
    """
    number = _INFINITE if batches.is_infinite else loop.num_batches
    return _UNKNOWN if number is None else number


def are_equal_lengths(numbers: set[int]) -> bool:
    """Return whether no worker can have a batch when another one has none.

    Args:
        numbers: numbers of batches of all workers, without repetitions.
    """
    return len(numbers) == 1 and _UNKNOWN not in numbers


def check_lengths(numbers: set[int], number: int, loop: keras_trainer.Loop) -> None:
    """Raise `ValueError` if workers are known to leave the loop at different steps.

    Args:
        numbers: numbers of batches of all workers, without repetitions.
        number: number of this worker's batches.
        loop: loop of Keras, in which each worker begins its data set anew, or leaves,
            after as many batches as it knows of, whatever the others have.
    """
    sets = "validation data sets" if loop.is_validation else "data sets"
    if _INFINITE in numbers and len(numbers) > 1:
        raise ValueError(
            f"The {sets} of all workers must be endless (`Dataset.repeat()`), or "
            "none of them. Received: on this worker "
            f"{'an endless' if number == _INFINITE else 'a finite'} one."
        )
    told = numbers - {_UNKNOWN}
    if len(numbers) > 1 and min(told) < loop.batches_left:
        raise ValueError(
            f"The {sets} of all workers must have the same number of batches, since "
            f"none can take a step without the others. Use `Dataset.repeat()` with "
            f"`{loop.limit}`, or on all workers data sets that do not tell their "
            "lengths, such as `Dataset.filter(lambda *_: True)` makes: then who has no "
            f"batch left goes on with empty ones. Received: {_describe(numbers)}, on "
            f"this worker {'an unknown number' if number == _UNKNOWN else number}, for "
            f"{_describe_steps(loop)}."
        )


def _describe(numbers: set[int]) -> str:
    """Return what data sets there are, for messages."""
    told = sorted(n for n in numbers if n != _UNKNOWN)
    found = f"data sets of {' and '.join(map(str, told))} batches" if told else ""
    if _UNKNOWN in numbers:
        found += " and " * bool(found) + "a data set that does not tell its length"
    return found


def _describe_steps(loop: keras_trainer.Loop) -> str:
    if math.isinf(loop.batches_left):
        return f"all of them, without `{loop.limit}`"
    together = ", in all epochs" if loop.name == "fit" else ""
    return f"{loop.batches_left} batches by `{loop.limit}`{together}"


def warn_about_per_batch_collectives(numbers: set[int]) -> None:
    """Warn that workers meet in every step, though their optimizer needs nobody.

    Args:
        numbers: numbers of batches of all workers, without repetitions.
    """
    warnings.warn(
        "Workers ask each other in every step whether one has another batch, a round "
        "trip, although the steps of their optimizer need nobody. Use "
        "`Dataset.repeat()` with `steps_per_epoch`, or data sets of one known length "
        "on all workers (`tf.data.experimental.assert_cardinality`). Received: "
        + _describe(numbers),
        stacklevel=2,
    )


class StrategyLoops:
    """Keras's loops under one strategy, of all models that are trained there.

    Args:
        strategy: strategy whose instance is changed.

    Attributes:
        strategy: strategy whose instance is changed.
        several: whether it has several workers.
        running: the loops of the model of which a step is being executed or traced.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self.strategy = strategy
        self._stock_reduce = strategy.reduce
        self.several = consensus.is_multi_worker(strategy)
        self.running: ModelLoops | None = None
        self._calls: list[Callable[[keras.Model], None]] = []
        self._distribute = strategy.experimental_distribute_dataset
        strategy.reduce = self.reduce
        strategy.experimental_distribute_dataset = self._distribute_dataset

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """Do what `strategy.reduce` does, but for three calls from within a loop.

        Two calls of Keras 3 are refused by TensorFlow (keras#20585). (a)
        `Trainer._maybe_symbolic_build` reduces a tuple of batches, of which it needs
        shapes and types only: it gets the local ones, as batches may differ in size
        (a single row for two replicas).
        (b) `reduce_per_replica` passes `axis=0` with scalar metrics.
        """
        local = self.strategy.experimental_local_results
        caller, model = keras_trainer.caller_of_reduce()
        if caller == keras_trainer.BUILD:
            self._adopt(model)
            return tf.nest.map_structure(lambda v: local(v)[0], value)
        if caller == keras_trainer.LOGS and self.running:
            return self.running.reduce_logs(value)
        if caller == keras_trainer.QUESTION and self.running:
            return self.running.replicas_with_values(value)
        if axis == 0 and _is_scalar(local(value)[0]):
            axis = None
        return self.stock_reduce(reduce_op, value, axis)

    def stock_reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """Call `reduce` as it was."""
        with failures.naming_workers(self.strategy):
            return self._stock_reduce(reduce_op, value, axis)

    def _distribute_dataset(self, *args: Any, **kwargs: Any) -> Any:
        dataset = self._distribute(*args, **kwargs)
        model = keras_trainer.calling_trainer()
        if model is None:
            return dataset
        self._adopt(model)
        return DistributedBatches(dataset)

    def _adopt(self, model: keras.Model) -> None:
        """Wrap a model and its submodels, which may be evaluated or saved as well."""
        for each in keras_trainer.models_within(model):
            if not keras_trainer.is_wrapped(each):
                ModelLoops(self, each)
                for call in self._calls:
                    call(each)

    def call_with_models(self, call: Callable[[keras.Model], None]) -> None:
        """Call a function with each model, when its first loop begins."""
        self._calls.append(call)


class ModelLoops:
    """The loops of one model.

    Args:
        loops: loops of the strategy.
        model: Keras model whose instance is changed.
    """

    def __init__(self, loops: StrategyLoops, model: keras.Model):
        self._loops, self._model = loops, model
        self._strategy = loops.strategy
        self._kind = "train"
        self._iterators: dict[str, weakref.ref] = {}
        # Whether no worker has a batch more than the others, by kind of loop.
        self._alike = {k: keras_trainer.make_flag() for k in ("train", "test")}
        self._stopping: StopSignal | None = None
        self._last: tuple[Any, Any] = None, None  # the last step's logs; unreduced
        count_examples(model)
        keras_trainer.wrap_trainer(
            model, self._wrap, _wrap_dataset, self._before_loop, self._wrap_results
        )
        loops_of_keras = ["fit", "evaluate", "predict"]
        keras_trainer.call_before(model, loops_of_keras, _wait_for_generators)
        consensus_weights.wrap_model_methods(model)

    # --- a step -------------------------------------------------------------------

    def _wrap(self, kind: str, function: Callable) -> Callable:
        def call(data: Any) -> Any:
            with self._named(), consensus_weights.consensus_weights(self._model, kind):
                if not isinstance(data, BatchIterator):
                    return function(data)
                loop = data.batches.loop
                if loop is None or not self._loops.several:
                    return data.run(function)
                return self._step(kind, function, loop, data)

        return call

    def _named(self) -> contextlib.AbstractContextManager:
        if self._loops.several:
            return failures.naming_workers(self._strategy)
        return contextlib.nullcontext()

    def _step(
        self,
        kind: str,
        function: Callable,
        loop: keras_trainer.Loop,
        data: BatchIterator,
    ) -> Any:
        last = self._iterators.get(kind)
        if last is None or last() is not data:
            self._begin(kind, loop, data)
        self._loops.running, self._kind = self, kind
        try:
            unreduced = data.run(function)
        except StopIteration:
            raise
        except BaseException:
            watchdog.expect_others(False)  # what the program does now is its own
            raise
        finally:
            self._loops.running = None
        logs = tf.nest.map_structure(_finish_mean, unreduced)
        self._last = logs, unreduced
        if kind == "train" and self._stopping and self._stopping.after_step():
            self._model.stop_training = True
        return logs

    def _begin(self, kind: str, loop: keras_trainer.Loop, data: BatchIterator) -> None:
        """Find out how many batches the others have, at the beginning of an epoch."""
        self._iterators[kind] = weakref.ref(data)
        number = number_of_batches(loop, data.batches)
        numbers = set(self._gather(number))
        check_lengths(numbers, number, loop)
        alike = are_equal_lengths(numbers)
        self._alike[kind].assign(alike)
        if (
            kind == "train"
            and not alike
            and consensus_weights.has_local_optimizer(self._model)
        ):
            warn_about_per_batch_collectives(numbers)
        loop.move_last_callback()  # others may have been added since

    def _gather(self, number: int) -> list[int]:
        """Return the numbers of all workers, in one collective."""
        hook = tf_collectives.get_cross_device_ops(self._strategy)
        count = len(self._strategy.extended.worker_devices)
        nothing = tf_collectives.per_replica([tf.zeros([0])] * count)
        words = tf.bitcast(tf.constant([number], tf.int64), tf.int32)
        words = tf_collectives.per_replica([tf.reshape(words, [-1])] * count)
        _, gathered = hook.communicate(False, nothing, words)
        first = self._strategy.experimental_local_results(gathered)[0]
        return tf.bitcast(tf.reshape(first, [-1, 2]), tf.int64).numpy().tolist()

    def _ask(self, number: int) -> list[int]:
        """Do what `_gather` does, for a callback."""
        with self._named():
            return self._gather(number)

    # --- what a step does not exchange --------------------------------------------

    def reduce_logs(self, value: Any) -> tf.Tensor:
        """Return the mean over this worker's replicas, or over all where all ask.

        Of what is not a scalar it is a mean over examples as well, whose sum and number
        are returned as one tensor: batches may differ in size (`_finish_mean`).
        """
        mine = _sum_and_count(self._strategy.experimental_local_results(value))
        if self._kind == "train":
            return mine
        reduce = self._loops.stock_reduce
        # A callback may leave an evaluation, where others would wait.
        op = "MEAN" if mine.shape.rank == 0 else "SUM"
        each = tf_collectives.per_replica
        count = len(self._strategy.extended.worker_devices)
        return tf.cond(
            self._alike[self._kind],
            lambda: mine,
            lambda: reduce(op, each([mine] * count), axis=None),
        )

    def replicas_with_values(self, value: Any) -> tf.Tensor:
        """Return how many replicas have a batch: of this worker, if all are alike."""
        reduce = self._loops.stock_reduce
        return tf.cond(
            self._alike[self._kind],
            lambda: tf.identity(value),
            lambda: reduce("SUM", value, axis=None),
        )

    # --- the end of an epoch ------------------------------------------------------

    def _wrap_results(self, stock: Callable) -> Callable:
        def results(logs: Any) -> Any:
            name = keras_trainer.name_of_calling_loop()
            with self._named():
                if name == "fit":
                    average_statistics_of(self._model)
                found = stock(logs)
                if found is logs and logs is self._last[0] and logs is not None:
                    return self._mean_of_all(self._last[1])
                return found

        return results

    def _mean_of_all(self, unreduced: Any) -> Any:
        """Return the logs of a step, which are no metrics, over all workers."""
        leaves = tf.nest.flatten(unreduced)
        vector = tf.concat(
            [tf.reshape(tf.cast(x, tf.float64), [-1]) for x in leaves], axis=0
        )
        count = len(self._strategy.extended.worker_devices)
        copies = tf_collectives.per_replica([vector] * count)
        mean = self._loops.stock_reduce("MEAN", copies, axis=None)
        parts = tf.split(mean, [x.shape.num_elements() for x in leaves])
        reduced = [
            tf.cast(_finish_mean(tf.reshape(part, leaf.shape)), leaf.dtype)
            for part, leaf in zip(parts, leaves, strict=True)
        ]
        return tf.nest.pack_sequence_as(unreduced, reduced)

    # --- before a loop ------------------------------------------------------------

    def _before_loop(self, loop: keras_trainer.Loop) -> None:
        if loop.name == "evaluate" and not loop.is_validation:
            average_statistics(self._model)
        if loop.name == "fit" and self._loops.several:
            self._new_fit(loop)

    def _new_fit(self, loop: keras_trainer.Loop) -> None:
        if self._stopping:
            self._stopping.end()
        self._stopping = StopSignal(self._strategy)
        loop.last_callback = StopTogether(self._stopping, self._ask, loop)
        loop.last_callback.set_model(self._model)
        loop.move_last_callback()


def _wrap_dataset(dataset: Any) -> DistributedBatches:
    if isinstance(dataset, DistributedBatches):
        return dataset
    return DistributedBatches(dataset)  # one that the user distributed


def _wait_for_generators(*args: Any, **kwargs: Any) -> None:
    """Let no loop before draw from a Python generator that this one is given.

    Two threads cannot be in a generator at once.
    """
    if any(isinstance(value, Iterator) for value in (*args, *kwargs.values())):
        wait_for_released()


def _sum_and_count(replicas: tuple[tf.Tensor, ...]) -> tf.Tensor:
    """Return the mean of scalars; of others the sum over examples, and their number."""
    replicas = tuple(map(tf.convert_to_tensor, replicas))
    if replicas[0].shape.rank == 0:
        return tf.add_n(replicas) / len(replicas)
    examples = tf.concat(replicas, axis=0)
    total = tf.reduce_sum(examples, axis=0)
    return tf.stack(
        [total, tf.fill(tf.shape(total), tf.cast(tf.shape(examples)[0], total.dtype))]
    )


def _finish_mean(value: tf.Tensor) -> tf.Tensor:
    """Return the mean from what `_sum_and_count` returns."""
    return value if value.shape.rank == 0 else value[0] / value[1]


def _is_scalar(value: Any) -> bool:
    return tf.is_tensor(value) and value.shape.rank == 0

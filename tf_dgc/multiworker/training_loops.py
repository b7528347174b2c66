"""Keras's training loops under a prepared strategy.

Stock Keras reduces the loss and every metric over all workers in every step, and
TensorFlow checks in every step whether some worker still has a batch. Here a step
communicates only to exchange gradients. Its logs are those of this worker; the logs of
an epoch are those of all workers.

Wraps `fit`, `evaluate` and `predict` of `keras.Model`, which change nothing for models
of other strategies, and replaces `reduce` and `experimental_distribute_dataset` of the
strategy instance and what a model instance calls within its loops.
"""

import contextlib
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tf_dgc._internals import keras_trainer, tf_collectives
from tf_dgc.multiworker import (
    consensus,
    consensus_weights,
    cross_device,
    failures,
    log_callbacks,
    watchdog,
)
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

BeforeFit: TypeAlias = Callable[[keras.callbacks.CallbackList], None]

_UNKNOWN, _INFINITE = -2, -1  # numbers of batches


class StrategyLoops:
    """Keras's loops under one strategy, whose instance is changed."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self.strategy = strategy
        self.is_multi_worker = consensus.is_multi_worker(strategy)
        self.running: ModelLoops | None = None
        self._calls: list[Callable[[keras.Model], None]] = []
        self._calls_before_fit: list[BeforeFit] = []
        self._stock_reduce = strategy.reduce
        self._stock_distribute = strategy.experimental_distribute_dataset
        strategy.reduce = self.reduce
        strategy.experimental_distribute_dataset = self._distribute_dataset
        strategy._tf_dgc_loops = self
        keras_trainer.wrap_loops(_run_loop)

    def call_with_models(self, call: Callable[[keras.Model], None]) -> None:
        """Call a function with each model, when its first loop begins."""
        self._calls.append(call)

    def call_before_fit(self, call: BeforeFit) -> None:
        """Call a function with the callbacks of each `fit`, before these are called."""
        self._calls_before_fit.append(call)

    def before_fit(self, callbacks: keras.callbacks.CallbackList) -> None:
        """Call the functions of `call_before_fit`."""
        for call in self._calls_before_fit:
            call(callbacks)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """Replace `strategy.reduce`, which a step of Keras calls for two purposes.

        The means over axis 0 are those of a step's logs. TensorFlow rejects them for
        scalars, such as metrics, which here are averaged over replicas.
        """
        is_mean = reduce_op in ("MEAN", tf.distribute.ReduceOp.MEAN)
        if self.running and is_mean and axis == 0:
            return self.running.reduce_logs(value)
        if self.running and axis is None and keras_trainer.is_batch_count(value):
            return self.running.replicas_with_values(value)
        first = self.strategy.experimental_local_results(value)[0]
        if axis == 0 and tf.is_tensor(first) and first.shape.rank == 0:
            axis = None
        return self.stock_reduce(reduce_op, value, axis)

    def stock_reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """Call TensorFlow's `reduce`."""
        with failures.naming_workers(self.strategy):
            return self._stock_reduce(reduce_op, value, axis)

    def _distribute_dataset(self, *args: Any, **kwargs: Any) -> Any:
        dataset = self._stock_distribute(*args, **kwargs)
        is_for_loop = keras_trainer.running_loop() is not None
        return DistributedBatches(dataset) if is_for_loop else dataset

    def wrap_models(self, model: keras.Model) -> None:
        """Wrap a model and its submodels, which may be evaluated or saved as well."""
        for submodel in keras_trainer.models_within(model):
            if not keras_trainer.is_wrapped(submodel):
                ModelLoops(self, submodel)
                for call in self._calls:
                    call(submodel)


class ModelLoops:
    """The loops of one Keras model, whose instance is changed."""

    def __init__(self, loops: StrategyLoops, model: keras.Model):
        self._loops, self._model = loops, model
        self._strategy = loops.strategy
        self._num_local_replicas = len(self._strategy.extended.worker_devices)
        self._kind = "train"
        self._iterators: dict[str, weakref.ref] = {}
        # Whether all workers have equally many batches, by kind of loop.
        self._equal_lengths = {
            kind: tf_collectives.local_variable(False, tf.bool)
            for kind in ("train", "test")
        }
        self._stop_signal: StopSignal | None = None
        # The logs of the last step, and those that `_finish_mean` has not seen.
        self._last_logs: tuple[Any, Any] = None, None
        count_examples(model)
        keras_trainer.wrap_trainer(
            model,
            self._wrap_function,
            _wrap_dataset,
            self._before_loop,
            self._wrap_results,
        )
        consensus_weights.wrap_model_methods(model)

    # A step

    def _wrap_function(self, kind: str, function: Callable) -> Callable:
        def call(data: Any) -> Any:
            with (
                self._naming_workers(),
                consensus_weights.consensus_weights(self._model, kind),
            ):
                if not isinstance(data, BatchIterator):
                    return function(data)
                loop = data.batches.loop
                if loop is None or not self._loops.is_multi_worker:
                    return data.run(function)
                return self._step(kind, function, loop, data)

        return call

    def _naming_workers(self) -> contextlib.AbstractContextManager:
        if self._loops.is_multi_worker:
            return failures.naming_workers(self._strategy)
        return contextlib.nullcontext()

    def _step(
        self,
        kind: str,
        function: Callable,
        loop: keras_trainer.Loop,
        data: BatchIterator,
    ) -> Any:
        last_iterator = self._iterators.get(kind)
        if last_iterator is None or last_iterator() is not data:
            self._begin_epoch(kind, loop, data)
        self._loops.running, self._kind = self, kind
        try:
            unreduced = data.run(function)
        except StopIteration:
            raise
        except BaseException:
            watchdog.expect_others(False)  # the program may now do anything
            raise
        finally:
            self._loops.running = None
        logs = tf.nest.map_structure(_finish_mean, unreduced)
        self._last_logs = logs, unreduced
        if kind == "train" and self._stop_signal and self._stop_signal.after_step():
            self._model.stop_training = True
        return logs

    def _begin_epoch(
        self, kind: str, loop: keras_trainer.Loop, data: BatchIterator
    ) -> None:
        self._iterators[kind] = weakref.ref(data)
        number = _INFINITE if data.batches.is_infinite else loop.num_batches
        number = _UNKNOWN if number is None else number
        numbers = set(self._all_gather(number))
        _check_lengths(numbers, number, loop)
        # Then no worker has a batch when another one has none.
        equal = len(numbers) == 1 and _UNKNOWN not in numbers
        self._equal_lengths[kind].assign(equal)
        if (
            kind == "train"
            and not equal
            and consensus_weights.has_local_optimizer(self._model)
        ):
            _warn_about_per_batch_collectives(numbers)
        loop.move_last_callback()  # callbacks may have been added since

    def _all_gather(self, number: int) -> list[int]:
        """Return the numbers of all workers, in one collective."""
        hook = cross_device.cross_device_ops(self._strategy)
        words = tf.bitcast(tf.constant([number], tf.int64), tf.int32)
        with self._naming_workers():
            vectors = [tf.reshape(words, [-1])] * self._num_local_replicas
            first, *_ = hook.all_gather(vectors)
            return tf.bitcast(tf.reshape(first, [-1, 2]), tf.int64).numpy().tolist()

    def _per_replica(self, value: tf.Tensor) -> Any:
        return tf_collectives.per_replica([value] * self._num_local_replicas)

    # Reductions that a step leaves out

    def reduce_logs(self, value: Any) -> tf.Tensor:
        """Return the mean over this worker's replicas, or over all if all call this."""
        # Of a value that is not a scalar, the mean is over examples: then sum and
        # number are one tensor for `_finish_mean`, because batches may differ in size.
        local = _sum_and_count(self._strategy.experimental_local_results(value))
        if self._kind == "train":
            return local
        # A callback may leave an evaluation, and the others would wait: hence reduce
        # only where the lengths differ.
        op = "MEAN" if local.shape.rank == 0 else "SUM"
        return tf.cond(
            self._equal_lengths[self._kind],
            lambda: local,
            lambda: self._loops.stock_reduce(op, self._per_replica(local), axis=None),
        )

    def replicas_with_values(self, value: Any) -> tf.Tensor:
        """Return how many replicas have a batch; only locally if lengths are equal."""
        return tf.cond(
            self._equal_lengths[self._kind],
            lambda: tf.identity(value),
            lambda: self._loops.stock_reduce("SUM", value, axis=None),
        )

    # The end of an epoch

    def _wrap_results(self, stock: Callable) -> Callable:
        def results(logs: Any) -> Any:
            loop = keras_trainer.running_loop()
            with self._naming_workers():
                if loop is not None and loop.name == "fit":
                    average_statistics_of(self._model)
                epoch_logs = stock(logs)
                last_logs, unreduced = self._last_logs
                if epoch_logs is logs and logs is last_logs and logs is not None:
                    return self._mean_of_all(unreduced)
                return epoch_logs

        return results

    def _mean_of_all(self, unreduced: Any) -> Any:
        """Return the mean over all workers of a step's logs that are no metrics."""
        leaves = tf.nest.flatten(unreduced)
        vector = tf.concat(
            [tf.reshape(tf.cast(x, tf.float64), [-1]) for x in leaves], axis=0
        )
        mean = self._loops.stock_reduce("MEAN", self._per_replica(vector), axis=None)
        segments = tf.split(mean, [x.shape.num_elements() for x in leaves])
        reduced = [
            tf.cast(_finish_mean(tf.reshape(segment, leaf.shape)), leaf.dtype)
            for segment, leaf in zip(segments, leaves, strict=True)
        ]
        return tf.nest.pack_sequence_as(unreduced, reduced)

    # The beginning of a loop

    def _before_loop(self, loop: keras_trainer.Loop) -> None:
        if loop.name == "evaluate" and not loop.is_validation:
            average_statistics(self._model)
        if loop.name == "fit" and self._loops.is_multi_worker:
            if self._stop_signal:
                self._stop_signal.end()
            self._stop_signal = StopSignal(self._strategy)
            loop.last_callback = StopTogether(self._stop_signal, self._all_gather, loop)
            loop.last_callback.set_model(self._model)
            loop.move_last_callback()
            assert loop.callbacks is not None  # of a `fit` on several workers
            self._loops.before_fit(loop.callbacks)


def _wrap_dataset(dataset: Any) -> DistributedBatches:
    if isinstance(dataset, DistributedBatches):
        return dataset
    return DistributedBatches(dataset)  # one that the user distributed


def _run_loop(
    model: keras.Model, name: str, stock: Callable, arguments: inspect.BoundArguments
) -> Any:
    """Call `fit`, `evaluate` or `predict` of a model, wrapped if its strategy is."""
    loops = getattr(model.distribute_strategy, "_tf_dgc_loops", None)
    if loops is None:
        return stock(*arguments.args, **arguments.kwargs)
    loops.wrap_models(model)
    if any(isinstance(value, Iterator) for value in arguments.arguments.values()):
        wait_for_released()  # two threads cannot draw from one Python generator
    if name == "fit" and loops.is_multi_worker:
        callbacks = arguments.arguments["callbacks"]
        arguments.arguments["callbacks"] = log_callbacks.without_shared_logs(
            loops.strategy, callbacks
        )
    return keras_trainer.run_loop(
        model, name, stock, arguments, owns_callbacks=loops.is_multi_worker
    )


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
    return value if value.shape.rank == 0 else value[0] / value[1]


def _check_lengths(numbers: set[int], number: int, loop: keras_trainer.Loop) -> None:
    """Raise `ValueError` if workers are known to leave the loop at different steps."""
    # Each worker restarts its data set, or leaves the loop, after as many batches as it
    # knows of, whatever the others have.
    sets = "validation data sets" if loop.is_validation else "data sets"
    if _INFINITE in numbers and len(numbers) > 1:
        raise ValueError(
            f"The {sets} of all workers must be endless (`Dataset.repeat()`), or "
            "none of them. Received: on this worker "
            f"{'an endless' if number == _INFINITE else 'a finite'} one."
        )
    if len(numbers) > 1 and min(numbers - {_UNKNOWN}) < loop.batches_left:
        raise ValueError(
            f"The {sets} of all workers must have the same number of batches, because "
            "all workers take every step together. Either use `Dataset.repeat()` with "
            f"`{loop.limit}`. Or hide the length on all workers, for example by "
            "`dataset.filter(lambda *_: True)`: then a worker that has no batch left "
            f"continues with empty ones. Received: {_describe(numbers)} (on this "
            f"worker {'an unknown number' if number == _UNKNOWN else number}); "
            f"`{loop.name}` takes {_describe_steps(loop)}."
        )


def _describe(numbers: set[int]) -> str:
    lengths = sorted(n for n in numbers if n != _UNKNOWN)
    text = f"data sets of {' and '.join(map(str, lengths))} batches" if lengths else ""
    if _UNKNOWN in numbers:
        text += " and " * bool(text) + "a data set of unknown length"
    return text


def _describe_steps(loop: keras_trainer.Loop) -> str:
    if math.isinf(loop.batches_left):
        return f"all of them, without `{loop.limit}`"
    together = ", in all epochs" if loop.name == "fit" else ""
    return f"{loop.batches_left} batches by `{loop.limit}`{together}"


def _warn_about_per_batch_collectives(numbers: set[int]) -> None:
    warnings.warn(
        "In every step, the workers check whether another one still has a batch. That "
        "takes a round trip, although their optimizer's steps do not communicate. Use "
        "`Dataset.repeat()` with `steps_per_epoch`, or data sets of one known length "
        "on all workers (`tf.data.experimental.assert_cardinality`). Received: "
        + _describe(numbers),
        stacklevel=2,
    )

"""Data sets of Keras's loops, whose iterators are destroyed in separate threads.

When the last reference to an iterator of `tf.data` is dropped, TensorFlow ends the
iterator's threads and waits for them: for the batch that a Python generator is
producing, and for the thread that tunes the pipeline. The latter may miss the
notification, because `CancellationManager` notifies before it sets its flag, and then
sleeps for up to a minute (`Model::OptimizeLoop`). Python may drop references anywhere,
also in a garbage collection, and the other workers would wait meanwhile.

So a loop gets a `BatchIterator`, which holds the only reference to TensorFlow's
iterator.
"""

import _thread
import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tf_dgc._internals import keras_trainer

T = TypeVar("T")
_WAIT_SECONDS = 5.0
# More than TensorFlow's tuning thread sleeps. A thread that returns from TensorFlow
# while the interpreter ends aborts the process.
_EXIT_SECONDS = 65.0


class DistributedBatches:
    """A `tf.distribute.DistributedDataset` that a loop of Keras iterates over."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._first: BatchIterator | None = None  # begun by `peek`
        self.loop: keras_trainer.Loop | None = None

    @property
    def element_spec(self) -> Any:
        """Structure of the `tf.TypeSpec`s of a batch of all local replicas."""
        return self._dataset.element_spec

    @property
    def is_infinite(self) -> bool:
        """Whether it is known to have no end."""
        return bool(self._dataset.cardinality == tf.data.INFINITE_CARDINALITY)

    def peek(self) -> Any:
        """Return the first batch; the next iterator yields it as well."""
        if self._first is None:
            self._first = BatchIterator(self, iter(self._dataset))
        return self._first.peek()

    def __iter__(self) -> "BatchIterator":
        first, self._first = self._first, None
        return BatchIterator(self, iter(self._dataset)) if first is None else first


class BatchIterator:
    """An iterator over distributed batches; nothing else may refer to `iterator`."""

    def __init__(self, batches: DistributedBatches, iterator: Any):
        self.batches = batches
        self._peeked: list[Any] = []  # batches that are not yet yielded
        # The only reference to the iterator is in this list, which a thread clears.
        self._holder = [iterator]
        weakref.finalize(self, _release, self._holder).atexit = False

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Any:
        if self._peeked:
            return self._peeked.pop()
        return self._run(next)

    def peek(self) -> Any:
        """Return the next batch without consuming it."""
        if not self._peeked:
            self._peeked.append(self._run(next))
        return self._peeked[0]

    def run(self, function: Callable[[Any], T]) -> T:
        """Call a function of Keras's trainer with an iterator."""
        # That is TensorFlow's iterator, or this one if it has a batch that `peek` drew.
        return function(self) if self._peeked else self._run(function)

    def _run(self, function: Callable[[Any], T]) -> T:
        if self._holder:
            try:
                return function(self._holder[0])
            except (StopIteration, tf.errors.OutOfRangeError):
                pass
            except tf.errors.OpError as error:
                if error.__suppress_context__:  # its frames refer to the iterator
                    error.__context__ = None
                raise
            # Not before: the error's frames referred to the iterator.
            self.release()
        raise StopIteration

    def release(self) -> None:
        """End TensorFlow's iterator; there is no batch left."""
        holder, self._holder = self._holder, []
        _release(holder)


_ending: set[int] = set()  # ids of lists that are being cleared
_changed = threading.Condition()
_leaked: list[list[Any]] = []  # iterators that the end of the process destroys


def _release(holder: list[Any]) -> None:
    """Clear a list in a thread: destructors call this, so it takes no lock."""
    if not holder:
        return
    _ending.add(id(holder))
    try:
        _thread.start_new_thread(_clear, (holder,))
    except RuntimeError:  # the interpreter ends
        _ending.discard(id(holder))
        _leaked.append(holder[:])


def _clear(holder: list[Any]) -> None:
    holder.clear()  # waits without holding Python's lock
    _ending.discard(id(holder))
    with _changed:
        _changed.notify_all()


def wait_for_released(seconds: float = _WAIT_SECONDS) -> bool:
    """Wait until released iterators have ended; return whether they have."""
    released = set(_ending)
    if not released:
        return True
    with _changed:
        return _changed.wait_for(lambda: not released & _ending, seconds)


atexit.register(wait_for_released, _EXIT_SECONDS)

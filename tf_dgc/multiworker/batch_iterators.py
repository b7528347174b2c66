"""Data sets of Keras's loops, whose iterators end in threads of their own.

When the last reference to an iterator of `tf.data` goes, TensorFlow ends the iterator's
threads and waits for them: for the batch that a Python generator is making, and for the
thread that tunes the pipeline. That one may miss the notification, as
`CancellationManager` notifies before it sets its flag, and then sleeps for up to a
minute (`Model::OptimizeLoop`). Python drops references anywhere, also while it collects
garbage within some thread, and the other workers would wait meanwhile.

So a loop gets a `BatchIterator`, which alone refers to TensorFlow's iterator.
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
# Longer than TensorFlow's tuning thread sleeps. A thread that returns from TensorFlow
# while the interpreter ends aborts the process.
_EXIT_SECONDS = 65.0


class DistributedBatches:
    """A distributed data set, as a loop of Keras iterates over it.

    Args:
        dataset: `tf.distribute.DistributedDataset`.

    Attributes:
        loop: loop that iterates over it; None before it begins, and for `predict`.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._first: BatchIterator | None = None  # begun by `peek`
        self.loop: keras_trainer.Loop | None = None

    @property
    def element_spec(self) -> Any:
        """Structure of the `tf.TypeSpec` of a batch of all local replicas."""
        return self._dataset.element_spec

    @property
    def is_infinite(self) -> bool:
        """Whether it is known to have no end."""
        return bool(self._dataset.cardinality == tf.data.INFINITE_CARDINALITY)

    def peek(self) -> Any:
        """Return the first batch, which the next iterator yields all the same."""
        if self._first is None:
            self._first = BatchIterator(self, iter(self._dataset))
        return self._first.peek()

    def __iter__(self) -> "BatchIterator":
        first, self._first = self._first, None
        return BatchIterator(self, iter(self._dataset)) if first is None else first


class BatchIterator:
    """An iterator over the batches of a distributed data set.

    Args:
        batches: data set that it is of.
        iterator: TensorFlow's iterator, to which nobody else keeps a reference.

    Attributes:
        batches: data set that it is of.
    """

    def __init__(self, batches: DistributedBatches, iterator: Any):
        self.batches = batches
        self._drawn: list[Any] = []  # by `peek`, not yet yielded
        # The only reference to the iterator is in this list, which a thread clears.
        self._holder = [iterator]
        weakref.finalize(self, _release, self._holder).atexit = False

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Any:
        if self._drawn:
            return self._drawn.pop()
        return self._run(next)

    def peek(self) -> Any:
        """Return the next batch, which stays the next one."""
        if not self._drawn:
            self._drawn.append(self._run(next))
        return self._drawn[0]

    def run(self, function: Callable[[Any], T]) -> T:
        """Call a function of Keras's trainer with batches to draw from.

        Args:
            function: function of an iterator: TensorFlow's, or this one while it has
                a batch that `peek` drew.

        Raises:
            StopIteration: if there is no batch left.
        """
        return function(self) if self._drawn else self._run(function)

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
            # Only now: the error's frames referred to the iterator.
            self.release()
        raise StopIteration

    def release(self) -> None:
        """End TensorFlow's iterator; there is no batch left."""
        holder, self._holder = self._holder, []
        _release(holder)


_ending: set[int] = set()
_changed = threading.Condition()


def _release(holder: list[Any]) -> None:
    """Drop what a list refers to, in a thread.

    Destructors call this, in any thread and within any code: it takes no lock.
    """
    if not holder:
        return
    _ending.add(id(holder))
    try:
        _thread.start_new_thread(_clear, (holder,))
    except RuntimeError:  # the interpreter ends: let the process end it
        _ending.discard(id(holder))
        _left.append(holder[:])


_left: list[list[Any]] = []


def _clear(holder: list[Any]) -> None:
    holder.clear()  # which waits without Python's lock
    _ending.discard(id(holder))
    with _changed:
        _changed.notify_all()


def wait_for_released(seconds: float = _WAIT_SECONDS) -> bool:
    """Wait until iterators that were released have ended, for some seconds at most.

    Until then a Python generator may be making a batch for one of them.

    Returns:
        Whether they have.
    """
    released = set(_ending)
    if not released:
        return True
    with _changed:
        return _changed.wait_for(lambda: not released & _ending, seconds)


atexit.register(wait_for_released, _EXIT_SECONDS)

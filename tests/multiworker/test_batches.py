"""Every loop draws every batch once, from each kind of data."""

import contextlib
import gc
import pathlib
import threading
import time
import weakref

import batch_worker
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc.multiworker import batch_iterators, training_loops

SCRIPT = pathlib.Path(batch_worker.__file__)


def check(counts, expected):
    assert counts.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(counts[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("replicas", "sources"),
    [
        (1, ["generator", "from_generator once"]),
        (2, ["PyDataset of 2 workers"]),
        pytest.param(1, list(batch_worker.SOURCES), marks=pytest.mark.slow),
        pytest.param(2, list(batch_worker.SOURCES), marks=pytest.mark.slow),
    ],
)
def test_no_batch_is_lost_by_one_worker(strategies, replicas, sources):
    """Two replicas of one process get halves of every batch."""
    one_replica = tf.distribute.MirroredStrategy(["CPU:0"])
    strategy = tf_dgc.prepare({1: one_replica, 2: strategies[2]}[replicas])
    counts = batch_worker.Counter(strategy).count(sources)
    check(counts, batch_worker.expected(sources))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_plain_keras_loses_no_batch():
    """The other tests expect the counts of Keras without a strategy."""
    sources = [s for s in batch_worker.SOURCES if s != "from_generator once"]
    plain = batch_worker.Counter(None)
    check(plain.count(sources), batch_worker.expected(sources))
    counts = plain.count_in_validation_and_epochs()
    check(counts, batch_worker.EXPECTED_IN_VALIDATION_AND_EPOCHS)


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize(
    "sources",
    [
        ["generator"],
        pytest.param(list(batch_worker.SOURCES), marks=pytest.mark.slow),
    ],
)
def test_no_batch_is_lost_by_two_workers(starter, tmp_path, sources):
    finished = starter.run([SCRIPT, "count", tmp_path, *sources], 2, tmp_path)
    assert finished.codes == [0, 0]
    for counts in finished.findings:
        check(counts, batch_worker.expected(sources))


@pytest.mark.workers
@pytest.mark.slow
def test_no_batch_is_lost_between_epochs(starter, tmp_path):
    """Also in validation, and by several `fit`s on one generator."""
    command = [SCRIPT, "count_in_validation_and_epochs", tmp_path]
    finished = starter.run(command, 2, tmp_path)
    assert finished.codes == [0, 0]
    for counts in finished.findings:
        check(counts, batch_worker.EXPECTED_IN_VALIDATION_AND_EPOCHS)


@pytest.mark.workers
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_short_fits_on_generators(starter, tmp_path):
    """The end of an iterator delays a worker less than the others' timeout."""
    command = [SCRIPT, "stress", tmp_path]
    finished = starter.run(command, 2, tmp_path, timeout=850.0)
    assert finished.codes == [0, 0]
    assert finished.findings == [{"counts": [1.0]}] * 2


class Recorder:
    """Records the iterators of a data set, and the threads that drop them."""

    def __init__(self, dataset):
        self._dataset = dataset
        self.alive = set()
        self.droppers = []

    def __iter__(self):
        iterator = iter(self._dataset)
        number = len(self.alive) + len(self.droppers)
        self.alive.add(number)
        weakref.finalize(iterator, self._drop, number)
        return iterator

    def _drop(self, number):
        self.alive.discard(number)
        self.droppers.append(threading.current_thread())

    def check(self, number):
        """Check the number of iterators, and that other threads dropped them all."""
        # TensorFlow's own threads sleep 60 s.
        assert batch_iterators.wait_for_released(90.0)
        assert not self.alive
        assert len(self.droppers) == number
        assert threading.main_thread() not in self.droppers


def distribute(dataset):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    return strategy.experimental_distribute_dataset(dataset)


def test_an_iterator_is_dropped_while_its_generator_is_busy():
    """Dropping the last reference does not wait for the generator."""
    busy, go_on = threading.Event(), threading.Event()

    def numbers():
        yield 0
        busy.set()
        go_on.wait(60.0)
        yield 1

    data = tf.data.Dataset.from_generator(
        numbers, output_signature=tf.TensorSpec((), tf.int32)
    )
    recorder = Recorder(distribute(data.batch(1).prefetch(1)))
    iterator = iter(batch_iterators.DistributedBatches(recorder))
    assert next(iterator).numpy() == [0]
    assert busy.wait(60.0)
    start = time.monotonic()
    del iterator
    assert time.monotonic() - start < 1.0
    assert not batch_iterators.wait_for_released(0.2)
    go_on.set()
    recorder.check(1)


def test_iterator_is_collected_by_its_own_thread():
    """The iterator's generator runs the garbage collection that drops it."""
    busy, done = threading.Event(), threading.Event()

    def numbers():
        yield 0
        busy.wait(60.0)
        gc.collect()
        done.set()
        yield 1

    data = tf.data.Dataset.from_generator(
        numbers, output_signature=tf.TensorSpec((), tf.int32)
    )
    recorder = Recorder(distribute(data.batch(1).prefetch(1)))
    cycle = [iter(batch_iterators.DistributedBatches(recorder))]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    busy.set()
    assert done.wait(60.0)
    recorder.check(1)


def test_a_peeked_batch_is_drawn_again():
    batches = batch_iterators.DistributedBatches(distribute(tf.data.Dataset.range(3)))
    assert batches.peek().numpy() == batches.peek().numpy() == 0
    first = iter(batches)
    assert first.peek().numpy() == 0
    assert first.run(lambda drawn: next(drawn)).numpy() == 0
    assert [x.numpy() for x in first] == [1, 2]
    with pytest.raises(StopIteration):
        first.run(next)
    assert [x.numpy() for x in batches] == [0, 1, 2]


def test_an_error_does_not_keep_the_iterator():
    """Neither does TensorFlow's error that is its cause."""
    data = tf.data.Dataset.range(3).map(lambda x: 1 // (1 - x))
    recorder = Recorder(distribute(data))
    iterator = iter(batch_iterators.DistributedBatches(recorder))
    saved_error = None
    try:
        list(iterator)
    except tf.errors.InvalidArgumentError as error:
        saved_error = error.with_traceback(None)  # Keras leaves out TensorFlow's frames
    del iterator
    recorder.check(1)
    assert "zero" in str(saved_error)


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 3


class Fail(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise KeyError("raised by the user")


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_no_loop_drops_an_iterator(monkeypatch):
    """Other threads drop it, whether the loop ends, is stopped, or fails."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    recorders = []

    def record(dataset):
        recorders.append(Recorder(dataset))
        return RecordedBatches(recorders[-1])

    class RecordedBatches(batch_iterators.DistributedBatches):
        element_spec = property(lambda self: self._dataset._dataset.element_spec)

    monkeypatch.setattr(training_loops, "DistributedBatches", record)
    monkeypatch.setattr(training_loops, "_wrap_dataset", lambda dataset: dataset)
    counter = batch_worker.Counter(tf_dgc.prepare(strategy))
    model = counter.make_model("zeros", 1.0)
    for callback in ([], [Stop()], [Fail()]):
        with contextlib.suppress(KeyError):
            model.fit(
                batch_worker.generator(),
                validation_data=batch_worker.make_function_dataset(),
                callbacks=callback,
                shuffle=False,
                verbose=0,
            )
    model.evaluate(batch_worker.generator(), verbose=0)
    model.predict(batch_worker.generator(), verbose=0)
    gc.collect()
    assert len(recorders) == 7
    for recorder in recorders:
        recorder.check(1)

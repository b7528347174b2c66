"""Breaks down the time of a step, from TensorFlow's trace of executed operations."""

import contextlib
import pathlib
import statistics
import tempfile
import time

import tensorflow as tf

# The trace's format, which TensorFlow ships but does not export under `tf`.
from tensorflow.tsl.profiler.protobuf import xplane_pb2

_STEP, _GRADIENTS = "whole_step", "gradients_only"
# TensorFlow's names of the launch and the end of a collective.
_LAUNCH, _DONE = "CollectiveOpV2Kernel::Run", "CollectiveExecutor::ExecuteAsync::Done"


def measure(run_steps, gradients, count, rank):
    """Run `count` steps, each after a forward and backward pass alone; trace worker 0.

    The other workers are not traced: at the end of their trace, TensorFlow 2.21
    sometimes aborts with corrupted memory, in its `SplitEventTracker`.

    Args:
        run_steps: function that takes training steps, each within a context; see
            `step_worker.py`.
        gradients: function that runs only the forward and backward pass of a step.
        count: number of each.
        rank: rank of this worker.

    Returns:
        An empty dictionary on other workers. On worker 0 `collectives_per_step`, and
        medians in milliseconds: `traced_step_ms`; `gradients_ms`; `collective_ms`, from
        the launch of a collective to its end, including the wait for other workers; and
        `outside_ms`, the time of a step without its collective and without the forward
        and backward pass before it.
    """

    @contextlib.contextmanager
    def traced(i):
        with tf.profiler.experimental.Trace(_GRADIENTS, step_num=i):
            gradients()
        with tf.profiler.experimental.Trace(_STEP, step_num=i):
            yield

    with tempfile.TemporaryDirectory() as directory:
        with _trace(directory) if rank == 0 else contextlib.nullcontext():
            run_steps(count, traced)
        return _summary(_events(directory)) if rank == 0 else {}


@contextlib.contextmanager
def _trace(directory):
    with tf.profiler.experimental.Profile(directory):
        yield
        time.sleep(0.1)  # until the last step's events have been recorded


def _events(directory):
    """Return (name, start, end) of all events on the host, in ms, ordered by start."""
    (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    events = []
    for plane in space.planes:
        names = plane.event_metadata
        for line in plane.lines:
            for event in line.events:
                start = line.timestamp_ns / 1e6 + event.offset_ps / 1e9
                end = start + event.duration_ps / 1e9
                events.append((names[event.metadata_id].name, start, end))
    return sorted(events, key=lambda event: event[1])


def _summary(events):
    gradients, steps, collectives, counts = [], [], [], []
    for name, first, last in events:
        if name == _GRADIENTS:
            gradients.append(last - first)
        if name == _STEP:
            within = [event for event in events if first <= event[1] <= last]
            launches = [start for name, start, _ in within if name == _LAUNCH]
            ends = [start for name, start, _ in within if name == _DONE]
            counts.append(len(launches))
            steps.append(last - first)
            collectives.append(_time_with_collective(launches, ends))
    # Each step with the pass before it: other programs slow both down alike.
    triples = zip(steps, collectives, gradients, strict=True)
    outside = [
        step - collective - gradients_alone
        for step, collective, gradients_alone in triples
    ]
    return {
        "collectives_per_step": statistics.mean(counts),
        "traced_step_ms": statistics.median(steps),
        "gradients_ms": statistics.median(gradients),
        "collective_ms": statistics.median(collectives),
        "outside_ms": statistics.median(outside),
    }


def _time_with_collective(launches, ends):
    """Return the time during which at least one collective was running."""
    changes = sorted([(t, 1) for t in launches] + [(t, -1) for t in ends])
    num_running, total, last = 0, 0.0, 0.0
    for now, change in changes:
        if num_running > 0:
            total += now - last
        num_running += change
        last = now
    return total

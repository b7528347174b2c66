"""Where the time of a step goes, from TensorFlow's own trace of executed operations."""

import contextlib
import pathlib
import statistics
import tempfile
import time

import tensorflow as tf

# The trace's format, which TensorFlow ships but does not export under `tf`.
from tensorflow.tsl.profiler.protobuf import xplane_pb2

_STEP, _GRADIENTS = "whole_step", "gradients_only"
# What TensorFlow calls the launch and the end of any collective.
_LAUNCH, _DONE = "CollectiveOpV2Kernel::Run", "CollectiveExecutor::ExecuteAsync::Done"


def measure(run_steps, gradients, count, rank):
    """Run `count` steps, each after a forward and backward pass alone; trace worker 0.

    Worker 0 alone: at the end of a trace of any other worker, TensorFlow 2.21 now and
    then aborts with corrupted memory, in its `SplitEventTracker`.

    Args:
        run_steps: does training steps, each within a context; see `step_worker.py`.
        gradients: does the forward and backward pass of a step only.
        count: how many of each.
        rank: of this worker.

    Returns:
        Nothing (an empty dictionary) on other workers. `collectives_per_step`, and
        medians in milliseconds: `traced_step_ms`, `gradients_ms`, `collective_ms` (from
        the launch of a collective to its end, waiting for the other workers included)
        and `outside_ms`, what remains of a step without its collective and without the
        forward and backward pass before it.
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
    """Return (name, start, end) of all events on the host, in ms, by their start."""
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
            collectives.append(_covered(launches, ends))
    # Of neighbours in time: other programs slow both down alike.
    triples = zip(steps, collectives, gradients, strict=True)
    outside = [step - collective - alone for step, collective, alone in triples]
    return {
        "collectives_per_step": statistics.mean(counts),
        "traced_step_ms": statistics.median(steps),
        "gradients_ms": statistics.median(gradients),
        "collective_ms": statistics.median(collectives),
        "outside_ms": statistics.median(outside),
    }


def _covered(launches, ends):
    """Return for how long at least one collective was under way."""
    changes = sorted([(t, 1) for t in launches] + [(t, -1) for t in ends])
    running, covered, since = 0, 0.0, 0.0
    for now, change in changes:
        if running > 0:
            covered += now - since
        running, since = running + change, now
    return covered

"""What `methods.py` measures of one method, each in a process of its own."""

import dataclasses
import math
import statistics
import time

import numpy as np
import tensorflow as tf

from common import parts, processes
from common.floors import Floors
from tf_dgc import compressors

NAMES = ["sgd", *sorted(compressors.METHODS), "dgc"]
WITH_ADAM = ["adamw", "dgc_adamw"]

_SLOW = 5_000.0  # ms: of a function this slow, one call is enough


@dataclasses.dataclass(frozen=True)
class Case:
    """What to measure.

    Attributes:
        method: its name, "dgc", "dgc_adamw", or one of `parts.ALONE`.
        shapes: a name of `parts.SHAPES`.
        threads: of TensorFlow's pools and of the floors.
        seconds: after which turns end.
        rounds: turns that there are at least, if no part is slow.
    """

    method: str
    shapes: str
    threads: int
    seconds: float
    rounds: int


def times(case):
    """Return a row of milliseconds: medians of parts that took turns.

    A part may come out below 0, as it is a difference, within each turn.
    """
    method, grads = _prepare(case, case.shapes)
    timed = {"step": method.step()}
    if case.method not in parts.ALONE:
        timed["step_2"] = method.step_of(2)
        timed["compress"] = method.compress()
        timed |= {f"sum_{n}": method.sum(n) for n in parts.WORKERS}
    summary = {
        "method": case.method,
        "shapes": case.shapes,
        "threads": case.threads,
        "variables": len(method.sizes),
        "parameters": sum(method.sizes),
    }
    # State is as in training: what is kept has been filled, a learning phase is over.
    first = [timed["step"](grads[i]) for i in range(2)]
    if case.method not in parts.ALONE:
        stats = method.optimizer.stats
        summary["bytes_per_step"] = stats.bytes_per_step
        summary["requests"] = timed["compress"].requests
    parts_of_a_floor = floors(case.method, method, case.threads)
    timed |= {f"floor_{part}": loop for part, loop in parts_of_a_floor.items()}
    found = _by_turns(case, timed, grads, {"step": first[1:]})
    summary["step_p90_ms"] = float(np.percentile(found["step"], 90))
    summary["turns"] = len(found["step"])
    return {**summary, **_row(found)}


def memory(case):
    """Return what steps 3 to 5 take with two workers' payloads, in gradients' sizes.

    `extra` is the peak less what is there after `build` and tracing, and without the
    buffers that were gathered, which are `gathered`. A small model was trained before,
    so that what TensorFlow needs for itself does not count.
    """
    twin, grads = _prepare(case, "tiny")
    step = twin.step_of(2)
    for i in range(3):
        step(grads[i % len(grads)])
    method, grads = _prepare(case, case.shapes)
    step = method.step_of(2)
    before = processes.resident()
    for i in range(5):
        if i == 2:
            processes.forget_peak()
        step(grads[i % len(grads)])
    size = 4 * sum(method.sizes)
    extra = processes.peak() - before - step.gathered
    return {"extra_memory": extra / size, "gathered_memory": step.gathered / size}


def use_threads(threads):
    """Let TensorFlow have so many threads in this process, which has not used it."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def floors(name, method, threads):
    """Return the floor of each part of a method's step, as a function that takes it.

    Args:
        name: of the method.
        method: a `parts.Method`, which has taken a step.
        threads: that run it.
    """
    if name in parts.ALONE:
        alone = Floors(name, method.sizes, 0, True, threads)
        return {"update": alone.function("update")}
    payload = method.optimizer.stats.bytes_per_step
    summed = method.optimizer.compressor.aggregation == "sum"
    known = Floors(name, method.sizes, payload, summed, threads)
    return {
        "compress": known.function("compress"),
        "sum_1": known.function("decode", 1),
        "sum_8": known.function("decode", 8),
        "update": known.function("update"),
    }


def _prepare(case, shapes):
    use_threads(case.threads)
    made = parts.SHAPES[shapes]()
    return parts.Method(case.method, made), parts.gradients(made)


def _by_turns(case, timed, grads, found):
    """Return the times of everything, each turn with the next gradients."""
    start, turn = time.perf_counter(), 0
    processor = []
    for name, function in timed.items():
        spent = _call(function, grads[0])
        if spent > _SLOW:  # or was it only being traced?
            spent = _call(function, grads[0])
        if name not in found:
            found[name] = [spent]
    slow = max(map(min, found.values())) > _SLOW
    while not slow:
        for name, function in timed.items():
            before = time.process_time()
            spent = _call(function, grads[turn % len(grads)])
            if name == "step":
                processor.append(1000 * (time.process_time() - before))
            # The first calls found nothing in place.
            found[name] = [*found[name], spent] if turn else [spent]
        turn += 1
        if turn >= case.rounds and time.perf_counter() - start > case.seconds:
            break
    return found | {"step_processor": processor[1:] or processor or [math.nan]}


def _call(function, grads):
    if isinstance(function, parts.Traced):
        return function(grads)
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def _row(found):
    medians = {name: statistics.median(spent) for name, spent in found.items()}

    def beyond(more, less):
        # Of neighbours in time: other programs slow both down alike.
        pairs = zip(found[more], found[less], strict=True)
        return statistics.median(a - b for a, b in pairs)

    row = {"step_ms": medians["step"], "step_floor_ms": medians["floor_update"]}
    row["step_processor_ms"] = medians["step_processor"]
    if "compress" in medians:
        row |= {
            "step_2_ms": medians["step_2"],
            "compress_ms": medians["compress"],
            "compress_floor_ms": medians["floor_compress"],
            "decode_2_ms": beyond("sum_2", "compress"),
            "decode_8_ms": beyond("sum_8", "compress"),
            "decode_8_floor_ms": medians["floor_sum_8"],
            "update_ms": beyond("step", "sum_1"),
        }
        row["step_floor_ms"] += medians["floor_compress"] + medians["floor_sum_1"]
        row["compress_ratio"] = _ratio(row["compress_ms"], row["compress_floor_ms"])
        row["decode_8_ratio"] = _ratio(row["decode_8_ms"], row["decode_8_floor_ms"])
    row["step_ratio"] = row["step_ms"] / row["step_floor_ms"]
    return row


def _ratio(time_ms, floor_ms):
    """Return how many times the floor; None if nothing has to be read or written."""
    return time_ms / floor_ms if floor_ms > 0.1 else None

"""Measurements of `methods.py` for one method, each in a process of its own."""

import dataclasses
import math
import statistics
import time

import numpy as np
import tensorflow as tf

from common import method_parts, processes
from common.floors import Floors
from tf_dgc import compressors

NAMES = ["sgd", *sorted(compressors.METHODS), "dgc"]
WITH_ADAM = ["adamw", "dgc_adamw"]

_SLOW = 5_000.0  # ms from which one call of a function is enough


@dataclasses.dataclass(frozen=True)
class Case:
    """A method and its settings.

    Attributes:
        method: name of a method, "dgc", "dgc_adamw", or one of `method_parts.ALONE`.
        shapes: a name of `method_parts.SHAPES`.
        threads: threads of TensorFlow's pools and of the floors.
        seconds: seconds after which turns end.
        rounds: least number of turns, if no part is slow.
    """

    method: str
    shapes: str
    threads: int
    seconds: float
    rounds: int


def measure_times(case):
    """Return a row of milliseconds: medians of parts that take turns.

    A part is a difference within each turn, and so may be below 0.
    """
    method, gradient_sets = _prepare(case, case.shapes)
    functions = {"step": method.step()}
    if case.method not in method_parts.ALONE:
        functions["step_2"] = method.step_of(2)
        functions["compress"] = method.compress()
        functions |= {f"sum_{n}": method.sum(n) for n in method_parts.WORKERS}
    summary = {
        "method": case.method,
        "shapes": case.shapes,
        "threads": case.threads,
        "variables": len(method.sizes),
        "parameters": sum(method.sizes),
    }
    # Two steps fill the residual and end a learning phase, as in training.
    first_ms = [functions["step"](gradient_sets[i]) for i in range(2)]
    if case.method not in method_parts.ALONE:
        stats = method.optimizer.stats
        summary["bytes_per_step"] = stats.bytes_per_step
        summary["requests"] = functions["compress"].requests
    loops = floors(case.method, method, case.threads)
    functions |= {f"floor_{part}": loop for part, loop in loops.items()}
    times = _take_turns(case, functions, gradient_sets, {"step": first_ms[1:]})
    summary["step_p90_ms"] = float(np.percentile(times["step"], 90))
    summary["turns"] = len(times["step"])
    return {**summary, **_row(times)}


def measure_memory(case):
    """Return the memory of steps 3 to 5 with two workers, in sizes of the gradients.

    `extra_memory` is the peak, without the memory after `build` and tracing and without
    the gathered buffers, which are `gathered_memory`. A small model is trained first,
    so that memory of TensorFlow itself does not count.
    """
    small_method, gradient_sets = _prepare(case, "tiny")
    step = small_method.step_of(2)
    for i in range(3):
        step(gradient_sets[i % len(gradient_sets)])
    method, gradient_sets = _prepare(case, case.shapes)
    step = method.step_of(2)
    before = processes.resident()
    for i in range(5):
        if i == 2:
            processes.forget_peak()
        step(gradient_sets[i % len(gradient_sets)])
    size = 4 * sum(method.sizes)
    extra = processes.peak() - before - step.gathered
    return {"extra_memory": extra / size, "gathered_memory": step.gathered / size}


def use_threads(threads):
    """Set TensorFlow's number of threads, before its first use in this process."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def floors(name, method, threads):
    """Return the floor of each part of a method's step, as a function to time.

    Args:
        name: name of the method.
        method: a `method_parts.Method`, which has taken a step.
        threads: number of threads.
    """
    if name in method_parts.ALONE:
        alone = Floors(name, method.sizes, 0, True, threads)
        return {"update": alone.function("update")}
    payload = method.optimizer.stats.bytes_per_step
    summed = method.optimizer.compressor.aggregation == "sum"
    all_parts = Floors(name, method.sizes, payload, summed, threads)
    return {
        "compress": all_parts.function("compress"),
        "sum_1": all_parts.function("decode", 1),
        "sum_8": all_parts.function("decode", 8),
        "update": all_parts.function("update"),
    }


def _prepare(case, shapes_name):
    use_threads(case.threads)
    shapes = method_parts.SHAPES[shapes_name]()
    return method_parts.Method(case.method, shapes), method_parts.gradients(shapes)


def _take_turns(case, functions, gradient_sets, first_times):
    """Return the milliseconds of all functions, each turn with the next gradients.

    Args:
        case: a `Case`.
        functions: functions to time, by name.
        gradient_sets: lists of gradients.
        first_times: times of functions that have been called before, by name.
    """
    start, turn = time.perf_counter(), 0
    times = dict(first_times)
    processor_ms = []
    for name, function in functions.items():
        ms = _call(function, gradient_sets[0])
        if ms > _SLOW:  # perhaps because of tracing
            ms = _call(function, gradient_sets[0])
        if name not in times:
            times[name] = [ms]
    slow = max(map(min, times.values())) > _SLOW
    while not slow:
        for name, function in functions.items():
            before = time.process_time()
            ms = _call(function, gradient_sets[turn % len(gradient_sets)])
            if name == "step":
                processor_ms.append(1000 * (time.process_time() - before))
            # Caches were cold in the first calls.
            times[name] = [*times[name], ms] if turn else [ms]
        turn += 1
        if turn >= case.rounds and time.perf_counter() - start > case.seconds:
            break
    return times | {"step_processor": processor_ms[1:] or processor_ms or [math.nan]}


def _call(function, gradients):
    """Call a function; return its milliseconds."""
    if isinstance(function, method_parts.Traced):
        return function(gradients)
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def _row(times):
    medians = {name: statistics.median(ms) for name, ms in times.items()}

    def difference(longer, shorter):
        # Pairs within a turn: other programs slow both calls down alike.
        pairs = zip(times[longer], times[shorter], strict=True)
        return statistics.median(a - b for a, b in pairs)

    row = {"step_ms": medians["step"], "step_floor_ms": medians["floor_update"]}
    row["step_processor_ms"] = medians["step_processor"]
    if "compress" in medians:
        row |= {
            "step_2_ms": medians["step_2"],
            "compress_ms": medians["compress"],
            "compress_floor_ms": medians["floor_compress"],
            "decode_2_ms": difference("sum_2", "compress"),
            "decode_8_ms": difference("sum_8", "compress"),
            "decode_8_floor_ms": medians["floor_sum_8"],
            "update_ms": difference("step", "sum_1"),
        }
        row["step_floor_ms"] += medians["floor_compress"] + medians["floor_sum_1"]
        row["compress_ratio"] = _ratio(row["compress_ms"], row["compress_floor_ms"])
        row["decode_8_ratio"] = _ratio(row["decode_8_ms"], row["decode_8_floor_ms"])
    row["step_ratio"] = row["step_ms"] / row["step_floor_ms"]
    return row


def _ratio(time_ms, floor_ms):
    """Return the ratio to the floor; None if there is nothing to read or write."""
    return time_ms / floor_ms if floor_ms > 0.1 else None

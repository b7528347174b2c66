"""Butterfly: every worker exchanges with partners at distances of powers of two."""

from collections.abc import Generator

import keras
import tensorflow as tf

from tf_dgc.collectives.algorithm import (
    AlgorithmSteps,
    CollectiveAlgorithm,
    Cost,
    Rank,
    first_dimension,
    send_to,
    zero_rows,
)
from tf_dgc.collectives.requests import Primitive, SendRecv


@keras.saving.register_keras_serializable(package="tf_dgc")
class Butterfly(CollectiveAlgorithm):
    """Sums by recursive halving and doubling, gathers by recursive doubling.

    To sum, partners exchange halves of their vectors and add them, until each worker
    has one part of the sum; then the parts are put together again. That takes 2 log2 N
    rounds and as many bytes as a ring. If N is no power of two, each worker beyond the
    largest power sends its values to a helper first and receives the result at the end.
    """

    name = "butterfly"
    reference = "Rabenseifner, ICCS 2004, section 4"

    def sum(self, values: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Halve, then double; helped workers take part before and after."""
        helper = rank.helper
        total = values
        if helper is not None:
            (received,) = yield [send_to(total, *helper)]
            total = total if _is_helped(rank) else total + received
        else:
            yield []
        size = first_dimension(values)
        if _is_helped(rank):
            yield from _sit_out(2 * rank.bits)
        else:
            padded = tf.pad(total, [[0, -size % 2**rank.bits]])
            part = yield from _halve(padded, rank)
            total = (yield from _double(part, rank))[:size]
        if helper is None:
            yield []
            return total
        (total,) = yield [send_to(total, *helper[::-1])]
        return total

    def gather(self, words: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Double the number of rows in each round.

        If N is no power of two, every worker that is not helped starts with two rows;
        the second is used only if it helps another.
        """
        helper, rows = rank.helper, words[tf.newaxis]
        if helper is not None:
            (received,) = yield [send_to(rows, *helper)]
        else:
            received = rows  # not used
            yield []
        if _is_helped(rank):
            yield from _sit_out(rank.bits)
            rows = zero_rows(rows, rank.num_workers)
        else:
            if rank.num_workers > 2**rank.bits:
                rows = tf.concat([rows, received], axis=0)
            rows = yield from _double(rows, rank)
            rows = tf.gather(rows, _row_indices(rank.num_workers))
        if helper is None:
            yield []
            return rows
        (rows,) = yield [send_to(rows, *helper[::-1])]
        return rows

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of a worker that helps another, if there is one."""
        bits = num_workers.bit_length() - 1
        core = 2**bits
        total = 2 * num_bytes * (core - 1) / core
        if core == num_workers:
            return Cost(2 * bits, total, total, total)
        with_helped = total + num_bytes
        path = with_helped + num_bytes
        return Cost(2 * bits + 2, with_helped, with_helped, path)

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of a worker that helps another, if there is one."""
        bits = num_workers.bit_length() - 1
        core = 2**bits
        total = (core - 1) * num_bytes
        if core == num_workers:
            return Cost(bits, total, total, total)
        sent = 2 * total + num_workers * num_bytes
        return Cost(bits + 2, sent, 2 * total + num_bytes, sent + num_bytes)


def _is_helped(rank: Rank) -> bool:
    return rank.worker >= 2**rank.bits


def _sit_out(rounds: int) -> Generator[list[Primitive], list[tf.Tensor], None]:
    for _ in range(rounds):
        yield []


def _halve(values: tf.Tensor, rank: Rank) -> AlgorithmSteps:
    """Return this worker's part of the sum; parts are in the order of workers."""
    for bit in reversed(range(rank.bits)):
        lower, upper = tf.split(values, 2)
        keeps_upper = rank.worker >> bit & 1
        mine, other = (upper, lower) if keeps_upper else (lower, upper)
        (received,) = yield [SendRecv(other, rank.worker ^ 1 << bit)]
        values = mine + received
    return values


def _double(values: tf.Tensor, rank: Rank) -> AlgorithmSteps:
    """Return the concatenated parts of all workers below the power of two."""
    for bit in range(rank.bits):
        (received,) = yield [SendRecv(values, rank.worker ^ 1 << bit)]
        is_upper = rank.worker >> bit & 1
        pair = [received, values] if is_upper else [values, received]
        values = tf.concat(pair, axis=0)
    return values


def _row_indices(num_workers: int) -> list[int]:
    """Return the index of each worker's row after doubling."""
    core = 2 ** (num_workers.bit_length() - 1)
    if core == num_workers:
        return list(range(num_workers))
    return [2 * w if w < core else 2 * (w - core) + 1 for w in range(num_workers)]

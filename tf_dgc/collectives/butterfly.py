"""Butterfly: every worker swaps with partners at distances of powers of two."""

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
from tf_dgc.collectives.requests import SendRecv


@keras.saving.register_keras_serializable(package="tf_dgc")
class Butterfly(CollectiveAlgorithm):
    """Sums by recursive halving and doubling, and gathers by doubling.

    A sum is first split (partners swap halves of what each holds, and add them up) and
    then put together again, in 2 log2 N rounds that take as many bytes as a ring. If N
    is no power of two, each worker beyond the largest one hands its values to one below
    and gets the result from it.
    """

    name = "butterfly"
    reference = "Rabenseifner, ICCS 2004, section 4"

    def sum(self, values: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Halve, double; the workers beyond a power of two before and after it."""
        helper = place.helper
        total = values
        if helper is not None:
            (received,) = yield [send_to(total, *helper)]
            total = total if _is_helped(place) else total + received
        else:
            yield []
        size = first_dimension(values)
        if _is_helped(place):
            yield from _sit_out(2 * place.bits)
        else:
            part = yield from _halve(_padded(total, 2**place.bits), place)
            total = (yield from _double(part, place))[:size]
        if helper is None:
            yield []
            return total
        (total,) = yield [send_to(total, *helper[::-1])]
        return total

    def gather(self, words: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Double the rows from round to round.

        If some workers hand theirs over first, all of the others carry two rows.
        """
        helper, rows = place.helper, words[tf.newaxis]
        if helper is not None:
            (received,) = yield [send_to(rows, *helper)]
        else:
            received = rows  # not used
            yield []
        if _is_helped(place):
            yield from _sit_out(place.bits)
            rows = zero_rows(rows, place.num_workers)
        else:
            if place.num_workers > 2**place.bits:
                rows = tf.concat([rows, received], axis=0)
            rows = yield from _double(rows, place)
            rows = tf.gather(rows, _order(place.num_workers))
        if helper is None:
            yield []
            return rows
        (rows,) = yield [send_to(rows, *helper[::-1])]
        return rows

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of a worker that helps another one, if there is one."""
        bits = num_workers.bit_length() - 1
        core = 2**bits
        each = 2 * num_bytes * (core - 1) / core
        if core == num_workers:
            return Cost(2 * bits, each, each, each)
        more = each + num_bytes
        return Cost(2 * bits + 2, more, more, more + num_bytes)

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of a worker that helps another one, if there is one."""
        bits = num_workers.bit_length() - 1
        core = 2**bits
        each = (core - 1) * num_bytes
        if core == num_workers:
            return Cost(bits, each, each, each)
        sent = 2 * each + num_workers * num_bytes
        return Cost(bits + 2, sent, 2 * each + num_bytes, sent + num_bytes)


def _is_helped(place: Rank) -> bool:
    return place.worker >= 2**place.bits


def _sit_out(rounds: int) -> AlgorithmSteps:
    for _ in range(rounds):
        yield []
    return None


def _padded(values: tf.Tensor, multiple: int) -> tf.Tensor:
    size = first_dimension(values)
    return tf.pad(values, [[0, -size % multiple]])


def _halve(values: tf.Tensor, place: Rank) -> AlgorithmSteps:
    """Return the sum of the part that belongs to this worker, in the order of them."""
    for bit in reversed(range(place.bits)):
        lower, upper = tf.split(values, 2)
        takes_upper = place.worker >> bit & 1
        keep, give = (upper, lower) if takes_upper else (lower, upper)
        (received,) = yield [SendRecv(give, place.worker ^ 1 << bit)]
        values = keep + received
    return values


def _double(values: tf.Tensor, place: Rank) -> AlgorithmSteps:
    """Return the parts of all workers below the power of two, one behind the other."""
    for bit in range(place.bits):
        (received,) = yield [SendRecv(values, place.worker ^ 1 << bit)]
        is_upper = place.worker >> bit & 1
        pair = [received, values] if is_upper else [values, received]
        values = tf.concat(pair, axis=0)
    return values


def _order(num_workers: int) -> list[int]:
    """Return where each worker's row is after doubling."""
    core = 2 ** (num_workers.bit_length() - 1)
    if core == num_workers:
        return list(range(num_workers))
    return [2 * w if w < core else 2 * (w - core) + 1 for w in range(num_workers)]

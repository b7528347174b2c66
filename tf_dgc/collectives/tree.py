"""Tree: halves hand over to halves, up to one worker and down again."""

import keras
import tensorflow as tf

from tf_dgc.collectives.algorithm import (
    AlgorithmSteps,
    CollectiveAlgorithm,
    Cost,
    Rank,
    send_to,
    zero_rows,
)


@keras.saving.register_keras_serializable(package="tf_dgc")
class Tree(CollectiveAlgorithm):
    """Sums and gathers up a binomial tree to worker 0, and sends the result down.

    In round r, worker w with w mod 2^(r+1) = 2^r hands what it has to worker w - 2^r;
    afterwards the same way back. Few rounds, but worker 0 sends and receives whole
    results: for short messages over slow links.
    """

    name = "tree"
    reference = "Thakur, Rabenseifner and Gropp, IJHPCA 2005, section 4"

    def sum(self, values: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Add up on the way to worker 0."""
        total = values
        for step in range(_depth(place.num_workers)):
            pair = _pair(step, place)
            received = yield [] if pair is None else [send_to(total, *pair)]
            if pair is not None and pair[1] == place.worker:
                total += received[0]
        for step in reversed(range(_depth(place.num_workers))):
            pair = _pair(step, place)
            replies = yield [] if pair is None else [send_to(total, *pair[::-1])]
            if pair is not None:
                (total,) = replies
        return total

    def gather(self, words: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Collect rows on the way to worker 0: each has those of workers behind it.

        Down go those that are missing there.
        """
        rows = words[tf.newaxis]
        for step in range(_depth(place.num_workers)):
            pair = _pair(step, place)
            if pair is None:
                yield []
                continue
            count = _behind(pair[0], step, place)
            mine = rows if pair[0] == place.worker else zero_rows(rows, count)
            (received,) = yield [send_to(mine, *pair)]
            if pair[1] == place.worker:
                rows = tf.concat([rows, received], axis=0)
        for step in reversed(range(_depth(place.num_workers))):
            pair = _pair(step, place)
            if pair is None:
                yield []
                continue
            first, count = pair[0], _behind(pair[0], step, place)
            if place.worker == pair[1]:
                missing = tf.concat([rows[:first], rows[first + count :]], axis=0)
                yield [send_to(missing, *pair[::-1])]
            else:
                missing = zero_rows(rows, place.num_workers - count)
                (others,) = yield [send_to(missing, *pair[::-1])]
                rows = tf.concat([others[:first], rows, others[first:]], axis=0)
        return rows

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of worker 0, which meets log2 N others in either direction."""
        depth = _depth(num_workers)
        each = depth * num_bytes
        return Cost(2 * depth, each, each, 2 * each)

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of worker 0, which sends to each the rows that it lacks."""
        depth = _depth(num_workers)
        lacking = depth * num_workers - (num_workers - 1)
        received = (num_workers - 1) * num_bytes
        sent = lacking * num_bytes
        return Cost(2 * depth, sent, received, received + sent)


def _depth(num_workers: int) -> int:
    return (num_workers - 1).bit_length()


def _pair(step: int, place: Rank) -> tuple[int, int] | None:
    """Return who hands over to whom in a round up, if this worker is one of both."""
    worker, distance = place.worker, 2**step
    behind = worker % (2 * distance)
    if behind == distance:
        return worker, worker - distance
    if behind == 0 and worker + distance < place.num_workers:
        return worker + distance, worker
    return None


def _behind(worker: int, step: int, place: Rank) -> int:
    """Return how many workers' rows one has when it hands them over."""
    return min(2**step, place.num_workers - worker)

"""Tree: sums and gathers to worker 0 along a binomial tree, and back."""

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
    """Sums and gathers up a binomial tree to worker 0, then sends the result down.

    In round r, worker w with w mod 2^(r+1) = 2^r sends what it has to worker w - 2^r;
    the result returns the same way. That takes few rounds, but worker 0 sends and
    receives whole results: for short messages over links of high latency.
    """

    name = "tree"
    reference = "Thakur, Rabenseifner and Gropp, IJHPCA 2005, section 4"

    def sum(self, values: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Add up on the way to worker 0."""
        total = values
        for step in range(_depth(rank.num_workers)):
            pair = _child_and_parent(step, rank)
            received = yield [] if pair is None else [send_to(total, *pair)]
            if pair is not None and pair[1] == rank.worker:
                total += received[0]
        for step in reversed(range(_depth(rank.num_workers))):
            pair = _child_and_parent(step, rank)
            replies = yield [] if pair is None else [send_to(total, *pair[::-1])]
            if pair is not None:
                (total,) = replies
        return total

    def gather(self, words: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Collect rows on the way to worker 0; send down the rows that are missing."""
        rows = words[tf.newaxis]
        for step in range(_depth(rank.num_workers)):
            pair = _child_and_parent(step, rank)
            if pair is None:
                yield []
                continue
            child, parent = pair
            count = _num_rows(child, step, rank)
            sent = rows if child == rank.worker else zero_rows(rows, count)
            (received,) = yield [send_to(sent, child, parent)]
            if parent == rank.worker:
                rows = tf.concat([rows, received], axis=0)
        for step in reversed(range(_depth(rank.num_workers))):
            pair = _child_and_parent(step, rank)
            if pair is None:
                yield []
                continue
            child, parent = pair
            count = _num_rows(child, step, rank)
            if rank.worker == parent:
                missing = tf.concat([rows[:child], rows[child + count :]], axis=0)
                yield [send_to(missing, parent, child)]
            else:
                missing = zero_rows(rows, rank.num_workers - count)
                (others,) = yield [send_to(missing, parent, child)]
                rows = tf.concat([others[:child], rows, others[child:]], axis=0)
        return rows

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of worker 0, with log2 N partners in each direction."""
        depth = _depth(num_workers)
        total = depth * num_bytes
        return Cost(2 * depth, total, total, 2 * total)

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of worker 0, which sends each partner its missing rows."""
        depth = _depth(num_workers)
        missing_rows = depth * num_workers - (num_workers - 1)
        received = (num_workers - 1) * num_bytes
        sent = missing_rows * num_bytes
        return Cost(2 * depth, sent, received, received + sent)


def _depth(num_workers: int) -> int:
    return (num_workers - 1).bit_length()


def _child_and_parent(step: int, rank: Rank) -> tuple[int, int] | None:
    """Return this worker's pair in a round, the sender on the way up first."""
    worker, distance = rank.worker, 2**step
    offset = worker % (2 * distance)
    if offset == distance:
        return worker, worker - distance
    if offset == 0 and worker + distance < rank.num_workers:
        return worker + distance, worker
    return None


def _num_rows(child: int, step: int, rank: Rank) -> int:
    """Return the number of rows that a child has when it sends them to its parent."""
    return min(2**step, rank.num_workers - child)

"""Neighbor exchange: gathers words from a worker's neighbors in a graph."""

import functools
from typing import Any

import tensorflow as tf

from tf_dgc._internals import tf_collectives
from tf_dgc.collectives.algorithm import Rank
from tf_dgc.collectives.cross_device import compressed_cross_device_ops
from tf_dgc.collectives.gossip import Gossip


def gather_from_neighbors(
    words: tf.Tensor, gossip: Gossip, round_number: tf.Tensor, rank: Rank
) -> tf.Tensor:
    """Gather int32 `[w]` from this worker's neighbors; call it in replica context.

    The rows are in the order of `Gossip.neighbors`. There must be several workers, with
    the same w.
    """
    num_phases = len(gossip.weights(rank.num_workers))

    def gather_all(strategy: Any, words: Any, round_number: Any, worker: Any) -> Any:
        local = strategy.experimental_local_results
        ranks = [Rank(w, rank.num_workers) for w in local(worker)]
        hook = compressed_cross_device_ops(strategy)

        def gather_in_phase(phase: int) -> list[tf.Tensor]:
            pairs = zip(local(words), ranks, strict=True)
            steps = [gossip.gather_near(w, r, phase) for w, r in pairs]
            return hook.run_steps(steps, ranks)

        if num_phases == 1:
            rows = gather_in_phase(0)
        else:
            phase = tf.cast(local(round_number)[0] % num_phases, tf.int32)
            branches = [
                functools.partial(gather_in_phase, p) for p in range(num_phases)
            ]
            rows = tf.switch_case(phase, branches)
        return tf_collectives.per_replica(rows)

    context = tf.distribute.get_replica_context()
    rows = context.merge_call(gather_all, args=(words, round_number, rank.worker))
    return tf.ensure_shape(rows, [None, *words.shape])

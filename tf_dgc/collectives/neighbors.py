"""Near: what replicas gather from their neighbours in a graph, and from nobody else."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc._internals import tf_collectives
from tf_dgc.collectives.algorithm import Rank, run_together
from tf_dgc.collectives.cross_device import CompressedCrossDeviceOps, cross_device_ops
from tf_dgc.collectives.gossip import Gossip


def gather_from_neighbors(
    words: tf.Tensor, gossip: Gossip, number: tf.Tensor, place: Rank
) -> tf.Tensor:
    """Return the words of this worker's neighbours; call it in replica context.

    Args:
        words: words of this worker, int32 `[w]`, w equal on all.
        gossip: graph of the workers, of which there are several.
        number: number of the round, scalar int64.
        place: place of this worker.

    Returns:
        The words, int32 `[neighbours, w]`, in the order of `Gossip.neighbours`.
    """

    def gather_all(strategy: Any, words: Any, number: Any, worker: Any) -> Any:
        local = strategy.experimental_local_results
        places = [Rank(w, place.num_workers) for w in local(worker)]
        hook = cross_device_ops(strategy)
        rows = _in_turn(hook, local(words), gossip, local(number)[0], places)
        return tf_collectives.per_replica(rows)

    context = tf.distribute.get_replica_context()
    rows = context.merge_call(gather_all, args=(words, number, place.worker))
    return tf.ensure_shape(rows, [None, *words.shape])


def _in_turn(
    hook: CompressedCrossDeviceOps,
    words: Sequence[tf.Tensor],
    gossip: Gossip,
    number: tf.Tensor,
    places: Sequence[Rank],
) -> Sequence[tf.Tensor]:
    """Gather by the graph of this round, for all local replicas."""

    def by(phase: int) -> list[tf.Tensor]:
        pairs = zip(words, places, strict=True)
        rounds = [gossip.gather_near(w, p, phase) for w, p in pairs]
        return run_together(rounds, hook.answer_each(places))

    phases = len(gossip.weights(places[0].num_workers))
    if phases == 1:
        return by(0)
    turn = tf.cast(number % phases, tf.int32)
    return tf.switch_case(turn, [functools.partial(by, p) for p in range(phases)])

"""Measuring: the links of workers that are there, and the slowest of them."""

from collections.abc import Sequence

import tensorflow as tf

from tf_dgc.advice.timing import Timed
from tf_dgc.arguments import show
from tf_dgc.distribute import probes
from tf_dgc.distribute.preparation import prepare
from tf_dgc.exchanges import Links
from tf_dgc.optimizers import choosing, probing


def links_of(strategy: tf.distribute.Strategy) -> Links:
    """Return the numbers of the links, as `exchange="auto"` measures them.

    All workers call it.

    Raises:
        ValueError: for a strategy of one worker.
    """
    if strategy.num_replicas_in_sync == 1:
        raise ValueError(
            "`strategy` must have two workers or more, between which there is "
            "something to measure: start them by `tf-dgc run`, or set TF_CONFIG. "
            f"Received: strategy={show(strategy)}"
        )
    return choosing.measure(prepare(strategy))


def slowest(
    timed: Sequence[Timed], strategy: tf.distribute.Strategy | None
) -> list[Timed]:
    """Return the same with the seconds of the worker that takes longest.

    All workers call it; without a strategy there is one.
    """
    if strategy is None:
        return list(timed)
    found = probes.run(strategy, probing.share([t.seconds for t in timed]))
    pairs = zip(timed, found, strict=True)
    return [each._replace(seconds=seconds) for each, seconds in pairs]

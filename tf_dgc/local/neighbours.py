"""Neighbours of a worker in gossip, and what they are to agree about."""

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.compressors import Compressor
from tf_dgc.distribute.worker_variables import PerWorkerVariable
from tf_dgc.exchanges import Exchange, Gossip, Place


class Neighbours:
    """Whom a worker hears in a round, and how much of each it takes.

    Args:
        gossip: graph of the workers.
        place: place of this worker.
        number: number of the round, scalar int64.

    Attributes:
        workers: index of each neighbour, ascending, ints or scalar integer tensors.
        shares: weight of each, scalar float64 tensors.
        step_size: share of the way that a worker goes.
        most: number of neighbours of the worker that has most.
    """

    def __init__(self, gossip: Gossip, place: Place, number: tf.Tensor):
        matrices = gossip.weights(place.num_workers)
        phases = range(len(matrices))
        near = [gossip.neighbours(place, phase) for phase in phases]
        found = np.array(near, np.int64)
        weights = [m[place.worker, f] for m, f in zip(matrices, found, strict=True)]
        turn = number % len(matrices)
        self.shares = tf.unstack(tf.gather(tf.constant(np.array(weights)), turn))
        self.workers: list[Any] = found[0].tolist()
        if len(phases) > 1:
            self.workers = tf.unstack(tf.gather(tf.constant(found), turn))
        self.step_size = 1.0 if gossip.step_size is None else gossip.step_size
        some = [(m > 0).sum(axis=0) - (np.diag(m) > 0) for m in matrices]
        self.most = int(np.max(some))


class Pull(PerWorkerVariable):
    """What draws a worker to its neighbours: a sum of theirs, by weights of a graph.

    It is saved with a checksum of these weights, as another graph cannot go on with it.

    Args:
        shape: shape on one worker, `[n]`, or `[phases, n]`.
        dtype: name of a dtype, float32 or float64.
        name: name of the variable, without slashes.
        gossip: graph of the workers.
    """

    def __init__(self, shape: Any, dtype: str, name: str, gossip: Gossip):
        self._gossip = gossip
        super().__init__(shape, dtype, name, "zero")

    def gather(self, local: bool = False) -> np.ndarray:
        """Return the values of all workers, `[N, ..., n + 1]`, checksums last.

        Args:
            local: whether to return those of this process only, and contact nobody.
        """
        values = super().gather(local)
        widths = [(0, 0)] * (values.ndim - 1) + [(0, 1)]
        return np.pad(values, widths, constant_values=self._checksum())

    def scatter(self, values: np.ndarray) -> None:
        """Restore what `gather` returned, here or on another number of workers.

        Args:
            values: values of all workers, `[N, ..., n + 1]`, N their number then.

        Raises:
            ValueError: for values of another graph of as many workers that differ, and
                as other variables.
        """
        as_many = len(values) == self._strategy.num_replicas_in_sync
        if not as_many:  # begin with nothing
            super().scatter(np.zeros([len(values), *self.shape]))
            return
        if np.ndim(values) < 2:
            super().scatter(values)  # which says so
            return
        kept = values[..., :-1]
        if np.any(kept) and np.any(values[..., -1] != self._checksum()):
            raise ValueError(
                "What compressing workers know of their neighbours belongs to the "
                f"graph they gossip by, and {self.path!r} was saved with another. Load "
                "with the graph it was saved with; or call `optimizer.consensus()` "
                "there on every worker, and save again, before the graph is changed. "
                f"Received: exchange={show(self._gossip)}"
            )
        super().scatter(kept)

    def _checksum(self) -> int:
        matrices = self._gossip.weights(self._strategy.num_replicas_in_sync)
        checksum = zlib.crc32(np.stack(matrices).tobytes())
        return checksum % 2**24  # which float32 holds exactly


def check(
    exchange: Exchange,
    compressor: Compressor,
    error_feedback: bool | None,
    outer: Any,
    num_workers: int,
) -> None:
    """Raise `ValueError` for settings that gossip cannot have.

    Args:
        exchange: exchange of a `LocalOptimizer`.
        compressor: method of it.
        error_feedback: choice of the user.
        outer: outer optimizer that was asked for.
        num_workers: number of workers, N.
    """
    if not isinstance(exchange, Gossip):
        return
    exchange.weights(num_workers)  # of another number of workers they are refused
    if outer is not None:
        raise ValueError(
            "With `Gossip` no worker knows the mean that an outer optimizer would "
            "apply. Pass `outer=None`, also to what passes one by itself, such as "
            f"`diloco`. Received: outer={show(outer)}"
        )
    if compressor.lossless:
        return
    _check_method(compressor, error_feedback)
    if exchange.step_size is None:
        raise ValueError(
            "What is compressed needs a `step_size` of the gossip, in (0, 1], that is "
            "the smaller the less is sent, for example "
            "`Gossip(graph, step_size=0.1)`. Received: step_size=None with "
            f"{compressor!r}"
        )


def _check_method(compressor: Compressor, error_feedback: bool | None) -> None:
    states = compressor.state((64, 64)).values()
    reasons = {
        "needs all workers": compressor.needs_others,
        "keeps a state that neighbours cannot follow": bool(
            any(spec.per_worker for spec in states) or compressor.common_state()
        ),
        "looks at a residual": compressor.reads_residual,
        "is not the sum of what each worker sends": not compressor.additive,
        "errs by more than there is": compressor.error_feedback == "forbidden",
        "forgets": compressor.feedback_decay < 1,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found or error_feedback is False:
        why = found[0] if found else "is asked to go without error feedback"
        raise ValueError(
            "With `Gossip` neighbours follow each worker's weights by what it sends, "
            "and what is not sent is sent later. So a method must be of one tensor at "
            "a time, and have error feedback, as `TopK` and `Uniform8Bit`. Received: "
            f"{compressor!r}, which {why}; error_feedback={show(error_feedback)}"
        )

"""Several workers of one method in one process, without a strategy or an optimizer.

For tests, for comparing methods, and for those who write one. What travels is packed,
sealed and checked as it is between real workers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import rounds, state, validation
from tf_dgc.compressors import get
from tf_dgc.compressors.base import Draw, Request, Sum
from tf_dgc.rounds import Outcome, Tensor


class Simulation:
    """Workers that exchange given gradients by one method.

    >>> simulation = Simulation("top_k", shapes=[(100, 100)], num_workers=4)
    >>> (total,) = simulation.step([[gradient] for gradient in gradients])

    Args:
        compressor: a `Compressor`, or the name of a method.
        shapes: of the tensors; none of them is exempt.
        num_workers: N.
        dtype: float32 or float64.
        error_feedback: as in `CompressedOptimizer`.
        seed: of all random choices.

    Attributes:
        residual: by worker and tensor, what was not sent, NumPy arrays; zeros without
            error feedback.
        sent: by worker and tensor, what was contributed in the last step.
        state: by worker and tensor, the method's own state by name.
        sent_bytes: handed to the collectives by one worker in the last step.
        messages: in the last step, by worker, the collectives that were asked for.
    """

    def __init__(
        self,
        compressor: Any,
        shapes: Sequence[tuple[int, ...]],
        num_workers: int,
        dtype: str = "float32",
        error_feedback: bool | None = None,
        seed: int = 0,
    ):
        self.compressor = get(compressor)
        self.num_workers = num_workers
        self.seed = seed
        self.iteration = 0
        self.sent_bytes = 0
        self.messages: list[list[Request]] = []
        self.sent: list[list[np.ndarray]] = []
        self._keeps_residual = validation.uses_error_feedback(
            self.compressor, error_feedback
        )
        kind = tf.as_dtype(dtype)
        self._tensors = [
            Tensor(f"tensor {i}", tuple(s), kind, False) for i, s in enumerate(shapes)
        ]
        workers = range(num_workers)
        self.residual = [[np.zeros(s, dtype) for s in shapes] for _ in workers]
        self.state = [
            [self._initial(t, i) for i, t in enumerate(self._tensors)] for _ in workers
        ]

    def step(self, gradients: Sequence[Sequence[Any]]) -> list[np.ndarray]:
        """Exchange `gradients[worker][tensor]`; return the sum over workers of each.

        Raises:
            AssertionError: if workers end with different sums.
        """
        corrected = [
            [r + np.asarray(g, r.dtype) for g, r in zip(grads, residual, strict=True)]
            for grads, residual in zip(gradients, self.residual, strict=True)
        ]
        outcomes = self._exchange(corrected)
        self.sent = [self._shaped(o, "sent") for o in outcomes]
        if self._keeps_residual:
            self.residual = [
                [c - s for c, s in zip(have, sent, strict=True)]
                for have, sent in zip(corrected, self.sent, strict=True)
            ]
        self.state = [
            [
                {**old, **_numpy(result.state or {})}
                for old, result in zip(states, outcome.results, strict=True)
            ]
            for states, outcome in zip(self.state, outcomes, strict=True)
        ]
        self.sent_bytes = int(outcomes[0].sent_bytes)
        self.iteration += 1
        first, *others = (self._shaped(o, "sum") for o in outcomes)
        for other in others:
            for a, b in zip(first, other, strict=True):
                np.testing.assert_array_equal(a, b, "workers have different sums")
        return first

    def _exchange(self, values: list[list[np.ndarray]]) -> list[Outcome]:
        step = tf.constant(self.iteration, tf.int64)
        merged = []
        for worker, (have, states) in enumerate(zip(values, self.state, strict=True)):
            draws = [
                Draw(self.seed, step, i, worker) for i in range(len(self._tensors))
            ]
            flat = [tf.constant(v.reshape(-1)) for v in have]
            tensors = [
                {name: tf.constant(value) for name, value in s.items()} for s in states
            ]
            parts = rounds.start(self.compressor, self._tensors, flat, tensors, draws)
            merged.append(rounds.merge(parts, tf.constant(True)))
        self.messages = [[] for _ in merged]
        return self._drive(merged)

    def _drive(self, merged: list[rounds.Rounds]) -> list[Outcome]:
        """Run all workers in lockstep and do their collectives."""
        outcomes: list[Outcome] = []
        replies: list[Any] = [None] * len(merged)
        while not outcomes:
            asked = []
            for worker, reply in zip(merged, replies, strict=True):
                try:
                    asked.append(worker.send(reply))
                except StopIteration as end:
                    outcomes.append(end.value)
            if asked and outcomes:
                raise ValueError("Some workers ask for more rounds than others.")
            for messages, new in zip(self.messages, asked, strict=False):
                messages.extend(new)
            answers = [_collective(m) for m in zip(*asked, strict=True)]
            replies = [answers] * len(merged)
        return outcomes

    def _initial(self, tensor: Tensor, index: int) -> dict[str, np.ndarray]:
        specs = self.compressor.state(tensor.shape)
        return {
            name: state.initial_value(spec, index).astype(tensor.dtype.name)
            for name, spec in specs.items()
        }

    def _shaped(self, outcome: Outcome, what: str) -> list[np.ndarray]:
        return [
            getattr(result, what).numpy().reshape(tensor.shape)
            for result, tensor in zip(outcome.results, self._tensors, strict=True)
        ]


def _collective(messages: Sequence[Request]) -> tf.Tensor:
    """Do one collective of all workers' requests."""
    if all(isinstance(m, Sum) for m in messages):
        total = messages[0][0]
        for message in messages[1:]:
            total = total + message[0]
        return total
    return tf.stack([m[0] for m in messages])


def _numpy(tensors: dict[str, tf.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}

"""Several workers of one method in one process, without a strategy or an optimizer.

For tests, for comparing methods, and for those who write one. What travels is packed,
sealed and checked as it is between real workers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.arguments import check_whole
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives.requests import Message, whole
from tf_dgc.compressors import get
from tf_dgc.compressors.base import StateSpec
from tf_dgc.compressors.draws import Draw, draw_ties
from tf_dgc.optimizers import validation
from tf_dgc.steps import composed, memory
from tf_dgc.testing.communicator import run_all


class Simulation:
    """Workers that exchange given gradients by one method.

    >>> simulation = Simulation("top_k", shapes=[(100, 100)], num_workers=4)
    >>> (total,) = simulation.step([[gradient] for gradient in gradients])

    Args:
        compressor: method, a `Compressor`, or its name.
        shapes: shapes of the tensors; none of them is exempt.
        num_workers: number of workers, N, 1 or more.
        dtype: name of the gradients' dtype, float32 or float64.
        error_feedback: whether what is not sent is kept, as in `CompressedOptimizer`.
        seed: seed of all random choices.
        compiled: whether to make a graph of a step: slow at first, then several times
            as fast.

    Attributes:
        residual: NumPy arrays of what was not sent, by worker and tensor; zeros without
            error feedback.
        sent: NumPy arrays of what was contributed in the last step, by worker and
            tensor.
        state: values of the method's own state by name, by worker and tensor.
        common: values of its state that is of all tensors by name, by worker.
        sent_bytes: number of bytes that one worker handed to the collectives in the
            last step.
        messages: requests of the last step, by worker; none if steps are compiled.
    """

    def __init__(
        self,
        compressor: Any,
        shapes: Sequence[tuple[int, ...]],
        num_workers: int,
        dtype: str = "float32",
        error_feedback: bool | None = None,
        seed: int = 0,
        compiled: bool = False,
    ):
        self.compressor = get(compressor)
        self.num_workers = check_whole("num_workers", num_workers)
        self.seed = seed
        self.iteration = 0
        self.sent_bytes = 0
        self.messages: list[list[Message]] = []
        self.sent: list[list[np.ndarray]] = []
        self._run = tf.function(self._exchange) if compiled else self._exchange
        self._keeps_residual = validation.uses_error_feedback(
            self.compressor, error_feedback
        )
        kind = tf.as_dtype(dtype)
        self._tensors = [
            Tensor(f"tensor {i}", tuple(s), kind, False) for i, s in enumerate(shapes)
        ]
        workers = range(self.num_workers)
        self.residual = [[np.zeros(s, dtype) for s in shapes] for _ in workers]
        self.state = [
            [
                _initial(self.compressor.state(t.shape), t.dtype, i)
                for i, t in enumerate(self._tensors)
            ]
            for _ in workers
        ]
        self.common = [
            _initial(self.compressor.common_state(), kind, 0) for _ in workers
        ]

    def step(self, gradients: Sequence[Sequence[Any]]) -> list[np.ndarray]:
        """Exchange `gradients[worker][tensor]`; return the sum over workers of each.

        Raises:
            AssertionError: if workers end with different sums.
        """
        decay = self.compressor.feedback_decay
        corrected = [
            [
                decay * r + np.asarray(g, r.dtype)
                for g, r in zip(grads, residual, strict=True)
            ]
            for grads, residual in zip(gradients, self.residual, strict=True)
        ]
        step = tf.constant(self.iteration, tf.int64)
        sums, sent, states, common, sent_bytes = self._run(
            corrected, self.state, self.common, self.residual, step
        )
        self.sent = [self._shaped(worker) for worker in sent]
        if self._keeps_residual:
            self.residual = [
                [c - s for c, s in zip(have, gone, strict=True)]
                for have, gone in zip(corrected, self.sent, strict=True)
            ]
        self.state, self.common = tf.nest.map_structure(
            lambda value: value.numpy(), (states, common)
        )
        self.sent_bytes = int(sent_bytes)
        self.iteration += 1
        first, *others = map(self._shaped, sums)
        for other in others:
            for a, b in zip(first, other, strict=True):
                np.testing.assert_array_equal(a, b, "workers have different sums")
        return first

    def _exchange(
        self, values: list, states: list, common: list, residual: list, step: tf.Tensor
    ) -> tuple:
        """Return sums, what was sent, new states and `common`, and bytes sent."""
        merged = []
        ties = draw_ties(self.seed, step, len(self._tensors))
        for worker, (have, known) in enumerate(zip(values, states, strict=True)):
            draws = [
                Draw(self.seed, step, i, worker, ties, num_workers=self.num_workers)
                for i in range(len(self._tensors))
            ]
            flat = [tf.reshape(v, [-1]) for v in have]
            held, all_at_once = tf.nest.map_structure(
                tf.convert_to_tensor, (known, common[worker])
            )
            if self.compressor.reads_residual:
                kept = map(tf.convert_to_tensor, residual[worker])
                held = [{**s, "residual": r} for s, r in zip(held, kept, strict=True)]
            finite = tf.constant(True)
            merged.append(
                composed.run_exchanges(
                    self.compressor,
                    self._tensors,
                    flat,
                    held,
                    all_at_once,
                    draws,
                    finite,
                )
            )
        messages: list[list[Message]] = [[] for _ in merged]
        ended = run_all(merged, messages)
        self.messages = messages if tf.executing_eagerly() else []
        outcomes = [outcome for outcome, _ in ended]
        return (
            [[whole(r.sum) for r in o.results] for o in outcomes],
            [[whole(r.sent) for r in o.results] for o in outcomes],
            [
                [
                    {**old, **(r.state or {})}
                    for old, r in zip(s, o.results, strict=True)
                ]
                for s, o in zip(states, outcomes, strict=True)
            ],
            [new for _, new in ended],
            tf.convert_to_tensor(outcomes[0].sent_bytes),
        )

    def _shaped(self, values: Sequence[tf.Tensor]) -> list[np.ndarray]:
        return [
            value.numpy().reshape(tensor.shape)
            for value, tensor in zip(values, self._tensors, strict=True)
        ]


def _initial(
    specs: dict[str, StateSpec], dtype: tf.DType, seed: int
) -> dict[str, np.ndarray]:
    return {
        name: memory.initial_value(spec, seed).astype(dtype.name)
        for name, spec in specs.items()
    }

"""Training: what Keras's training loops exchange, beside gradients.

Logs, the question for batches, stopping, moving statistics. May import `cluster`.
"""

__all__ = [
    "agreed",
    "iterators",
    "lengths",
    "loops",
    "statistics",
    "stopping",
]

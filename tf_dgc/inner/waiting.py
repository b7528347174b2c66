"""Waiting takes the place of momentum, where gradients are divided before they wait.

A momentum of coefficient b delays gradients by b / (1 - b) steps on average. What is
not sent at once is delayed too: where one entry in n is sent, by n - 1 steps. Both
average gradients, and both together are too late. Mitliagkas et al., "Asynchrony begets
momentum", 2016, found that of asynchronous workers.
"""


def momentum_beside(beta: float, wait: float) -> float:
    """Return the momentum by which all is as late as by one of `beta` without waiting.

    Args:
        beta: coefficient of the momentum, in [0, 1).
        wait: steps that an entry waits for on average.

    Returns:
        Coefficient in [0, beta]; 0 if waiting alone is as late.
    """
    left = max(0.0, beta / (1.0 - beta) - wait)
    return left / (1.0 + left)

"""Step implementations: from a worker's gradients to the sum over all workers."""

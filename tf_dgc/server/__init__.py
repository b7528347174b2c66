"""A parameter server, and the optimizer of workers that push to it."""

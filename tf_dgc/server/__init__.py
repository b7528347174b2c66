"""The parameter server and the optimizer whose workers push to it."""

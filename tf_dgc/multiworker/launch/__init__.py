"""Starts worker processes, here or by ssh. Loads no TensorFlow."""

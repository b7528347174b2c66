"""Starts worker processes, here or by ssh. Does not import TensorFlow."""

"""Keras 3 training on several workers: start, watch, train, save, restart.

Nothing here is about compression.
"""

"""Batches: inputs that a model takes, made up where none are given."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def make(model: keras.Model, batch_size: int, seed: int = 0) -> Any:
    """Return made-up inputs: normal numbers, and for integers any that are valid.

    Args:
        model: model whose inputs are known, as those of a functional one are.
        batch_size: number of examples.
        seed: seed of the numbers.

    Returns:
        Tensors of the structure of the model's inputs.

    Raises:
        ValueError: if the model does not say what it takes.
    """
    inputs = _inputs(model)
    if inputs is None:
        raise ValueError(
            "A step is timed with inputs of the model's shapes, and this one does not "
            "say them: pass a batch of yours as `data`, or a functional model. "
            f"Received: model={model!r}"
        )
    random = np.random.default_rng(seed)
    vocabulary = _vocabulary(model)

    def values(tensor: Any) -> tf.Tensor:
        shape = [batch_size, *tensor.shape[1:]]
        if None in shape:
            raise ValueError(
                f"The input {tensor.name!r} has axes of any length: pass a batch of "
                f"yours as `data`. Received: shape={tuple(tensor.shape)}"
            )
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if "int" in dtype:
            return tf.constant(random.integers(0, vocabulary, shape), dtype)
        return tf.cast(tf.constant(random.normal(size=shape), tf.float32), dtype)

    return keras.tree.map_structure(values, inputs)


def _inputs(model: keras.Model) -> Any:
    """Return what a model says that it takes, in the structure of it; None if not."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0] if model.built and model.inputs else None
    return getattr(model, "input", None)


def _vocabulary(model: keras.Model) -> int:
    """Return how many integers all embeddings of a model know; 2 without any."""
    known = [
        x.input_dim for x in _parts(model) if isinstance(x, keras.layers.Embedding)
    ]
    return min(known, default=2)


def _parts(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Yield a layer and all that are within it."""
    yield layer
    for part in getattr(layer, "layers", ()):
        yield from _parts(part)

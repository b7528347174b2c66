"""Batches: inputs that a model takes, made up where none are given."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.arguments import check_whole, show

_WORDS = 32  # of a text


def make(
    model: keras.Model, batch_size: int, length: int | None = None, seed: int = 0
) -> Any:
    """Return made-up inputs: normal numbers, valid integers, and texts of known words.

    Args:
        model: model whose inputs are known, as those of a functional one are.
        batch_size: number of examples.
        length: length of axes that may have any, and number of words of a text; None
            if there are no such axes, and for 32 words.
        seed: seed of the numbers.

    Returns:
        Tensors of the structure of the model's inputs.

    Raises:
        ValueError: if the model does not say what it takes, or has axes of any length
            without `length`.
    """
    if length is not None:
        length = check_whole("length", length)
    inputs = _inputs(model)
    if inputs is None:
        raise ValueError(
            "A step is timed with inputs of the model's shapes, and this one does not "
            "say them: pass a batch of yours as `data`, or a functional model. "
            f"Received: model={show(model)}"
        )
    random = np.random.default_rng(seed)
    vocabulary = _vocabulary(model)
    words, number = _words(model), _words_of_a_text(model, length)

    def values(tensor: Any) -> tf.Tensor:
        sizes = [length if size is None else size for size in tensor.shape[1:]]
        if None in sizes:
            raise ValueError(
                f"The input {tensor.name!r} has axes of any length: say of which by "
                "`length` (`--length N`), or pass a batch of yours as `data`. "
                f"Received: shape={tuple(tensor.shape)}"
            )
        shape: Any = [batch_size, *sizes]
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if dtype == "string":
            texts = random.choice(words, [*shape, number]).reshape(-1, number)
            return tf.reshape(tf.constant([" ".join(t) for t in texts]), shape)
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


def _words(model: keras.Model) -> list[str]:
    """Return words that all layers for texts know; some if there are none."""
    known = [
        set(map(str, x.get_vocabulary(include_special_tokens=False)))
        for x in _parts(model)
        if isinstance(x, keras.layers.TextVectorization | keras.layers.StringLookup)
    ]
    common = set.intersection(*known) if known else set()
    return sorted(common) or [f"word{i}" for i in range(100)]


def _words_of_a_text(model: keras.Model, length: int | None) -> int:
    texts = any(isinstance(x, keras.layers.TextVectorization) for x in _parts(model))
    return (length or _WORDS) if texts else 1


def _parts(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Yield a layer and all that are within it."""
    yield layer
    for part in getattr(layer, "layers", ()):
        yield from _parts(part)

"""The two optimizers of local steps, made ready for what they are given."""

from typing import Any

import keras

from tf_dgc._internals import ages, keras_files, keras_optimizers
from tf_dgc._internals.optimizer_copies import copy_optimizer
from tf_dgc.adaptive import unsuited
from tf_dgc.compressors import Compressor, NoCompression
from tf_dgc.inner import takeover
from tf_dgc.local import turns
from tf_dgc.optimizers import validation


def make_inner(inner: Any) -> keras.optimizers.Optimizer:
    """Return a copy of the inner optimizer, whose steps meet nobody.

    Args:
        inner: an optimizer, or its name or config.

    Raises:
        ValueError: for anything else, and for optimizers that cannot be wrapped.
    """
    inner = takeover.get_inner(inner, steps_alone=True)
    unsuited.check_numbers(inner, NoCompression())
    rule = copy_optimizer(inner, keras_optimizers.count_alone)
    keras_optimizers.step_alone(rule)
    ages.count_age(rule)
    keras_files.leave_out_of_files(rule)
    return rule


def make_outer(
    outer: Any, compressor: Compressor, feedback: bool, parts: int
) -> keras.optimizers.Optimizer:
    """Return a copy of the outer optimizer, which is given what is exchanged.

    Args:
        outer: an optimizer, or its name or config; None for one that adds the mean.
        compressor: method of the exchange.
        feedback: whether what is not sent is kept back.
        parts: number of parts of the model that take turns.

    Raises:
        ValueError: for anything else, for optimizers that cannot be wrapped, and for
            those that do not go together with the method; for None with one of signs.
    """
    if outer is None and compressor.sends_signs:
        raise ValueError(
            f"{compressor!r} sends signs alone, and not how far workers moved, so each "
            "round would move every weight by 1. Pass an `outer` whose learning rate "
            "is how far it is to be, for example `outer=keras.optimizers.SGD(1e-3)`, "
            "or another method. Received: outer=None"
        )
    outer = keras.optimizers.SGD(1.0) if outer is None else outer
    outer = takeover.get_inner(outer, what="outer")
    validation.check_one_momentum(compressor, outer, "outer")
    turns.check_outer(outer, parts)
    unsuited.check_outer(outer, compressor, feedback)
    rule = copy_optimizer(outer)
    keras_optimizers.make_scalars_readable(rule)
    keras_optimizers.replace_all_reduce(rule, list)
    return rule

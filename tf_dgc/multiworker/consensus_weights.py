"""Agreed weights: what a model is where its workers differ for the time being.

Between two exchanges of local steps every worker has weights of its own. Who evaluates,
predicts or saves is to see what all have in common. That also holds for submodels, and
for other models that share layers with one that is trained.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from tf_dgc._internals import keras_trainer

_SEEN_BY = {  # methods of a model, by what they are for
    "test": ["evaluate"],
    "predict": ["predict"],
    "save": ["save", "save_weights", "export"],
    "get": ["get_weights"],
}
_SET_BY = ["set_weights", "load_weights"]

# Models that `show_to_all` was called with, in that order, equal on all workers.
_models: weakref.WeakKeyDictionary[keras.Model, None] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def consensus_weights(model: keras.Model, what: str) -> Iterator[None]:
    """Let a model have the weights that its workers agree on, and then its own again.

    Args:
        model: Keras model. The optimizers that count are its attributes, and those of
            other models, seen by `show_to_all`, with which it shares weights.
        what: name of the use: "test", "predict", "save" or "get"; "part", of which
            every worker saves its own, for what each has at hand; and "train", for
            which nothing is changed.

    Raises:
        RuntimeError: if what is trained would be lost, as the model has such weights.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in _optimizers_of(model, shown=what == "train"):
            if what == "train":
                optimizer.check_not_swapped("train")
            elif what != "part" or optimizer.anchor:
                stack.enter_context(optimizer.agreed(_use(what)))
        yield


@contextlib.contextmanager
def setting_weights(model: keras.Model) -> Iterator[None]:
    """Let a model be given weights, with which a round begins.

    But for a file that has every worker's own. On all workers alike, as
    `EarlyStopping` does, by what `get_weights` said. Weights of a submodel are not all
    that its workers have to agree on: setting them is a move within the round.

    Args:
        model: Keras model, as in `weights`.

    Raises:
        RuntimeError: as `weights` of "train".
    """
    loads = {optimizer: optimizer.loads for optimizer in _optimizers_of(model)}
    for optimizer in loads:
        optimizer.check_not_swapped("set weights")
    yield
    for optimizer, before in loads.items():
        if optimizer.loads == before and optimizer.trains_only(model.weights):
            optimizer.restart_round()


def has_local_optimizer(model: keras.Model) -> bool:
    """Return whether a model is trained by optimizers whose steps meet nobody."""
    return bool(_asked(model))


def wrap_model_methods(model: keras.Model) -> None:
    """Let what evaluates, predicts or saves by this model instance see them."""
    _models[model] = None
    for what, names in _SEEN_BY.items():
        keras_trainer.wrap_calls(
            model, names, functools.partial(consensus_weights, model, what)
        )
    keras_trainer.wrap_calls(model, _SET_BY, functools.partial(setting_weights, model))


def _use(what: str) -> str:
    """Return what a use is of the model: callbacks of all workers get weights alike."""
    if what == "get" and keras_trainer.is_within_a_loop():
        return "keep"
    return what


def _attributes(model: keras.Model) -> Iterator[Any]:
    """Yield the attributes of a model, and what is in those that hold several."""
    for value in vars(model).values():
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _optimizers_of(model: keras.Model, shown: bool = False) -> list[Any]:
    """Return the optimizers that let workers differ in weights of a model.

    Args:
        model: Keras model, as in `weights`.
        shown: whether to return only those whose agreed weights the model has now,
            which takes no time in a training step.
    """
    return [
        optimizer
        for optimizer in dict.fromkeys(
            optimizer for each in (model, *_models) for optimizer in _asked(each)
        )
        if (optimizer.is_swapped or not shown) and optimizer.trains_any(model.weights)
    ]


def _asked(model: keras.Model) -> list[Any]:
    """Return the optimizers that let workers differ, without repetitions."""
    found = {}
    for value in _attributes(model):
        scaled = isinstance(value, keras.optimizers.LossScaleOptimizer)
        optimizer = value.inner_optimizer if scaled else value
        if isinstance(optimizer, keras.optimizers.Optimizer):
            found[id(optimizer)] = optimizer
    return [o for o in found.values() if hasattr(o, "agreed")]

"""Consensus weights: those that all workers have in common during local steps.

Within a round of local steps every worker has weights of its own. Evaluation,
prediction and saving use the consensus weights instead. That also holds for submodels,
and for other models that share layers with one that is trained.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from tf_dgc._internals import keras_trainer

_READING_METHODS = {  # methods of a model, by use
    "test": ["evaluate"],
    "predict": ["predict"],
    "save": ["save", "save_weights", "export"],
    "get": ["get_weights"],
}
_SETTING_METHODS = ["set_weights", "load_weights"]

# Models that were passed to `wrap_model_methods`, in the same order on all workers.
_models: weakref.WeakKeyDictionary[keras.Model, None] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def consensus_weights(model: keras.Model, what: str) -> Iterator[None]:
    """Give a model the consensus weights within, then this worker's weights again."""
    # `what` is "test", "predict", "save" or "get"; "part" to save a worker's part,
    # which uses only weights that are available locally; "train" changes nothing, and
    # raises if the model has the consensus weights, so that the training would be lost.
    use = what
    if what == "get" and keras_trainer.running_loop() is not None:
        use = "keep"  # callbacks call `get_weights` on all workers alike
    with contextlib.ExitStack() as stack:
        for optimizer in _optimizers_of(model, shown=what == "train"):
            if what == "train":
                optimizer.check_not_swapped("train")
            elif what != "part" or optimizer.anchor:
                stack.enter_context(optimizer.consensus_weights(use))
        yield


@contextlib.contextmanager
def setting_weights(model: keras.Model) -> Iterator[None]:
    """Begin a new round with the weights that are set within, equal on all workers."""
    # No round begins if a file with every worker's own weights is loaded, or if only
    # the weights of a submodel are set.
    loads = {optimizer: optimizer.num_full_loads for optimizer in _optimizers_of(model)}
    for optimizer in loads:
        optimizer.check_not_swapped("set weights")
    yield
    for optimizer, before in loads.items():
        if optimizer.num_full_loads == before and optimizer.trains_only(model.weights):
            optimizer.restart_round()


def has_local_optimizer(model: keras.Model) -> bool:
    """Whether a model is trained by optimizers with local steps."""
    return bool(_local_optimizers(model))


def wrap_model_methods(model: keras.Model) -> None:
    """Use the consensus weights where this model instance evaluates or is saved."""
    _models[model] = None
    for what, names in _READING_METHODS.items():
        keras_trainer.wrap_calls(
            model, names, functools.partial(consensus_weights, model, what)
        )
    keras_trainer.wrap_calls(
        model, _SETTING_METHODS, functools.partial(setting_weights, model)
    )


def _attributes(model: keras.Model) -> Iterator[Any]:
    """Yield the attributes of a model, and the items of lists and dictionaries."""
    for value in vars(model).values():
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _optimizers_of(model: keras.Model, shown: bool = False) -> list[Any]:
    """Return the model's optimizers with local steps; with `shown`, swapped ones."""
    return [
        optimizer
        for optimizer in dict.fromkeys(
            optimizer
            for each in (model, *_models)
            for optimizer in _local_optimizers(each)
        )
        if (optimizer.is_swapped or not shown) and optimizer.trains_any(model.weights)
    ]


def _local_optimizers(model: keras.Model) -> list[Any]:
    """Return the optimizers of a model that have local steps, without repetitions."""
    optimizers = {}
    for value in _attributes(model):
        is_scaled = isinstance(value, keras.optimizers.LossScaleOptimizer)
        optimizer = value.inner_optimizer if is_scaled else value
        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizers[id(optimizer)] = optimizer
    return [o for o in optimizers.values() if hasattr(o, "consensus_weights")]

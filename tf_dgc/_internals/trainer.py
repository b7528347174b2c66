"""The private names of Keras's trainer and of TensorFlow's input that its loops use."""

import contextlib
import functools
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.trainers import data_adapters
from tensorflow.python.distribute import input_lib
from tensorflow.python.ops import resource_variable_ops

_Trainer = trainer.TensorFlowTrainer


def _nested(function: Any, name: str) -> CodeType:
    """Return the code of a function that is defined within another."""
    constants = function.__code__.co_consts
    return next(c for c in constants if inspect.iscode(c) and c.co_name == name)


_COMPILES = _Trainer.compile_from_config.__code__
BUILD, LOGS, QUESTION = "build", "logs", "question"
_CALLERS = {
    _Trainer._maybe_symbolic_build.__code__: BUILD,
    _nested(trainer.reduce_per_replica, "_reduce"): LOGS,
    input_lib._calculate_replicas_with_values.__code__: QUESTION,
}
_LOOPS = {
    inspect.unwrap(getattr(_Trainer, name)).__code__: name
    for name in ("fit", "evaluate", "predict")
}


def is_made_of_a_config() -> bool:
    """Whether Keras, somewhere among our callers, compiles a model as a file says."""
    return any(frame.f_code is _COMPILES for frame, _ in traceback.walk_stack(None))


def caller_of_reduce() -> tuple[str | None, Any]:
    """Return who calls our caller, in the place of `strategy.reduce`.

    Returns:
        `BUILD` (`Trainer._maybe_symbolic_build`, which needs the batch's shapes) and
        the model that is built; `LOGS` (`reduce_per_replica` of a step's logs), or
        `QUESTION` ("has any worker still a batch?",
        `input_lib._calculate_replicas_with_values`), and None; or (None, None).
    """
    frame = sys._getframe(2)
    caller = _CALLERS.get(frame.f_code)
    return caller, frame.f_locals["self"] if caller == BUILD else None


class Loop:
    """A loop of Keras over batches, by the local variables of its function.

    Args:
        name: name of the loop: "fit", "evaluate" or "predict".
        found: local variables of its function, by name.
    """

    def __init__(self, name: str, found: dict[str, Any]):
        self.name = name
        self._found = found

    @property
    def is_validation(self) -> bool:
        """Whether it is the `evaluate` of a `fit`."""
        return bool(self._found.get("use_cached_eval_dataset"))

    @property
    def limit(self) -> str:
        """What the argument is called that says how many batches to use.

        Of the user's call, which for validation is that of `fit`.
        """
        if self.name == "fit":
            return "steps_per_epoch"
        return "validation_steps" if self.is_validation else "steps"

    @property
    def batches_left(self) -> float:
        """How many batches it takes at the most, `math.inf` if nothing says so.

        At the beginning of an epoch: in all epochs, for `fit` goes on in a data set
        where the last epoch ended (`EpochIterator.steps_per_epoch`).
        """
        iterator = self._found["epoch_iterator"]
        if iterator.steps_per_epoch is None:
            return math.inf
        at_once = iterator.steps_per_execution
        each = math.ceil(iterator.steps_per_epoch / at_once) * at_once
        if self.name != "fit":
            return each
        return each * (self._found["epochs"] - self._found["epoch"])

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Its callbacks, in the order in which they are called."""
        return self._found["callbacks"].callbacks

    @property
    def num_batches(self) -> int | None:
        """How many batches there are, if that is known however they are shared out.

        A worker gets a part of every batch, an empty one if need be, or all data; but
        if they are shared out by files, it gets as many as its files hold.
        """
        adapter = self._found["epoch_iterator"].data_adapter
        if not isinstance(adapter, _COUNTED):
            return None
        dataset = getattr(adapter, "_dataset", None)
        dataset = getattr(dataset, "_original_dataset", dataset)
        if isinstance(dataset, tf.data.Dataset):
            policy = dataset.options().experimental_distribute.auto_shard_policy
            if policy == tf.data.experimental.AutoShardPolicy.FILE:
                return None
        return adapter.num_batches


_COUNTED = (
    data_adapters.ArrayDataAdapter,
    data_adapters.PyDatasetAdapter,
    data_adapters.TFDatasetAdapter,
)


def calling_loop() -> Loop | None:
    """Return the loop of Keras that calls this package, if one does so directly."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    name = _LOOPS.get(frame.f_code) if frame is not None else None
    return None if frame is None or name is None else Loop(name, frame.f_locals)


_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def calling_trainer() -> Any | None:
    """Return the model whose `fit`, `evaluate` or `predict` is among our callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _LOOPS:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def models_within(model: keras.Model) -> list[keras.Model]:
    """Return a model and its submodels (`Layer._flatten_layers`)."""
    return [m for m in model._flatten_layers() if isinstance(m, keras.Model)]


def is_wrapped(model: keras.Model) -> bool:
    """Whether `wrap_trainer` was called for this model instance."""
    return "_tf_dgc_wrapped" in vars(model)


def wrap_trainer(
    model: keras.Model,
    wrap_function: Callable[[str, Callable], Callable],
    before_loop: Callable[[str, Loop | None], None],
    wrap_results: Callable[[Callable], Callable],
) -> None:
    """Wrap what this model instance calls in its loops.

    Args:
        model: Keras model, whose instance is changed.
        wrap_function: function of "train", "test" or "predict", and the function that
            is called for every execution of that loop; returns what is called instead.
        before_loop: function of one of these names and, if it is one, the loop that is
            about to use the function.
        wrap_results: function of the function that turns the last step's logs into
            those of an epoch (`Trainer._get_metrics_result_or_logs`); returns another
            one.
    """
    model._tf_dgc_wrapped = True
    # Made before, as by `train_on_batch`: then they are not wrapped.
    model.train_function = model.test_function = model.predict_function = None
    for kind in ("train", "test", "predict"):
        _wrap_maker(model, kind, wrap_function, before_loop)
    results = "_get_metrics_result_or_logs"
    setattr(model, results, wrap_results(getattr(model, results)))


def wrap_train_step(model: keras.Model, wrap: Callable[[Callable], Callable]) -> None:
    """Replace `train_step` of this model instance by what `wrap` returns for it."""
    model.train_step = wrap(model.train_step)


def first_of_inputs(data: Any) -> Any | None:
    """Return the first tensor of a batch's inputs that has rows, or None.

    Keras weights the loss of a batch by its number of rows (`Trainer.train_step`).

    Args:
        data: batch, as `train_step` gets it.
    """
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    for leaf in keras.tree.flatten(inputs):
        shape = getattr(leaf, "shape", None)
        if shape is not None and shape != ():
            return leaf
    return None


def wrap_calls(
    model: keras.Model,
    names: Sequence[str],
    context: Callable[[], contextlib.AbstractContextManager],
) -> None:
    """Let methods of this model instance be called within a context.

    Args:
        model: Keras model, whose instance is changed.
        names: names of the methods.
        context: function that returns the context of a call.
    """

    def wrap(stock: Callable) -> Callable:
        @functools.wraps(stock)
        def call(*args: Any, **kwargs: Any) -> Any:
            with context():
                return stock(*args, **kwargs)

        return call

    for name in names:
        setattr(model, name, wrap(getattr(model, name)))


def _wrap_maker(
    model: keras.Model, kind: str, wrap: Callable, before_loop: Callable
) -> None:
    stock, name = getattr(model, f"make_{kind}_function"), f"{kind}_function"

    def make(force: bool = False) -> Any:
        before = getattr(model, name)
        stock(force)
        if getattr(model, name) is not before:
            setattr(model, name, wrap(kind, getattr(model, name)))
        before_loop(kind, calling_loop())
        return getattr(model, name)

    setattr(model, f"make_{kind}_function", make)


def is_infinite(iterator: Any) -> bool:
    """Whether TensorFlow never asks if there is another batch (`_cardinality`)."""
    return iterator._cardinality == tf.data.INFINITE_CARDINALITY


def make_flag() -> Any:
    """Return a bool variable of this worker alone, False; functions may read it."""
    return _make_local_variable(False, tf.bool, "CPU:0")


def make_counter(device: str) -> Any:
    """Return an int64 variable of one replica, 0; functions may read and change it.

    Args:
        device: device of the replica.
    """
    return _make_local_variable(0, tf.int64, device)


def _make_local_variable(value: Any, dtype: tf.DType, device: str) -> Any:
    with tf.init_scope(), tf.device(device):
        # Not tf.Variable: the strategy would distribute it.
        return resource_variable_ops.ResourceVariable(
            value, trainable=False, dtype=dtype
        )


def non_trainable_variables(model: keras.Model) -> list[keras.Variable]:
    """Return what the model's layers keep that gradients never change.

    Frozen weights, metrics and random streams are not among them, nor states of
    recurrent layers (`Layer._non_trainable_variables`).
    """
    found = {
        id(variable): variable
        for layer in model._flatten_layers()
        for variable in layer._non_trainable_variables
    }
    return list(found.values())


def variables_of_batch_normalizations(model: keras.Model) -> list[keras.Variable]:
    """Return those of `non_trainable_variables` that follow a replica's own batches.

    A synchronized normalization follows the batches of all replicas.
    """
    return [
        variable
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
        for variable in layer._non_trainable_variables
    ]


def build_metrics(model: keras.Model, batch: Any) -> None:
    """Make the variables of metrics, if there are none yet (`_symbolic_build`)."""
    if not model._compile_metrics or model._compile_metrics.built:
        return
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=batch)


def start_fit_at(model: keras.Model, epoch: int | None) -> None:
    """Make `fit`, called on `on_train_begin`, start there (`_initial_epoch`)."""
    model._initial_epoch = epoch

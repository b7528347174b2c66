"""Private names of Keras's trainer, and of TensorFlow's input in its loops."""

import contextlib
import functools
import inspect
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import data_adapters
from tensorflow.python.distribute import values


class Loop:
    """A call of `fit`, `evaluate` or `predict`.

    Attributes:
        model: model whose method is called.
        name: name of the method.
        callbacks: callbacks of a `fit`; None if it collects them itself.
        epoch: epoch that `fit` is in.
        is_validation: whether `fit` evaluates its validation data.
        last_callback: callback that `fit` calls after all others.
    """

    def __init__(
        self,
        model: keras.Model,
        name: str,
        callbacks: keras.callbacks.CallbackList | None = None,
        epochs: int = 1,
        sets_steps: bool = False,
    ):
        self.model = model
        self.name = name
        self.callbacks = callbacks
        self.epoch = 0
        self.is_validation = False
        self.last_callback: keras.callbacks.Callback | None = None
        self._epochs = epochs
        self._sets_steps = sets_steps  # the parameter of the callbacks
        self._epoch_iterator: Callable[[], Any] = lambda: None

    def begin(self, epoch_iterator: Any) -> None:
        """Set Keras's `EpochIterator`, before the first callback is called."""
        # It refers to the data set, which refers to this loop.
        self._epoch_iterator = weakref.ref(epoch_iterator)
        cached = getattr(self.model, "_eval_epoch_iterator", None)
        self.is_validation = self.name == "evaluate" and cached is epoch_iterator
        if self.callbacks is not None and self._sets_steps:
            params = {**self.callbacks.params, "steps": epoch_iterator.num_batches}
            self.callbacks.set_params(params)

    @property
    def limit(self) -> str:
        """Name of the argument of the user's call that limits the number of batches."""
        # For validation, the user's call is `fit`.
        if self.name == "fit":
            return "steps_per_epoch"
        return "validation_steps" if self.is_validation else "steps"

    @property
    def batches_left(self) -> float:
        """Maximum number of batches that the loop still takes; may be `math.inf`."""
        # At the beginning of an epoch this counts all epochs, because `fit` continues
        # in a data set where the last epoch ended (`EpochIterator.steps_per_epoch`).
        iterator: Any = self._epoch_iterator()
        if iterator.steps_per_epoch is None:
            return math.inf
        per_execution = iterator.steps_per_execution
        per_epoch = math.ceil(iterator.steps_per_epoch / per_execution) * per_execution
        return per_epoch * (self._epochs - self.epoch)

    def move_last_callback(self) -> None:
        """Make `fit` call `last_callback` last, and remove others of its class."""
        last = self.last_callback
        if last is not None and self.callbacks is not None:
            callbacks = self.callbacks.callbacks
            callbacks[:] = [c for c in callbacks if type(c) is not type(last)] + [last]

    @property
    def num_batches(self) -> int | None:
        """Number of this worker's batches in an epoch, None if it is not known."""
        # A worker gets a part of every batch, possibly an empty one, or all data. With
        # sharding by files the number depends on its files.
        adapter = self._epoch_iterator().data_adapter
        if not isinstance(adapter, _ADAPTERS_WITH_LENGTH):
            return None
        dataset = getattr(adapter, "_dataset", None)
        dataset = getattr(dataset, "_original_dataset", dataset)
        if isinstance(dataset, tf.data.Dataset):
            policy = dataset.options().experimental_distribute.auto_shard_policy
            if policy == tf.data.experimental.AutoShardPolicy.FILE:
                return None
        return adapter.num_batches


_ADAPTERS_WITH_LENGTH = (
    data_adapters.ArrayDataAdapter,
    data_adapters.PyDatasetAdapter,
    data_adapters.TFDatasetAdapter,
)


class _RunningLoops(threading.local):
    def __init__(self) -> None:
        self.stack: list[Loop] = []


_running = _RunningLoops()


def running_loop() -> Loop | None:
    """Return the innermost loop that this thread runs under a prepared strategy."""
    return _running.stack[-1] if _running.stack else None


def wrap_loops(
    run: Callable[[keras.Model, str, Callable, inspect.BoundArguments], Any],
) -> None:
    """Let `run` call `fit`, `evaluate` and `predict` of all models, once a process."""
    for name in ("fit", "evaluate", "predict"):
        stock = getattr(keras.Model, name)
        if not hasattr(stock, "_tf_dgc_wrapped"):
            setattr(keras.Model, name, _wrap_loop(name, stock, run))


def _wrap_loop(name: str, stock: Callable, run: Callable) -> Callable:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def loop(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(self, *args, **kwargs)
        except TypeError:
            return stock(self, *args, **kwargs)  # raises Keras's error
        arguments.apply_defaults()
        return run(self, name, stock, arguments)

    loop._tf_dgc_wrapped = True  # type: ignore[attr-defined]
    return loop


def run_loop(
    model: keras.Model,
    name: str,
    stock: Callable,
    arguments: inspect.BoundArguments,
    owns_callbacks: bool,
) -> Any:
    """Call a method of Keras's trainer; within it, `running_loop` returns its `Loop`.

    With `owns_callbacks`, a `fit` gets a `CallbackList` that the loop can change.
    """
    loop = Loop(model, name)
    if name == "fit" and owns_callbacks:
        loop = _fit_loop(model, arguments.arguments)
    _running.stack.append(loop)
    try:
        return stock(*arguments.args, **arguments.kwargs)
    finally:
        _running.stack.remove(loop)


def _fit_loop(model: keras.Model, arguments: dict[str, Any]) -> Loop:
    epochs = arguments["epochs"]
    max_epochs = getattr(keras.config, "max_epochs", lambda: None)()  # since 3.11
    epochs = min(epochs, max_epochs) if max_epochs else epochs
    callbacks, verbose = arguments["callbacks"], arguments["verbose"]
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    if not is_list:
        callbacks = keras.callbacks.CallbackList(
            callbacks,
            add_history=True,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=None,  # see `Loop.begin`
            model=model,
        )
        arguments["callbacks"] = callbacks
    return Loop(model, "fit", callbacks, epochs, sets_steps=not is_list)


def is_batch_count(value: Any) -> bool:
    """Whether TensorFlow asks how many replicas have a batch, by `strategy.reduce`."""
    # `input_lib._calculate_replicas_with_values` sums a tensor, not the values of
    # replicas, that is no scalar.
    is_count = tf.is_tensor(value) and value.dtype == tf.int64
    return is_count and value.shape.rank != 0 and value.shape.num_elements() == 1


def models_within(model: keras.Model) -> list[keras.Model]:
    """Return a model and its submodels (`Layer._flatten_layers`)."""
    return [m for m in model._flatten_layers() if isinstance(m, keras.Model)]


def is_wrapped(model: keras.Model) -> bool:
    """Whether `wrap_trainer` was called for this model instance."""
    return "_tf_dgc_wrapped" in vars(model)


def wrap_trainer(
    model: keras.Model,
    wrap_function: Callable[[str, Callable], Callable],
    wrap_dataset: Callable[[Any], Any],
    before_loop: Callable[[Loop], None],
    wrap_results: Callable[[Callable], Callable],
) -> None:
    """Wrap what this model instance calls in its loops."""
    # `wrap_function` gets "train", "test" or "predict" and what Keras executes in that
    # loop; `wrap_dataset` gets the distributed data set, and its result has
    # `element_spec`, `loop` and `peek`; `wrap_results` gets
    # `Trainer._get_metrics_result_or_logs`.
    model._tf_dgc_wrapped = True
    # Discard functions that were created unwrapped, as by `train_on_batch`.
    model.train_function = model.test_function = model.predict_function = None
    builder = _Builder(model, wrap_dataset)
    model._maybe_symbolic_build = builder.build
    for kind in ("train", "test", "predict"):
        _wrap_maker(model, kind, wrap_function, before_loop, builder)
    results = "_get_metrics_result_or_logs"
    setattr(model, results, wrap_results(getattr(model, results)))


def wrap_steps(
    model: keras.Model,
    wrap_train_step: Callable[[Callable], Callable],
    wrap_test_step: Callable[[Callable], Callable],
) -> None:
    """Replace `train_step` and `test_step` of this model instance by wrapped ones."""
    model.train_step = wrap_train_step(model.train_step)
    model.test_step = wrap_test_step(model.test_step)


def hide_empty_shape(data: Any) -> Any:
    """Return a batch whose number of rows is unknown while tracing, if it is 0."""
    # Since Keras 3.16, steps are traced for the shapes of single batches, and the loss
    # of a batch that is known to be empty is an empty vector instead of 0
    # (`losses.loss.reduce_values`).

    def hide(x: Any) -> Any:
        if not tf.is_tensor(x) or tf.executing_eagerly() or x.shape.rank in (None, 0):
            return x
        if x.shape[0] != 0:
            return x
        shape = tf.TensorShape([None, *x.shape[1:]])
        return tf.raw_ops.PlaceholderWithDefault(input=x, shape=shape)

    return tf.nest.map_structure(hide, data)


def first_of_inputs(data: Any) -> Any | None:
    """Return the first tensor of a batch's inputs that has rows, or None."""
    # Keras weights the loss of a batch by its number of rows (`Trainer.train_step`).
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    for leaf in keras.tree.flatten(inputs):
        shape = getattr(leaf, "shape", None)
        if shape is not None and shape != ():
            return leaf
    return None


class _Builder:
    """Builds a model and metrics before a loop (`Trainer._maybe_symbolic_build`)."""

    # Keras draws a batch and discards it, with those that TensorFlow prefetches
    # meanwhile. Here the shapes come from `element_spec`. If they do not suffice, a
    # batch is drawn from the iterator that the loop will use.

    def __init__(self, model: keras.Model, wrap_dataset: Callable[[Any], Any]):
        self._model = model
        self._stock = model._maybe_symbolic_build
        self._wrap_dataset = wrap_dataset
        self._next_loop: Any = None  # data set and iterator of a loop that will begin

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Replace the stock method."""
        model = self._model
        self._next_loop = None
        if iterator is not None:
            iterator._distributed_dataset = self._wrap_dataset(
                iterator._distributed_dataset
            )
            self._next_loop = iterator._distributed_dataset, weakref.ref(iterator)
            if model._distribute_strategy is not None:
                data_batch = self._batch_spec(iterator._distributed_dataset)
        if data_batch is not None:
            self._stock(data_batch=data_batch)

    def _batch_spec(self, dataset: Any) -> Any:
        model = self._model
        built = all(layer.built for layer in model._flatten_layers())
        others = [model._compile_metrics, model._compile_loss]
        if built and all(other is None or other.built for other in others):
            return ()  # not used
        spec = tf.nest.map_structure(
            lambda s: s._value_specs[0] if isinstance(s, values.PerReplicaSpec) else s,
            dataset.element_spec,
        )
        if all(_is_sufficient(s, built) for s in tf.nest.flatten(spec)):
            return tf.nest.map_structure(_keras_tensor, spec)
        local = model.distribute_strategy.experimental_local_results
        return tf.nest.map_structure(lambda v: local(v)[0], dataset.peek())

    def begin_loop(self) -> Loop | None:
        """Return the loop that is about to begin, if any."""
        next_loop, self._next_loop = self._next_loop, None
        loop = running_loop()
        if next_loop is None or loop is None or loop.model is not self._model:
            return None
        dataset, reference = next_loop
        loop.begin(reference())
        dataset.loop = loop
        return loop


def _is_sufficient(spec: tf.TypeSpec, built: bool) -> bool:
    """Whether a spec suffices to build; for metrics of a built model, the rank does."""
    shape = getattr(spec, "shape", None)
    if not isinstance(shape, tf.TensorShape):
        return True  # there is no tensor
    return shape.rank is not None and (built or shape[1:].is_fully_defined())


def _keras_tensor(spec: tf.TypeSpec) -> keras.KerasTensor | None:
    shape = getattr(spec, "shape", None)
    if not isinstance(shape, tf.TensorShape):
        return None  # `tf.OptionalSpec`: a target or weight that is None
    return keras.KerasTensor(shape, keras.backend.standardize_dtype(spec.dtype))


def wrap_calls(
    model: keras.Model,
    names: Sequence[str],
    context: Callable[[], contextlib.AbstractContextManager],
) -> None:
    """Call methods of this model instance within the context that `context` returns."""

    def wrap(stock: Callable) -> Callable:
        @functools.wraps(stock)
        def call(*args: Any, **kwargs: Any) -> Any:
            with context():
                return stock(*args, **kwargs)

        return call

    for name in names:
        setattr(model, name, wrap(getattr(model, name)))


def _wrap_maker(
    model: keras.Model,
    kind: str,
    wrap: Callable,
    before_loop: Callable[[Loop], None],
    builder: _Builder,
) -> None:
    stock, name = getattr(model, f"make_{kind}_function"), f"{kind}_function"

    def make(force: bool = False) -> Any:
        before = getattr(model, name)
        stock(force)
        if getattr(model, name) is not before:
            setattr(model, name, wrap(kind, getattr(model, name)))
        loop = builder.begin_loop() if kind != "predict" else None
        if loop is not None:
            before_loop(loop)
        return getattr(model, name)

    setattr(model, f"make_{kind}_function", make)


def non_trainable_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of layers that gradients never change."""
    # Frozen weights, metrics, random streams and states of recurrent layers are left
    # out (`Layer._non_trainable_variables`).
    variables = {
        id(variable): variable
        for layer in model._flatten_layers()
        for variable in layer._non_trainable_variables
    }
    return list(variables.values())


def variables_of_batch_normalizations(model: keras.Model) -> list[keras.Variable]:
    """Return `non_trainable_variables` that depend on a replica's own batches."""
    return [
        variable
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
        for variable in layer._non_trainable_variables
    ]


def build_metrics(model: keras.Model, batch: Any) -> None:
    """Create the variables of metrics, if there are none yet (`_symbolic_build`)."""
    if not model._compile_metrics or model._compile_metrics.built:
        return
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=batch)


def start_fit_at(model: keras.Model, epoch: int | None) -> None:
    """Make `fit`, called in `on_train_begin`, start at an epoch (`_initial_epoch`)."""
    model._initial_epoch = epoch


def hide_from_progress_line(
    model: keras.Model, logs: dict[str, Any], names: Sequence[str]
) -> None:
    """Remove logs of the epoch that ends once the user's callbacks have read them."""
    # `CallbackList` passes one dictionary to the user's callbacks, then to `History`,
    # which keeps the logs, then to `ProgbarLogger`, which prints them.
    history = getattr(model, "history", None)
    if not isinstance(history, keras.callbacks.History):
        return  # `fit` did not call
    stock = history.on_epoch_end

    def on_epoch_end(epoch: int, epoch_logs: dict[str, Any] | None = None) -> None:
        vars(history).pop("on_epoch_end", None)  # only for this epoch
        stock(epoch, epoch_logs)
        if epoch_logs is logs:
            for name in names:
                logs.pop(name, None)

    history.on_epoch_end = on_epoch_end

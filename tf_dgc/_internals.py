"""Every private TensorFlow and Keras name this package touches, in one place.

Each function says which private names it uses; all were seen in TensorFlow 2.21.0
and Keras 3.12.4 to 3.15.1. What is changed are instances that belong to the caller (a
strategy in use, our own copy of an optimizer), no classes and no modules, but for one
function while a strategy is being made (`enabling_collectives_by`).
"""

import contextlib
import copy
import functools
import inspect
import os
import threading
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.saving import saving_lib
from keras.src.utils import tracking
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.distribute import (
    cross_device_ops,
    distribute_utils,
    multi_worker_util,
)
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import control_flow_util, resource_variable_ops
from tensorflow.python.training.saving import saveable_object
from tensorflow.python.util import _pywrap_util_port

CollectiveAllReduce = cross_device_ops.CollectiveAllReduce


# --- strategies -------------------------------------------------------------------


def get_cross_device_ops(strategy: tf.distribute.Strategy) -> Any:
    """Return the strategy's reduction (`StrategyExtended._cross_device_ops`)."""
    return strategy.extended._cross_device_ops


def set_cross_device_ops(strategy: tf.distribute.Strategy, ops: Any) -> None:
    """Replace the reduction of this strategy instance."""
    strategy.extended._cross_device_ops = ops


def collective_ops_of(strategy: tf.distribute.Strategy) -> Any | None:
    """Return the strategy's `CollectiveAllReduce`, or None if it has none.

    `MirroredExtended._collective_ops` exists beside a reduction the user chose.
    """
    for ops in (
        get_cross_device_ops(strategy),
        getattr(strategy.extended, "_collective_ops", None),
    ):
        if isinstance(ops, CollectiveAllReduce):
            return ops
    return None


def launchers(collective_ops: Any) -> list[Any]:
    """Return one `CollectiveReplicaLauncher` per local replica."""
    return collective_ops._launchers


def group_size(launcher: Any) -> int:
    """Return how many replicas, of all workers, a launcher's collectives have."""
    return launcher._group_size


def launch_lock(collective_ops: Any) -> Any:
    """Return the lock under which TensorFlow launches its own collectives."""
    return collective_ops._lock


def launch_all_gather(launcher: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Launch one `CollectiveGatherV2` (`CollectiveReplicaLauncher._all_gather`)."""
    return launcher._all_gather(tensor, None)


def launch_all_reduce(launcher: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Launch one `CollectiveReduceV2` that sums."""
    return launcher.all_reduce(tensor)


def abort_message(collective_ops: Any, seconds: float) -> str:
    """Return why TensorFlow ends the collectives of this worker, or "" if it does not.

    The first reason stays, whatever fails later, and every collective fails with it.
    One that does not fail is given up after so many seconds, and ends all others.
    """
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=seconds)
    found = []

    def launch() -> None:
        try:
            launchers(collective_ops)[0].all_reduce(tf.zeros([]), options=options)
        except tf.errors.OpError as error:
            found.append(str(error.message))

    # A thread, as the time-out of a collective is TensorFlow's own.
    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    thread.join(2 * seconds)
    return "".join(found)


def reuse_collective_keys(collective_ops: Any) -> Callable[[], list[int]]:
    """Give collectives of one kind, dtype and shape the same key, again and again.

    TensorFlow hands a new key to every execution (`_next_instance_key`) and never
    forgets one: each costs memory for as long as the process lives, and the workers a
    round trip to the first of them. It does so when Python calls a function
    (`FuncGraph.capture_call_time_value`), which fails for a function called within a
    `tf.while_loop`, as Keras's `steps_per_execution` does.

    A key that follows from the tensor is the same on all workers, whenever each of
    them traces. A launcher's collectives are one after the other (`_ordering_token`),
    so no key is in use when it is used again.

    Returns:
        A function that tells how many collectives this worker has started and finished
        so far; any thread may call it, at any time.
    """
    pairs = [_count_collectives(launcher) for launcher in launchers(collective_ops)]
    started, finished = pairs[0]  # all local replicas go through the same ones
    return lambda: [int(c.read_value()) for c in (started, finished)]


def _count_collectives(launcher: Any) -> tuple[Any, Any]:
    """Count what one launcher starts and finishes, and let it use keys again."""
    with tf.init_scope(), tf.device("CPU:0"):
        # Not tf.Variable: the strategy would distribute it.
        started, finished = (
            resource_variable_ops.ResourceVariable(0, dtype=tf.int32) for _ in range(2)
        )

    def counted(kind: str) -> Callable:
        launch = getattr(launcher, kind)

        def launch_and_count(tensor: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
            tensor = tf.convert_to_tensor(tensor)
            launcher._tf_dgc_kinds.add((kind, tensor.dtype.name, str(tensor.shape)))
            launcher._next_instance_key = lambda: _after(
                started, [tensor], collective_key(kind, tensor)
            )
            result = launch(tensor, *args, **kwargs)
            return _after(finished, [result], result)

        return launch_and_count

    launcher._tf_dgc_kinds = set()
    for kind in ("all_reduce", "_all_gather"):
        setattr(launcher, kind, counted(kind))
    return started, finished


def wrap_launches(
    collective_ops: Any, all_reduce: Callable[..., Any], all_gather: Callable[..., Any]
) -> None:
    """Launch every collective between processors by these functions.

    Not between GPUs, which have connections of their own (`_device`).

    Args:
        collective_ops: a `CollectiveAllReduce`.
        all_reduce: gets the function that launches one collective, and the tensor.
        all_gather: gets both, and the number of replicas (`_group_size`).
    """
    for launcher in launchers(collective_ops):
        if "GPU" not in launcher._device:
            _wrap_launches(launcher, all_reduce, all_gather)


def _wrap_launches(launcher: Any, all_reduce: Callable, all_gather: Callable) -> None:
    reduce_one, gather_one = launcher.all_reduce, launcher._all_gather

    def reduce(tensor: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        launch = functools.partial(_launch, reduce_one, args, kwargs)
        return all_reduce(launch, tf.convert_to_tensor(tensor))

    def gather(tensor: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        launch = functools.partial(_launch, gather_one, args, kwargs)
        return all_gather(launch, tf.convert_to_tensor(tensor), launcher._group_size)

    launcher.all_reduce, launcher._all_gather = reduce, gather


def _launch(one: Callable, args: Any, kwargs: Any, tensor: tf.Tensor) -> tf.Tensor:
    return one(tensor, *args, **kwargs)


def _after(counter: Any, inputs: list[tf.Tensor], value: tf.Tensor) -> tf.Tensor:
    """Return `value` when all inputs were there and the counter has counted."""
    with tf.control_dependencies(inputs):
        done = counter.assign_add(1, read_value=False)
    with tf.control_dependencies([] if done is None else [done]):
        return tf.identity(value)


def kinds_of_collectives(collective_ops: Any) -> set[tuple]:
    """Return kind, dtype and shape of all collectives so far, which have a key each."""
    return set().union(*(x._tf_dgc_kinds for x in launchers(collective_ops)))


def collective_key(kind: str, tensor: tf.Tensor) -> tf.Tensor:
    """Return the key of a collective, scalar int32.

    It is a hash. Should two kinds of tensors of a model get the same, at a chance of
    one in 10^9, TensorFlow refuses the second.

    Args:
        kind: of collective.
        tensor: that is handed over; equal in dtype and shape on all workers, whether
            the shape is known while tracing or not.
    """
    name = zlib.crc32(f"{kind} {tensor.dtype.name}".encode())
    if tensor.shape.is_fully_defined():
        shape: Any = np.array(tensor.shape.as_list(), np.int64)
        factors, add_up = _FACTORS[: len(shape)], np.sum
    else:
        shape = tf.shape(tensor, tf.int64)
        factors, add_up = tf.constant(_FACTORS)[: tf.size(shape)], tf.reduce_sum
    with tf.device("CPU:0"):
        terms = (shape + 1) % _NUM_KEYS * factors % _NUM_KEYS
        return tf.cast(_FIRST_KEY + (name + add_up(terms)) % _NUM_KEYS, tf.int32)


# Above the keys that TensorFlow hands out itself, to create variables, and below 2**31.
_FIRST_KEY = 1_000_000_000
_NUM_KEYS = 1_000_000_007  # a prime
_FACTORS = np.array([pow(1_000_003, i, _NUM_KEYS) for i in range(1, 17)], np.int64)


def wrap_variable_creation(
    strategy: tf.distribute.Strategy, wrap: Callable[[Callable], Callable]
) -> None:
    """Wrap how this strategy instance creates variables (`_create_variable`)."""
    extended = strategy.extended
    extended._create_variable = wrap(extended._create_variable)


def per_replica(values: Sequence[Any]) -> Any:
    """Wrap one value per local replica (`distribute_utils.regroup`)."""
    return distribute_utils.regroup(tuple(values))


# --- the coordination service (context.Context) ------------------------------------


def has_coordination_service() -> bool:
    """Whether this process takes part in TensorFlow's coordination service."""
    return eager_context.context().coordination_service is not None


def is_too_late_for_a_cluster() -> bool:
    """Whether TensorFlow's runtime has started, by itself (`Context`).

    `configure_collective_ops` then raises "Collective ops must be configured at program
    startup".
    """
    context = eager_context.context()
    return context._context_handle is not None and context._collective_leader is None


def eager_context_capsule() -> Any:
    """Return the capsule of the `TFE_Context` (`Context._context_handle`)."""
    context = eager_context.context()
    context.ensure_initialized()
    return context._context_handle


def num_functions() -> int:
    """Return how many graph functions the runtime knows (`context.Context`)."""
    return len(eager_context.context().list_function_names())


@contextlib.contextmanager
def enabling_collectives_by(enable: Callable[[Any, bytes], None]) -> Iterator[None]:
    """Within, connect to the other workers by `enable(context_capsule, server_def)`.

    In place of `pywrap_tfe.TFE_EnableCollectiveOps`, in which
    `Context.ensure_initialized` keeps Python's lock until all are there. Of all
    modules' names this alone is changed, and only until a strategy is made.
    """
    stock = pywrap_tfe.TFE_EnableCollectiveOps
    pywrap_tfe.TFE_EnableCollectiveOps = enable
    try:
        yield
    finally:
        pywrap_tfe.TFE_EnableCollectiveOps = stock


def configure_coordination(
    cluster: Any, heartbeat_seconds: float, start_seconds: float
) -> None:
    """Set the times of TensorFlow's coordination service; call it before the strategy.

    What `CollectiveAllReduceExtended._initialize_multi_worker` does, but for the times.

    Args:
        cluster: a `tf.train.ClusterSpec`.
        heartbeat_seconds: without a heartbeat for so long, a worker counts as gone.
        start_seconds: how long to look for the worker that coordinates.
    """
    spec = multi_worker_util.normalize_cluster_spec(cluster)
    eager_context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(spec),
        cluster_register_timeout_in_ms=int(1000 * start_seconds),
        heartbeat_timeout_in_ms=int(1000 * heartbeat_seconds),
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(
                name=job, num_tasks=spec.num_tasks(job)
            )
            for job in ("chief", "worker")
            if job in spec.jobs
        ],
    )


# --- what a thread is doing -----------------------------------------------------------


def is_tracing(frame: FrameType | None) -> bool:
    """Whether a stack is within the tracing of a `tf.function`."""
    return any(f.f_code.co_filename == _TRACING for f, _ in traceback.walk_stack(frame))


_TRACING = func_graph.__file__  # `func_graph_from_py_func` calls the Python function


def is_executing(frames: Iterable[FrameType]) -> bool:
    """Whether one of these stacks may be within TensorFlow's runtime.

    A call of it returns when the operation, or the function, has ended.

    Args:
        frames: the innermost ones of threads.
    """
    return any(f.f_code.co_filename.startswith(_TENSORFLOW) for f in frames)


_TENSORFLOW = os.path.join(os.path.dirname(tf.__file__), "")


# --- graphs -------------------------------------------------------------------------


def uses_onednn() -> bool:
    """Whether TensorFlow's kernels for CPUs are those of oneDNN (`IsMklEnabled`)."""
    return _pywrap_util_port.IsMklEnabled()


def in_xla_context() -> bool:
    """Whether the graph being built will be compiled by XLA."""
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


# --- saving -------------------------------------------------------------------------


def read_when_saved(read: Callable[[], Any], dtype: str, device: str) -> Any:
    """Return what `_serialize_to_tensors` has to for a value that is costly to read.

    Restoring asks for the same, to know names and types, but does not read
    (`saveable_object.SaveSpec`).
    """
    return saveable_object.SaveSpec(
        lambda: tf.constant(read()), "", "", tf.as_dtype(dtype), device
    )


def take_part_in_saving(model: keras.Model) -> None:
    """Read whatever Keras reads to save a model, in its order, and write nothing.

    Values that all workers have to read together are read here while another worker
    saves (`saving_lib._save_state`).
    """
    saving_lib._save_state(
        model,
        weights_store=_Nowhere(),
        assets_store=None,
        inner_path="",
        visited_saveables=set(),
    )


class _Nowhere(saving_lib.H5IOStore):
    """A store without a file."""

    def __init__(self) -> None:
        pass  # the base class would open one

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> "_Nowhere":
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        pass


def path_being_saved() -> str | None:
    """Return the path that Keras, somewhere among our callers, is saving to."""
    codes = (saving_lib.save_model.__code__, saving_lib.save_weights_only.__code__)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    path = None if frame is None else frame.f_locals["filepath"]
    return str(path) if isinstance(path, (str, os.PathLike)) else None


class ModelCheckpointSeam(keras.callbacks.ModelCheckpoint):
    """Keras's choice of when to save and where; `write` does it (`_save_model`)."""

    def write(self, path: str) -> None:
        """Save to `path`."""
        raise NotImplementedError

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        path = self._get_file_path(epoch, batch, logs)
        if self._should_save_model(epoch, batch, logs, path):
            self.write(path)


def build_metrics(model: keras.Model, batch: Any) -> None:
    """Make the variables of metrics, if there are none yet (`_symbolic_build`)."""
    if not model._compile_metrics or model._compile_metrics.built:
        return
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=batch)


def start_fit_at(model: keras.Model, epoch: int | None) -> None:
    """Make `fit`, called on `on_train_begin`, start there (`_initial_epoch`)."""
    model._initial_epoch = epoch


# --- optimizers ---------------------------------------------------------------------


def settings_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return the optimizer's config, a learning-rate schedule or callable as it is.

    Keras warns when it serializes a lambda; nothing is serialized here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with tf.init_scope():  # it reads the learning rate, also while a step is traced
            config = optimizer.get_config()
    if not isinstance(optimizer._learning_rate, keras.Variable):
        config["learning_rate"] = optimizer._learning_rate
    return config


def copy_optimizer(
    optimizer: keras.optimizers.Optimizer, settings: dict[str, Any]
) -> keras.optimizers.Optimizer:
    """Return a new, unbuilt optimizer of the same type.

    `_exclude_from_weight_decay*` are not in Keras's config and are copied by name.
    """
    twin = type(optimizer).from_config(settings)
    for name, value in vars(optimizer).items():
        if name.startswith("_exclude_from_weight_decay"):
            setattr(twin, name, copy.copy(value))
    return twin


def methods_of_instance(optimizer: keras.optimizers.Optimizer) -> set[str]:
    """Return the methods that were replaced on the object, not in its class."""
    kind = type(optimizer)
    return {n for n in vars(optimizer) if callable(getattr(kind, n, None))}


def behaves_as(
    optimizer: keras.optimizers.Optimizer, kind: type[keras.optimizers.Optimizer]
) -> bool:
    """Whether a step is that of `kind`, though the class may be a subclass.

    None of what `kind` consists of, or takes as an argument, may be replaced in a
    subclass or on the object, but for how it is made and `replace_all_reduce`.
    """
    subclasses = [c for c in type(optimizer).__mro__ if c not in kind.__mro__]
    replaced = methods_of_instance(optimizer).union(*map(vars, subclasses))
    consists_of = {*dir(kind), *inspect.signature(kind).parameters}
    changed = replaced & consists_of - _HOW_IT_IS_MADE - {"_all_reduce_sum_gradients"}
    return isinstance(optimizer, kind) and not changed


def clips_by_itself(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the class overrides `_clip_gradients` or `_clip_by_norm`."""
    kind, stock = type(optimizer), keras.optimizers.Optimizer
    return (
        kind._clip_gradients is not stock._clip_gradients
        or kind._clip_by_norm is not stock._clip_by_norm
    )


_HOW_IT_IS_MADE = {
    *("__init__", "get_config", "from_config", "__doc__", "__module__"),
    *("__annotations__", "__firstlineno__", "__static_attributes__"),
}


def share_iterations(
    optimizer: keras.optimizers.Optimizer, other: keras.optimizers.Optimizer
) -> None:
    """Make `optimizer` count its steps in the variable of `other`.

    The variable it had stays in `_variables`: TensorFlow cannot checkpoint a tracked
    list from which something was removed.
    """
    optimizer._unused_iterations = optimizer._iterations
    optimizer._iterations = other._iterations


class _Adopted(keras.Variable):
    """A `tf.Variable` as a Keras variable: the same memory.

    Keras's optimizers take both (`_initialize_with_initializer`, `_path`).
    """

    def __init__(self, variable: tf.Variable):
        self._adopted = variable
        name = variable.name.split(":")[0]
        super().__init__(
            initializer="zeros",  # is not asked
            shape=variable.shape,
            dtype=variable.dtype.name,
            trainable=variable.trainable,
            name=name.replace("/", "_"),
        )
        self._path = name

    def _initialize_with_initializer(self, initializer: Any) -> None:
        self._initialize(self._adopted)


def as_keras_variable(variable: Any) -> keras.Variable:
    """Return a `tf.Variable` as a `keras.Variable`, and that as it is."""
    return variable if isinstance(variable, keras.Variable) else _Adopted(variable)


class _Scalar(keras.Variable):
    """A variable that `float` and `int` take under every strategy.

    `tf.distribute`'s variables cannot be converted, `keras.Variable` tries to.
    """

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())


def make_scalars_readable(optimizer: keras.optimizers.Optimizer) -> None:
    """Let `float` and `int` take the optimizer's learning rate and iterations."""
    for variable in (optimizer._iterations, optimizer._learning_rate):
        if type(variable) is keras.Variable:
            variable.__class__ = _Scalar


@tracking.no_automatic_dependency_tracking
def remember_variables(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> None:
    """Build an optimizer, without moving averages (`Optimizer.build`).

    Its indices count variables that are trained; those that gradients overwrite follow.
    """
    trained_first = sorted(variables, key=overwrites_with_gradient)
    optimizer._trainable_variables_indices = {
        optimizer._var_key(v): i for i, v in enumerate(trained_first)
    }
    optimizer._trainable_variables = variables[:]
    optimizer.built = True


def replace_all_reduce(
    optimizer: keras.optimizers.Optimizer, function: Callable[[Any], Any]
) -> None:
    """Replace how this instance sums `(gradient, variable)` pairs over replicas."""
    optimizer._all_reduce_sum_gradients = function


def own_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables the optimizer itself tracks, not its inner ones."""
    return [v for v in optimizer._variables if v is not optimizer._unused_iterations]


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return the model variables the optimizer was built with."""
    return optimizer._trainable_variables


def drop_missing_gradients(
    optimizer: keras.optimizers.Optimizer, gradients: Any, variables: Any
) -> tuple[list[Any], list[Any]]:
    """Drop pairs whose gradient is None, with Keras's own warning."""
    return optimizer._filter_empty_gradients(gradients, variables)


def check_known(optimizer: keras.optimizers.Optimizer, variables: Any) -> None:
    """Raise `ValueError` for variables the optimizer was not built with."""
    optimizer._check_variables_are_known(variables)


def known_variables(
    optimizer: keras.optimizers.Optimizer, variables: Any
) -> list[keras.Variable]:
    """Return, for each variable, the object that the optimizer was built with.

    All replicas then have the same one, which is how TensorFlow knows that it is one.
    """
    known = {optimizer._var_key(v): v for v in optimizer._trainable_variables}
    return [known[optimizer._var_key(v)] for v in variables]


def variable_index(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Return the position of `variable` among those the optimizer was built with."""
    return optimizer._get_variable_index(variable)


def uses_weight_decay(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether `exclude_from_weight_decay` leaves the variable in."""
    return optimizer._use_weight_decay(variable)


class CoupledDecay(keras.optimizers.Optimizer):
    """An optimizer that applies `weight_decay` in `update_step`.

    Keras does it apart from the gradient, in `_apply_weight_decay`.
    """

    def _apply_weight_decay(self, variables: Any) -> None:
        pass


def overwrites_with_gradient(variable: Any) -> bool:
    """Whether Keras overwrites the variable by its gradient (float8 scales)."""
    return getattr(variable, "overwrite_with_gradient", False)

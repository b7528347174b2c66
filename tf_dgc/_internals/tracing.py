"""Private names for what is being traced, compiled or executed."""

import os
import traceback
from collections.abc import Iterable
from types import FrameType

import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import control_flow_util
from tensorflow.python.util import _pywrap_util_port


def num_functions() -> int:
    """Return the number of graph functions in the runtime (`context.Context`)."""
    return len(eager_context.context().list_function_names())


def is_tracing(frame: FrameType | None) -> bool:
    """Whether a stack is tracing a `tf.function`."""
    # Only for a time limit: tracing in one thread cannot be noticed from another one
    # otherwise, and takes longer than a step.
    return any(f.f_code.co_filename == _TRACING for f, _ in traceback.walk_stack(frame))


_TRACING = func_graph.__file__  # `func_graph_from_py_func` calls the Python function


def is_executing(frames: Iterable[FrameType]) -> bool:
    """Whether one of these innermost frames of threads may be in TensorFlow."""
    return any(f.f_code.co_filename.startswith(_TENSORFLOW) for f in frames)


_TENSORFLOW = os.path.join(os.path.dirname(tf.__file__), "")


def uses_onednn() -> bool:
    """Whether TensorFlow uses oneDNN's kernels on CPUs (`IsMklEnabled`)."""
    return _pywrap_util_port.IsMklEnabled()


def leave_unordered(result: tf.Tensor) -> None:
    """Let the operation of a tensor run as soon as its inputs are available."""
    # A stateful operation without a resource would otherwise wait for all earlier ones
    # (`AutomaticControlDependencies`).
    if not isinstance(result, ops.EagerTensor):
        manager = result.graph.experimental_acd_manager
        if manager is not None:  # within a `tf.function`
            manager.run_independently(result.op)


def in_xla_context() -> bool:
    """Whether the graph being built will be compiled by XLA."""
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )

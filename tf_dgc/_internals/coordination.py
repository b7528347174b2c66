"""Private names of TensorFlow's coordination service, and of its context."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context as eager_context


def has_coordination_service() -> bool:
    """Whether this process takes part in TensorFlow's coordination service."""
    return eager_context.context().coordination_service is not None


def is_too_late_for_a_cluster() -> bool:
    """Whether TensorFlow's runtime has started without a cluster (`Context`)."""
    context = eager_context.context()
    return context._context_handle is not None and context._collective_leader is None


def is_in_a_cluster() -> bool:
    """Whether TensorFlow has connected this process to other workers (`Context`)."""
    context = eager_context.context()
    return context._context_handle is not None and bool(context._collective_leader)


def eager_context_capsule() -> Any:
    """Return the capsule of the `TFE_Context` (`Context._context_handle`)."""
    context = eager_context.context()
    context.ensure_initialized()
    return context._context_handle


@contextlib.contextmanager
def enabling_collectives_by(enable: Callable[[Any, bytes], None]) -> Iterator[None]:
    """Connect to the other workers by `enable(context_capsule, server_def)` within."""
    # Replaces `pywrap_tfe.TFE_EnableCollectiveOps`, in which
    # `Context.ensure_initialized` holds Python's lock until all workers are there. No
    # other function of a module is replaced, and only while a strategy is created.
    stock = pywrap_tfe.TFE_EnableCollectiveOps
    pywrap_tfe.TFE_EnableCollectiveOps = enable
    try:
        yield
    finally:
        pywrap_tfe.TFE_EnableCollectiveOps = stock


def configure_coordination(
    cluster: Any, heartbeat_seconds: float, start_seconds: float
) -> None:
    """Set timeouts of the coordination service, before a strategy is created."""
    # As `CollectiveAllReduceExtended._initialize_multi_worker`, except for the
    # timeouts.
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


def start_daemon_thread(call: Callable[[], Any], name: str) -> None:
    """Call in a daemon thread, or here, as Python 3.12 starts none at its end."""
    try:
        threading.Thread(target=call, name=name, daemon=True).start()
    except RuntimeError:
        call()

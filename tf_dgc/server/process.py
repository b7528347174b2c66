"""The server's process: listens where it is told, and serves until all have left."""

import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import tensorflow as tf

from tf_dgc._internals import rpc
from tf_dgc.cluster import tf_config
from tf_dgc.server import messages, tasks
from tf_dgc.server.loop import Loop
from tf_dgc.server.members import Limits
from tf_dgc.server.saved import Saved
from tf_dgc.server.tasks import Task

_WAKE_SECONDS = 0.2


def find_task() -> Task | None:
    """Return this process's task; serve, if it is the server, and end the process.

    None outside of a cluster, while a saved model is loaded.
    """
    if tf_config.is_loading() and not tasks.is_cluster():
        return None
    task = tasks.find()
    if task.worker is None:
        listened = serve(task)
        leave(listened)
    return task


def leave(listened: rpc.Server) -> NoReturn:
    """End this process, in order, while what listened still exists.

    Whoever destroys that waits for all who called, also for a process that was stopped
    and reads no reply.

    Args:
        listened: result of `serve`.
    """
    del listened  # a caller has it too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(task: Task) -> rpc.Server:
    """Serve the workers of a cluster, and return when they have left.

    Args:
        task: this process's task, a server.

    Returns:
        What listened; see `leave`.

    Raises:
        RuntimeError: if it cannot listen on its address, write its checkpoint, or go
            on from it.
        ValueError: for an environment variable that is not a number of seconds.
    """
    limits, say = Limits.of_environment(), _speaker(*task.shard)
    saved = Saved.of_environment(say, task.shard)
    try:
        _try_to_bind(task.server)
        transport = rpc.Server(task.server, 2 * task.num_workers)
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise RuntimeError(
            f"tf_dgc: the server cannot listen on {task.server}: {error}"
        ) from error
    say(f"listens on {task.server}, for {task.num_workers} workers")
    if not (task.is_loopback or any(messages.secret_words())):
        say(
            "WARNING: whoever reaches this address can train the model. Set the same "
            f"{messages.SECRET_VARIABLE} for all processes (docs/server.md)."
        )
    given = transport, task.num_workers, limits
    loop = Loop(*given, say=say, saved=saved, shard=task.shard)
    done = threading.Event()
    waker = threading.Thread(target=_wake, args=(transport, done), daemon=True)
    waker.start()
    try:
        loop.run()
    finally:
        done.set()
        waker.join()
    return transport


def _try_to_bind(address: str) -> None:
    """Raise `OSError` or `ValueError` if nobody can listen there, as TensorFlow waits.

    As its servers do, with `SO_REUSEADDR`: a port that `tf-dgc run` holds is free.
    """
    host, _, port = address.rpartition(":")
    family, kind, *_, place = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(place)


def _wake(transport: rpc.Server, done: threading.Event) -> None:
    """Let the loop look at the time, again and again."""
    while not done.wait(_WAKE_SECONDS):
        transport.wake()


def _speaker(index: int, number: int) -> Callable[[str], None]:
    """Return what prints lines of the log."""
    name = "server" if number == 1 else f"server {index} of {number}"

    def say(line: str) -> None:
        print(f"tf_dgc {name}: {line}", flush=True)

    return say

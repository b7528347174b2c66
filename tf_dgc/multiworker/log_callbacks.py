"""Keras's callbacks that write logs: the first worker writes if all have one path."""

import json
import os
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.multiworker import consensus, saving


def without_shared_logs(strategy: tf.distribute.Strategy, callbacks: Any) -> Any:
    """Return the callbacks of a `fit` that this worker calls; call it on every worker.

    On workers other than the first, a callback that logs to a path of the first
    worker's is left out. A `CallbackList` is not changed.
    """
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    flat = keras.tree.flatten(callbacks) if callbacks and not is_list else []
    paths = {i: _path(callback) for i, callback in enumerate(flat) if _path(callback)}
    text = json.dumps(sorted(set(paths.values())))
    texts = consensus.exchange_texts(strategy, text, "begin to train")
    if is_list or consensus.is_chief(strategy):
        return callbacks
    first_paths = json.loads(next(iter(texts.values())))
    return [c for i, c in enumerate(flat) if paths.get(i) not in first_paths]


def _path(callback: keras.callbacks.Callback) -> str:
    """Return where one of Keras's own callbacks logs; empty for other callbacks."""
    # A derived class may do more than log, and all workers may have to take part.
    path = ""
    if type(callback) is keras.callbacks.TensorBoard:
        path = callback.log_dir
    elif type(callback) is keras.callbacks.CSVLogger:
        path = callback.filename
    return os.path.realpath(path) if path and saving.is_local(path) else path

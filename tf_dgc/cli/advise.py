"""`tf-dgc advise`: the fastest method for a model, before the first run."""

import argparse
import importlib
import inspect
import json
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.advice.advise import Advice, advise
from tf_dgc.arguments import show
from tf_dgc.cli import listing
from tf_dgc.multiworker import consensus, tf_config, workers
from tf_dgc.multiworker.strategy import multi_worker_strategy
from tf_dgc.reports import page

_COLUMNS = (
    *("workers", "method", "collective"),
    *("step (ms)", "interval", "of dense", "examples/s", "bytes sent"),
)


def main(options: argparse.Namespace) -> int:
    """Print the advice, on the first worker only; return the exit code."""
    settings = {
        name: getattr(options, name)
        for name in ("bandwidth", "latency", "methods")
        if getattr(options, name) is not None
    }
    try:
        strategy = multi_worker_strategy() if options.measure else None
        is_chief = strategy is None or consensus.is_chief(strategy)
        if strategy is None:
            _check_single_worker()
        if is_chief:
            _check_outputs(options)
        with tf_config.single_worker():
            model = _create_model(options.model, options.imports)
        advice = advise(
            model,
            batch_size=options.batch_size,
            num_workers=options.workers,
            length=options.length,
            strategy=strategy,
            seconds=options.seconds,
            on_progress=_show_progress if sys.stderr.isatty() and is_chief else None,
            **settings,
        )
        if is_chief:
            _write(advice, options)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"tf-dgc advise: {error}")
    return 0


def _show_progress(done: int, total: int) -> None:
    """Show a bar of the timed methods, in a terminal."""
    bar = "=" * done + "." * (total - done)
    end = "\n" if done == total else ""
    print(
        f"\rtiming methods [{bar}] {done}/{total}", end=end, file=sys.stderr, flush=True
    )


def _check_single_worker() -> None:
    tf_config.check_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    num_workers = len(workers.addresses(resolver.cluster_spec()))
    if num_workers > 1 and os.environ.get(workers.SINGLE_WORKER_VARIABLE) != "1":
        raise ValueError(
            f"TF_CONFIG names {num_workers} workers. Pass --measure on all of them, "
            "instead of --bandwidth and --latency, to measure their links; to advise "
            "for given links, start one process without `tf-dgc run`, and unset "
            f"TF_CONFIG or set {workers.SINGLE_WORKER_VARIABLE}=1."
        )


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise an error before any step is timed if an output cannot be written."""
    if options.html:
        page.check_figures()
    for path in filter(None, (options.json, options.html)):
        exists = os.path.exists(path)
        with open(path, "a"):
            pass
        if not exists:
            os.remove(path)


def _create_model(name: str, imports: Sequence[str]) -> keras.Model:
    if os.getcwd() not in sys.path:  # as in a console script
        sys.path.insert(0, os.getcwd())
    for module in imports:
        if _import(module) is None:
            raise ValueError(f"there is no module of that name. Received: {module}")
    if name.endswith((".keras", ".h5")):
        return _load_model(name)
    module, _, function_name = name.rpartition(".")
    function: Any = getattr(_import(module), function_name, None)
    if function is None:
        raise ValueError(
            "the model must be a file that ends in .keras, or the name of a function "
            f"that returns one, such as keras.applications.ResNet50. Received: {name}"
        )
    is_application = function is getattr(keras.applications, function_name, None)
    model = function(weights=None) if is_application else _call(function, name)
    if not isinstance(model, keras.Model):
        raise ValueError(f"{name} must return a keras.Model. Received: {show(model)}")
    return model


def _call(function: Any, name: str) -> Any:
    """Return the result of a function of the user's."""
    if not callable(function):
        raise ValueError(f"{name} must be a function. Received: {show(function)}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(
            f"{name} must return a keras.Model without arguments: {error}"
        ) from error
    try:
        return function()
    except Exception as error:
        traceback.print_exc()
        raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error


def _import(name: str) -> types.ModuleType | None:
    """Return a module, or None if there is none of that name."""
    try:
        return importlib.import_module(name)
    except ValueError:  # an empty name
        return None
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            return None
        raise ImportError(f"{name} cannot be imported: {error}") from error
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported: {error}") from error


def _load_model(path: str) -> keras.Model:
    try:
        return keras.models.load_model(path, compile=True)
    except TypeError as error:  # Keras's error for an unknown class
        raise ValueError(
            f"{path} cannot be loaded. If it has custom layers, register them with "
            "`keras.saving.register_keras_serializable` in a module, and pass the "
            f"module's name with --import. {error}"
        ) from error


def _write(advice: Advice, options: argparse.Namespace) -> None:
    print(_text(advice))
    if options.json:
        text = json.dumps(advice.record(), indent=1)
        pathlib.Path(options.json).write_text(text + "\n")
    if options.html:
        pathlib.Path(options.html).write_text(advice.html(), encoding="utf-8")


def _text(advice: Advice) -> str:
    rows = [
        (
            str(row["workers"]),
            row["method"] + (" *" if row["advised"] else ""),
            row["collective"],
            f"{row['step_ms']:,.1f}",
            " to ".join(f"{ms:,.1f}" for ms in row["step_ms_interval"]),
            f"{row['of_dense']:.2f}",
            f"{row['examples_per_second']:,.0f}",
            f"{row['sent_bytes']:,}",
        )
        for row in advice.rows()
    ]
    head = f"{advice.model}, batches of {advice.batch_size} for each worker:\n"
    sentences = "\n".join(advice.sentences())
    return f"{head}\n{listing.text_table(_COLUMNS, rows)}\n\n{sentences}"

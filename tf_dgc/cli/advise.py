"""`tf-dgc advise`: which way to train is the fastest, before the first run."""

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
    *("workers", "method", "exchange"),
    *("step (ms)", "of dense", "examples/s", "bytes sent"),
)


def main(options: argparse.Namespace) -> int:
    """Print the advice; return the exit code. With `--measure` one worker prints."""
    given = {name: getattr(options, name) for name in ("bandwidth", "latency")}
    given["methods"] = options.methods
    try:
        strategy = multi_worker_strategy() if options.measure else None
        tells = strategy is None or consensus.is_chief(strategy)
        if strategy is None:
            _check_nobody_else()
        if tells:
            _check_files(options)
        with tf_config.single_worker():
            model = _model(options.model, options.imports)
        found = advise(
            model,
            batch_size=options.batch_size,
            num_workers=options.workers,
            length=options.length,
            strategy=strategy,
            seconds=options.seconds,
            **{name: value for name, value in given.items() if value is not None},
        )
        if tells:
            _tell(found, options)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"tf-dgc advise: {error}")
    return 0


def _tell(found: Advice, options: argparse.Namespace) -> None:
    print(_text(found))
    if options.json:
        text = json.dumps(found.record(), indent=1)
        pathlib.Path(options.json).write_text(text + "\n")
    if options.html:
        pathlib.Path(options.html).write_text(found.html(), encoding="utf-8")


def _check_files(options: argparse.Namespace) -> None:
    """Raise an error now if what is to be written at the end cannot be.

    Raises:
        ImportError: if matplotlib is not installed, for pictures.
        OSError: if a file cannot be written.
    """
    if options.html:
        page.check_pictures()
    for path in filter(None, (options.json, options.html)):
        there = os.path.exists(path)
        with open(path, "a"):
            pass
        if not there:
            os.remove(path)


def _check_nobody_else() -> None:
    """Raise `ValueError` if this is one of several workers.

    All of them would time their steps at once, perhaps on the same processors.
    """
    tf_config.check_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    number = len(workers.addresses(resolver.cluster_spec()))
    if number > 1 and os.environ.get(workers.SINGLE_WORKER_VARIABLE) != "1":
        raise ValueError(
            f"TF_CONFIG names {number} workers. Pass --measure on all of them, in "
            "place of --bandwidth and --latency, to have their links measured; for "
            "links that you describe start one process, without `tf-dgc run`, and "
            f"unset TF_CONFIG or set {workers.SINGLE_WORKER_VARIABLE}=1."
        )


def _model(name: str, imports: Sequence[str]) -> keras.Model:
    """Return the model of a file, or what a function of that name makes.

    Args:
        name: path of the file, or name of the function.
        imports: names of modules to be imported before.

    Raises:
        ImportError: for modules that import what is not there.
        ValueError: if there is no such model, or module.
    """
    if os.getcwd() not in sys.path:  # where this is a console script, it is not
        sys.path.insert(0, os.getcwd())
    for module in imports:
        if _import(module) is None:
            raise ValueError(f"there is no module of that name. Received: {module}")
    if name.endswith((".keras", ".h5")):
        return _load(name)
    module, _, function = name.rpartition(".")
    make: Any = getattr(_import(module), function, None)
    if make is None:
        raise ValueError(
            "the model must be a file that ends in .keras, or the name of a function "
            f"that makes one, as keras.applications.ResNet50. Received: {name}"
        )
    is_application = make is getattr(keras.applications, function, None)
    model = make(weights=None) if is_application else _called(make, name)
    if not isinstance(model, keras.Model):
        raise ValueError(f"{name} must make a keras.Model. Received: {show(model)}")
    return model


def _called(make: Any, name: str) -> Any:
    """Return what a function of the user's makes.

    Args:
        make: function; or whatever has that name.
        name: name of it.

    Raises:
        ValueError: if it is none, needs arguments, or raises an error, whose traceback
            is printed.
    """
    if not callable(make):
        raise ValueError(f"{name} must be a function. Received: {show(make)}")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(
            f"{name} must make a keras.Model without arguments: {error}"
        ) from error
    try:
        return make()
    except Exception as error:
        traceback.print_exc()
        raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error


def _import(name: str) -> types.ModuleType | None:
    """Return the module of that name; None if there is none.

    Raises:
        ImportError: if it is there, and imports what is not.
    """
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


def _load(path: str) -> keras.Model:
    try:
        return keras.models.load_model(path, compile=True)
    except TypeError as error:  # so Keras says that it does not know a class
        raise ValueError(
            f"{path} cannot be loaded. If it has layers of your own, register them by "
            "`keras.saving.register_keras_serializable` in a module, and pass its name "
            f"with --import. {error}"
        ) from error


def _text(found: Advice) -> str:
    rows = [
        (
            str(row["workers"]),
            row["method"] + (" *" if row["advised"] else ""),
            row["exchange"],
            f"{row['step_ms']:,.1f}",
            f"{row['of_dense']:.2f}",
            f"{row['examples_per_second']:,.0f}",
            f"{row['sent_bytes']:,}",
        )
        for row in found.rows()
    ]
    head = f"{found.model}, batches of {found.batch_size} for each worker:\n"
    said = "\n".join(found.sentences())
    return f"{head}\n{listing.text_table(_COLUMNS, rows)}\n\n{said}"

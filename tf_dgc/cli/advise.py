"""`tf-dgc advise`: which way to train is the fastest, before the first run."""

import argparse
import importlib
import json
import pathlib
import sys
from typing import Any

import keras

from tf_dgc.advice.advising import Advice, advise
from tf_dgc.cli import listing
from tf_dgc.cluster import meeting, tf_config
from tf_dgc.distribute.startup import multi_worker_strategy

_COLUMNS = (
    *("workers", "method", "exchange"),
    *("step (ms)", "of dense", "examples/s", "bytes sent"),
)


def main(options: argparse.Namespace) -> int:
    """Print the advice; return the exit code. With `--measure` one worker prints."""
    try:
        strategy = multi_worker_strategy() if options.measure else None
        with tf_config.alone():
            model = _model(options.model)
        found = advise(
            model,
            batch_size=options.batch_size,
            num_workers=options.workers,
            bandwidth=options.bandwidth,
            latency=options.latency,
            strategy=strategy,
            seconds=options.seconds,
            **({"methods": options.methods} if options.methods else {}),
        )
        if strategy is None or meeting.is_chief(strategy):
            _tell(found, options)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"tf-dgc advise: {error}")
    return 0


def _tell(found: Advice, options: argparse.Namespace) -> None:
    print(_text(found))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found.rows(), indent=1) + "\n")
    if options.html:
        pathlib.Path(options.html).write_text(found.html(), encoding="utf-8")


def _model(name: str) -> keras.Model:
    """Return the model of a file, or what a function of that name makes.

    Raises:
        ValueError: if there is neither.
    """
    if name.endswith((".keras", ".h5")):
        return keras.models.load_model(name, compile=True)
    module, _, function = name.rpartition(".")
    try:
        make: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(
            "the model must be a file that ends in .keras, or the name of a function "
            f"that makes one, as keras.applications.ResNet50. Received: {name}"
        ) from None
    is_application = make.__module__.startswith("keras.src.applications")
    return make(weights=None) if is_application else make()


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
    return f"{head}\n{listing.table(_COLUMNS, rows)}\n\n{said}"

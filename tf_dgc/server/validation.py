"""Checks of `ServerOptimizer`'s arguments, and of the model specs of workers."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf

from tf_dgc import arguments
from tf_dgc._internals import keras_optimizers, optimizer_copies, tracing
from tf_dgc.arguments import check_whole, show
from tf_dgc.compressors import Compressor
from tf_dgc.compressors.topk import is_top_k
from tf_dgc.optimizers import unsupported
from tf_dgc.server import model_spec
from tf_dgc.server.messages import MAX_WORDS, Kind, decode_text
from tf_dgc.server.model_spec import ModelSpec
from tf_dgc.server.staleness_correction import StalenessCorrection
from tf_dgc.server.tasks import Task

MODES = ("sync", "async", "ssp", "backup")


def check_mode(mode: str, staleness: int | None, quorum: int | None) -> None:
    """Raise `ValueError` for an unknown mode, and for `staleness` or `quorum`."""
    if mode not in MODES:
        raise ValueError(
            f"`mode` must be one of {', '.join(map(repr, MODES))}. "
            f"Received: mode={show(mode)}"
        )
    if (mode == "ssp") is (staleness is None):
        raise ValueError(
            'Mode "ssp" needs `staleness`, the maximum number of completed steps that '
            "a worker is ahead of the slowest, for example "
            '`ServerOptimizer(inner, mode="ssp", staleness=3)`; omit it in other '
            f"modes. Received: mode={show(mode)}, staleness={show(staleness)}"
        )
    if (mode == "backup") is (quorum is None):
        raise ValueError(
            'Mode "backup" needs `quorum`, the number of pushes that form a step, for '
            'example `ServerOptimizer(inner, mode="backup", quorum=3)` with four '
            f"workers; omit it in other modes. Received: mode={show(mode)}, "
            f"quorum={show(quorum)}"
        )
    if staleness is not None:
        check_whole("staleness", staleness, 0, " of steps")
    if quorum is not None:
        check_whole("quorum", quorum, 1, " of pushes")


def check_backup(
    mode: str, quorum: int | None, feedback: bool, num_workers: int
) -> None:
    """Raise `ValueError` for an unreachable quorum, or if late pushes got lost."""
    if quorum is not None and quorum > num_workers:
        raise ValueError(
            f"`quorum` must be at most the number of workers, {num_workers}. "
            f"Received: quorum={quorum}"
        )
    if mode == "backup" and not feedback:
        raise ValueError(
            'Mode "backup" needs error feedback: late pushes return to the residual. '
            "Use a compressor with error feedback, or pass `error_feedback=True`. "
            "Received: no error feedback"
        )


def check_staleness_correction(
    correction: StalenessCorrection | None, mode: str, staleness: int | None, pull: str
) -> None:
    """Raise `ValueError` for other classes, and if it does not fit the mode."""
    if correction is None:
        return
    if not isinstance(correction, StalenessCorrection):
        raise ValueError(
            "`staleness_correction` must be a `tf_dgc.StalenessCorrection`, for "
            'example `tf_dgc.StalenessCorrection("rate")`, or None. Received: '
            f"staleness_correction={show(correction)}"
        )
    if mode not in ("async", "ssp") or staleness == 0:
        raise ValueError(
            "`staleness_correction` is for pushes computed with old weights, as in "
            'mode "async", or "ssp" with a staleness above 0. Received: '
            f"staleness_correction={correction!r}, mode={show(mode)}, "
            f"staleness={show(staleness)}"
        )
    if correction.rule == "delay" and pull != "whole":
        raise ValueError(
            '`StalenessCorrection("delay")` compares the weights with the worker\'s, '
            'and needs all of them. Pass `pull="whole"`. Received: '
            f"pull={show(pull)}"
        )


def check_compressor(compressor: Compressor) -> None:
    """Raise `ValueError` for a compressor whose messages a server cannot decode."""
    problems = {
        "is a vote of all workers in one round": compressor.aggregation == "vote",
        "keeps a state that the server does not have": bool(
            compressor.state((64, 64)) or compressor.common_state()
        ),
        "reads the residual": compressor.reads_residual,
        "is not a sum of the workers' messages": not compressor.additive,
    }
    for problem, applies in problems.items():
        if applies:
            raise ValueError(
                "A server decodes each push by itself, so the compressor must be "
                "stateless and independent of other workers, such as `TopK`, "
                '`RandomK`, `Uniform8Bit`, `TernGrad`, `Float16` or "none". '
                f"Received: {compressor!r}, which {problem}"
            )


def check_pull(pull: str, sparsity: float | None, compressor: Compressor) -> None:
    """Raise `ValueError` for an unknown pull, and if its size is not determined."""
    if pull not in ("whole", "sparse"):
        raise ValueError(
            f'`pull` must be "whole" or "sparse". Received: pull={show(pull)}'
        )
    if sparsity is not None:
        arguments.check_sparsity(sparsity, "pull_sparsity")
    if pull == "whole" and sparsity is not None:
        raise ValueError(
            '`pull_sparsity` is for `pull="sparse"`. Received: '
            f"pull={show(pull)}, pull_sparsity={show(sparsity)}"
        )
    is_constant = is_top_k(compressor) and not callable(compressor.sparsity)
    if pull == "sparse" and sparsity is None and not is_constant:
        raise ValueError(
            "The size of a sparse pull follows only from `TopK` with a constant "
            "sparsity. Pass `pull_sparsity`, for example 0.99. Received: "
            f"compressor={compressor!r}, pull_sparsity=None"
        )


def check_strategy() -> None:
    """Raise `ValueError` in the scope of a strategy."""
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy():
        raise ValueError(
            "With a server each worker trains its own model, without a strategy. "
            "Create model and optimizer outside of `strategy.scope()`; or use "
            "`DGCOptimizer`, whose workers communicate directly. Received: "
            f"{show(strategy)}"
        )


def check_inner(inner: keras.optimizers.Optimizer, compressor: Compressor) -> None:
    """Raise `ValueError` for an inner optimizer that a server cannot run."""
    unsupported.check_rule_numbers(inner, compressor)
    if inner.use_ema:
        raise ValueError(
            "`use_ema` would average the weights on the server, where workers do not "
            "see the average. Average on a worker, with a callback. "
            "Received: use_ema=True"
        )
    if inner.gradient_accumulation_steps:
        raise ValueError(
            "A worker pushes in every call, so `gradient_accumulation_steps` is not "
            "supported. Use a larger batch, or a higher sparsity. Received: "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps}"
        )
    rate = keras_optimizers.learning_rate_of(inner)
    if not isinstance(
        rate, (keras.Variable, keras.optimizers.schedules.LearningRateSchedule)
    ):
        raise ValueError(
            "The server evaluates the learning rate and cannot run a function of the "
            "script. Pass a number, which callbacks may change, or one of "
            f"`keras.optimizers.schedules`. Received: learning_rate={show(rate)}"
        )
    if iterations := int(inner.iterations):
        raise ValueError(
            "The server counts the iterations from 0. Pass a new optimizer; to resume "
            "an earlier run, use `tf_dgc.callbacks.BackupAndRestore`. Received: "
            f"inner={inner!r}, whose `iterations` is {iterations}"
        )
    check_config(inner)


def check_config(inner: keras.optimizers.Optimizer) -> None:
    """Raise `ValueError` unless a config describes its unbuilt optimizer completely."""
    requirement = (
        "The server builds the inner optimizer from its config, so `get_config` must "
        "return all of its attributes, and the constructor must accept them"
    )
    try:
        rebuilt = model_spec.create_from_config(
            keras.saving.serialize_keras_object(inner)
        )
    except Exception as error:  # any class, from a user's code
        raise ValueError(
            f"{requirement}. `{type(inner).__name__}` cannot be built from its config: "
            f"{type(error).__name__}: {error}. Received: inner={inner!r}"
        ) from error
    if differences := optimizer_copies.differences(inner, rebuilt):
        raise ValueError(
            f"{requirement}. Or use an optimizer without a server, which copies the "
            f"object. Received: inner={inner!r}, whose config lacks that "
            f"{', '.join(differences)}"
        )


def check_variables(variables: Sequence[keras.Variable]) -> None:
    """Raise `ValueError` for variables that a server cannot train."""
    default = tf.distribute.get_strategy()
    for v in variables:
        if not default.extended.variable_created_in_scope(v.value):
            raise ValueError(
                "With a server each worker trains its own model, without a strategy. "
                "Move the call that creates the model out of "
                f"`with strategy.scope():`. Received: variable {v.path}, created "
                "within it"
            )
        if v.constraint is not None:
            raise ValueError(
                "A constraint would apply on the server, which cannot run it. Use a "
                "regularizer, or weight decay. "
                f"Received: variable {v.path} with constraint={show(v.constraint)}"
            )
        if keras_optimizers.overwrites_with_gradient(v):
            raise ValueError(
                "Variables that gradients overwrite, such as the scales of float8 "
                "layers, must be equal on all workers, and pushes do not contain them. "
                f"Use another dtype policy. Received: variable {v.path}"
            )


def check_num_variables(task: Task | None, variables: Sequence[keras.Variable]) -> None:
    """Raise `ValueError` if there are more servers than variables."""
    if task and len(task.servers) > len(variables):
        raise ValueError(
            "A server holds whole variables, so there cannot be more servers than "
            f"variables. Received: {len(task.servers)} tasks of type `ps` in "
            f"TF_CONFIG, and {len(variables)} variables"
        )


def check_num_gradients(number: int, variables: Sequence[keras.Variable]) -> None:
    """Raise `ValueError` unless every variable has a gradient."""
    if number != len(variables):
        raise ValueError(
            "A push contains all variables, so each needs a gradient in every step. "
            "Set `trainable=False` on layers without. Received: "
            f"{number} gradients for {len(variables)} variables"
        )


def check_not_compiled() -> None:
    """Raise `ValueError` in XLA."""
    if tracing.in_xla_context():
        raise ValueError(
            "XLA cannot compile a step that communicates with a server. Compile the "
            "model with `jit_compile=False`. Received: a step with `jit_compile=True`"
        )


def check_task(task: Task | None, optimizer: keras.optimizers.Optimizer) -> Task:
    """Return this process's task; raise `RuntimeError` if there is none."""
    if task is None:
        raise RuntimeError(
            "This optimizer was loaded outside of a cluster, to inspect the model or "
            "to predict. To train, start the script with `tf-dgc run --servers 1 "
            f"--workers N`. Received: {optimizer!r}"
        )
    return task


# Checks of a model spec, which may be anything: before the server creates an object of
# a class that it names, or allocates memory that the machine does not have.

_MAX_SPEC_WORDS = 2**22  # 16 MiB, the spec of a hundred thousand variables
_MAX_PUSH_FACTOR = 8  # words per word of the model; more than any compressor needs

MAX_RUNS = 2**31
"""Maximum number of runs."""

_SPEC_TYPES = {
    "version": str,
    "settings": dict,
    "num_workers": int,
    "shard": list,
    "run": int,
    "optimizer": dict,
    "compressor": dict,
    "variables": list,
}
_VARIABLE_TYPES = {
    "shape": list,
    "dtype": str,
    "exempt": bool,
    "table": bool,
    "decays": bool,
    "name": str,
}
_MODULES = ("keras.optimizers", "keras.optimizers.schedules")
_NUMBER_DTYPES = re.compile(r"bool|u?int\d+|b?float\d+")


def parse_request(body: np.ndarray) -> Any:
    """Return the JSON text of a request, int32 `[w]`, unchecked."""
    try:
        return json.loads(decode_text(body))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def max_words(kind: Kind, num_words: int) -> int:
    """Return the maximum number of words of a request."""
    if kind == Kind.JOIN:
        return _MAX_SPEC_WORDS
    if kind == Kind.INITIALIZE:
        return num_words
    if kind == Kind.PUSH:
        return _MAX_PUSH_FACTOR * num_words + MAX_WORDS
    return MAX_WORDS


def check_model_spec(spec: ModelSpec) -> None:
    """Raise an error, of any class, unless a model can be created from a spec."""
    _check_types(spec, _SPEC_TYPES)
    if not 0 <= spec["run"] < MAX_RUNS:
        raise ValueError(f"invalid run: {spec['run']}")
    _check_classes(spec["optimizer"])
    _check_classes(spec["compressor"])
    settings = spec["settings"]
    mode, staleness = settings["mode"], settings["staleness"]
    check_mode(mode, staleness, settings["quorum"])
    correction = None
    if settings["correction"] or settings["correction_strength"] is not None:
        correction = StalenessCorrection(
            settings["correction"], settings["correction_strength"]
        )
    check_staleness_correction(correction, mode, staleness, settings["pull"])
    _check_types(settings, {"error_feedback": bool, "seed": int})
    for variable in spec["variables"]:
        _check_types(variable, _VARIABLE_TYPES)
        if not all(isinstance(n, int) and n >= 0 for n in variable["shape"]):
            raise ValueError(f"invalid shape: {variable['shape']}")
        if not tf.as_dtype(variable["dtype"]).is_floating:
            raise ValueError(f"invalid dtype: {variable['dtype']}")
    size, memory = 4 * model_spec.model_words(spec), psutil.virtual_memory().total
    if size > memory:
        raise ValueError(
            f"its variables have {size:,} bytes, and the server's machine {memory:,}"
        )


def _check_types(values: Any, types: Mapping[str, type]) -> None:
    for name, expected in types.items():
        if not isinstance(values[name], expected):
            raise ValueError(f"invalid {name}: {values[name]!r:.100}")


def _check_classes(config: Any) -> None:
    """Raise `ValueError` if Keras would create an object of another class."""
    # A layer, for example, would allocate as much memory as its config says.
    nodes = [config]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if "class_name" in node and not _is_allowed(node):
                names = node.get("module"), node["class_name"]
                raise ValueError(
                    "the server cannot create the optimizer or the compressor from "
                    "their configs; it supports the classes of Keras and of tf_dgc, "
                    "and those that its own process has registered with Keras. "
                    f"Received: {names!r:.100}"
                )
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node


def _is_allowed(config: dict[str, Any]) -> bool:
    if config["class_name"] == "__numpy__":
        return bool(_NUMBER_DTYPES.fullmatch(config["config"]["dtype"]))
    registered = config.get("registered_name")
    if registered:
        return keras.saving.get_registered_object(registered) is not None
    return config.get("module") in _MODULES

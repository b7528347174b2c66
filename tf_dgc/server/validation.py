"""What an optimizer with a server checks before its first step."""

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
from tf_dgc.compressors import Compressor, TopK
from tf_dgc.optimizers import unsupported
from tf_dgc.server import model_spec
from tf_dgc.server.messages import MAX_WORDS, Kind, to_text
from tf_dgc.server.model_spec import ModelSpec
from tf_dgc.server.tasks import Task

MODES = ("sync", "async", "ssp", "backup")


def check_mode(mode: str, staleness: int | None, quorum: int | None) -> None:
    """Raise `ValueError` for a mode that there is not, or a number that it has not.

    Args:
        mode: way in which workers wait for each other.
        staleness: number of completed steps that one may be ahead.
        quorum: number of pushes that make a step.
    """
    if mode not in MODES:
        raise ValueError(
            f"`mode` must be one of {', '.join(map(repr, MODES))}. "
            f"Received: mode={show(mode)}"
        )
    if (mode == "ssp") is (staleness is None):
        raise ValueError(
            'Mode "ssp" needs `staleness`, the number of completed steps that a worker '
            "may be ahead of the slowest, for example "
            '`ServerOptimizer(inner, mode="ssp", staleness=3)`; the others take none. '
            f"Received: mode={show(mode)}, staleness={show(staleness)}"
        )
    if (mode == "backup") is (quorum is None):
        raise ValueError(
            'Mode "backup" needs `quorum`, the number of pushes that make a step, for '
            'example `ServerOptimizer(inner, mode="backup", quorum=3)` of four '
            f"workers; the others take none. Received: mode={show(mode)}, "
            f"quorum={show(quorum)}"
        )
    if staleness is not None:
        check_whole("staleness", staleness, 0, " of steps")
    if quorum is not None:
        check_whole("quorum", quorum, 1, " of pushes")


def check_backup(mode: str, quorum: int | None, feedback: bool, number: int) -> None:
    """Raise `ValueError` for a quorum that never comes, or pushes that would be lost.

    Args:
        mode: way in which workers wait for each other.
        quorum: number of pushes that make a step.
        feedback: whether workers keep what they do not send.
        number: number of workers, N.
    """
    if quorum is not None and quorum > number:
        raise ValueError(
            f"`quorum` must be at most the number of workers, {number}. "
            f"Received: quorum={quorum}"
        )
    if mode == "backup" and not feedback:
        raise ValueError(
            'In mode "backup" a push that comes too late goes back into the residual '
            "of its worker, so there must be one. Use a method with error feedback, or "
            "pass `error_feedback=True`. Received: a method without"
        )


def check_correction(
    correction: str | None,
    strength: float | None,
    mode: str,
    staleness: int | None,
    pull: str,
) -> None:
    """Raise `ValueError` for a correction that there is not, or nothing to correct.

    Args:
        correction: correction for staleness, or None.
        strength: strength of it.
        mode: way in which workers wait for each other.
        staleness: number of completed steps that one may be ahead.
        pull: weights that are pulled.
    """
    if correction not in (None, "rate", "delay"):
        raise ValueError(
            '`correction` must be None, "rate" or "delay". Received: '
            f"correction={show(correction)}"
        )
    if correction and (mode not in ("async", "ssp") or staleness == 0):
        raise ValueError(
            "`correction` is for pushes that were computed by old weights, as in mode "
            '"async", or "ssp" with a staleness above 0. Received: '
            f"correction={show(correction)}, mode={show(mode)}, "
            f"staleness={show(staleness)}"
        )
    if correction == "delay" and pull != "whole":
        raise ValueError(
            '`correction="delay"` compares the weights with those that a worker was '
            f'given, all of them. Pass `pull="whole"`. Received: pull={show(pull)}'
        )
    if strength is not None and (correction != "delay" or not strength > 0):
        raise ValueError(
            '`correction_strength` is a positive number for `correction="delay"`. '
            f"Received: correction_strength={show(strength)}, "
            f"correction={show(correction)}"
        )


def check_method(compressor: Compressor) -> None:
    """Raise `ValueError` for a method whose messages a server cannot take one by one.

    Args:
        compressor: method of what is pushed.
    """
    reasons = {
        "needs what others send in the same step": compressor.needs_others,
        "is a vote of all workers in one round": compressor.aggregation == "vote",
        "keeps a state that the server does not have": bool(
            compressor.state((64, 64)) or compressor.common_state()
        ),
        "looks at the residual": compressor.reads_residual,
        "is not the sum of what each worker sends": not compressor.additive,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(
            "A server takes pushes one by one, so a method must be of one worker at a "
            "time and without a state, such as `TopK`, `RandomK`, `Uniform8Bit`, "
            f'`TernGrad`, `Float16` or "none". Received: {compressor!r}, which '
            f"{found[0]}"
        )


def check_pull(mode: str, sparsity: float | None, compressor: Compressor) -> None:
    """Raise `ValueError` for pulls of which it is not known how much they send.

    Args:
        mode: weights that are pulled, "whole" or "sparse".
        sparsity: share of entries that a pull leaves out, or None.
        compressor: method of pushes.
    """
    if mode not in ("whole", "sparse"):
        raise ValueError(
            f'`pull` must be "whole" or "sparse". Received: pull={show(mode)}'
        )
    if sparsity is not None:
        arguments.check_sparsity(sparsity, "pull_sparsity")
    if mode == "whole" and sparsity is not None:
        raise ValueError(
            '`pull_sparsity` is about pulls of `pull="sparse"`. Received: '
            f"pull={show(mode)}, pull_sparsity={show(sparsity)}"
        )
    fixed = type(compressor) is TopK and not callable(compressor.sparsity)
    if mode == "sparse" and sparsity is None and not fixed:
        raise ValueError(
            "How much a sparse pull sends follows from `TopK` of a fixed sparsity, and "
            "of nothing else. Pass `pull_sparsity`, for example 0.99. Received: "
            f"compressor={compressor!r}, pull_sparsity=None"
        )


def check_strategy() -> None:
    """Raise `ValueError` within the scope of a strategy."""
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy():
        raise ValueError(
            "With a server each worker trains a model of its own, without a strategy. "
            "Make model and optimizer outside of `strategy.scope()`; or use "
            "`DGCOptimizer`, by which workers exchange directly. Received: "
            f"{show(strategy)}"
        )


def check_inner(inner: keras.optimizers.Optimizer, compressor: Compressor) -> None:
    """Raise `ValueError` for settings that cannot be had where the weights are not.

    And for a rule that makes no numbers of what the method sends.
    """
    unsupported.check_rule_numbers(inner, compressor)
    if inner.use_ema:
        raise ValueError(
            "`use_ema` averages weights where the optimizer is, which is the server, "
            "and workers would not see it. Average on a worker, by a callback. "
            "Received: use_ema=True"
        )
    if inner.gradient_accumulation_steps:
        raise ValueError(
            "A worker pushes in every call, and `gradient_accumulation_steps` has a "
            "step of several. Use a larger batch, or stronger compression. Received: "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps}"
        )
    rate = keras_optimizers.learning_rate_of(inner)
    kinds = keras.Variable, keras.optimizers.schedules.LearningRateSchedule
    if not isinstance(rate, kinds):
        raise ValueError(
            "The server evaluates the learning rate, and is not sent code. Pass a "
            "number, which callbacks may change, or one of "
            f"`keras.optimizers.schedules`. Received: learning_rate={show(rate)}"
        )
    if calls := int(inner.iterations):
        raise ValueError(
            "The server counts the iterations, from 0. Pass a new optimizer; to go on "
            "with an earlier run use `tf_dgc.callbacks.BackupAndRestore`. Received: "
            f"inner={inner!r}, whose `iterations` is {calls}"
        )
    check_config(inner)


def check_config(inner: keras.optimizers.Optimizer) -> None:
    """Raise `ValueError` unless the config states all of an optimizer.

    Args:
        inner: inner optimizer, unbuilt.
    """
    needed = (
        "The server builds the inner optimizer from its config, so `get_config` must "
        "return all that it consists of, and the constructor must take it"
    )
    try:
        again = model_spec.parse_model_spec(keras.saving.serialize_keras_object(inner))
    except Exception as error:  # whatever a user's class raises
        raise ValueError(
            f"{needed}. `{type(inner).__name__}` cannot be built from its config: "
            f"{type(error).__name__}: {error}. Received: inner={inner!r}"
        ) from error
    if lost := optimizer_copies.differences(inner, again):
        raise ValueError(
            f"{needed}. Or use an optimizer without a server, which copies the object. "
            f"Received: inner={inner!r}, whose config lacks that {', '.join(lost)}"
        )


def check_variables(variables: Sequence[keras.Variable]) -> None:
    """Raise `ValueError` for variables that cannot be trained by a server."""
    default = tf.distribute.get_strategy()
    for v in variables:
        if not default.extended.variable_created_in_scope(v.value):
            raise ValueError(
                "With a server each worker trains a model of its own, without a "
                "strategy. Move the call that creates the model out of "
                f"`with strategy.scope():`. Received: variable {v.path}, created "
                "within it"
            )
        if v.constraint is not None:
            raise ValueError(
                "A constraint is applied where weights are updated, which is the "
                "server, and it is not sent code. Use a regularizer, or weight decay. "
                f"Received: variable {v.path} with constraint={show(v.constraint)}"
            )
        if keras_optimizers.overwrites_with_gradient(v):
            raise ValueError(
                "Variables that gradients overwrite, as the scales of float8 layers, "
                "have to be alike on all workers, and pushes do not carry them. Use "
                f"another dtype policy. Received: variable {v.path}"
            )


def check_number(task: Task | None, variables: Sequence[keras.Variable]) -> None:
    """Raise `ValueError` if there are more servers than variables."""
    if task and len(task.servers) > len(variables):
        raise ValueError(
            "A server keeps whole variables, so there can be no more servers than "
            f"those. Received: {len(task.servers)} tasks of type `ps` in TF_CONFIG, "
            f"and {len(variables)} variables"
        )


def check_gradients(number: int, variables: Sequence[keras.Variable]) -> None:
    """Raise `ValueError` unless every variable has a gradient.

    Args:
        number: number of gradients.
        variables: variables of the optimizer.
    """
    if number != len(variables):
        raise ValueError(
            "A push is of all variables, so each needs a gradient in every step. Set "
            "`trainable=False` on layers that have none. Received: "
            f"{number} gradients for {len(variables)} variables"
        )


def check_not_compiled() -> None:
    """Raise `ValueError` within XLA."""
    if tracing.in_xla_context():
        raise ValueError(
            "XLA cannot compile a step that asks a server. Compile the model with "
            "`jit_compile=False`. Received: a step within `jit_compile=True`"
        )


def check_task(task: Task | None, optimizer: Any) -> Task:
    """Return the task of this process; raise `RuntimeError` if there is none."""
    if task is None:
        raise RuntimeError(
            "This optimizer was loaded outside of a cluster, to look at the model or "
            "to predict. To train, start the script by `tf-dgc run --servers 1 "
            f"--workers N`. Received: {optimizer!r}"
        )
    return task


# --- What workers hand over, checked before anything is made of it.
#
# It may be anything: no class that is not for this is made, and nothing is allocated
# that
# this machine has no memory for.

_MOST_TEXT = 2**22  # words: 16 MiB, of a hundred thousand variables
_MOST_TIMES = 8  # words that any method has for a word of the model, and more

MAX_RUNS = 2**31
"""Number of runs, at the most."""

_FORM = {
    "version": str,
    "settings": dict,
    "num_workers": int,
    "shard": list,
    "run": int,
    "optimizer": dict,
    "compressor": dict,
    "variables": list,
}
_FORM_OF_VARIABLE = {
    "shape": list,
    "dtype": str,
    "exempt": bool,
    "table": bool,
    "decays": bool,
    "name": str,
}
_MODULES = ("keras.optimizers", "keras.optimizers.schedules")
_NUMBERS = re.compile(r"bool|u?int\d+|b?float\d+")


def parse_request(body: np.ndarray) -> Any:
    """Return what a worker hands over, of which nothing is known yet.

    Args:
        body: words of it, int32 `[w]`.

    Raises:
        ValueError: if it is no JSON.
    """
    try:
        return json.loads(to_text(body))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def max_words(kind: Kind, num_words: int) -> int:
    """Return how many words a request may have.

    Args:
        kind: kind of the request.
        num_words: number of words of all variables, 0 before they are known.
    """
    most = {
        Kind.JOIN: _MOST_TEXT,
        Kind.GIVE: num_words,
        Kind.PUSH: _MOST_TIMES * num_words + MAX_WORDS,
    }
    return most.get(kind, MAX_WORDS)


def check_model_spec(handed: ModelSpec) -> None:
    """Raise an error, of any class, unless a model can be made of a description."""
    _check_form(handed, _FORM)
    if not 0 <= handed["run"] < MAX_RUNS:
        raise ValueError(f"run {handed['run']} cannot be")
    for name in ("optimizer", "compressor"):
        _check_classes(handed[name])
    settings = handed["settings"]
    mode, staleness = settings["mode"], settings["staleness"]
    check_mode(mode, staleness, settings["quorum"])
    strength = settings["correction_strength"]
    by = settings["correction"], strength, mode, staleness, settings["pull"]
    check_correction(*by)
    _check_form(settings, {"error_feedback": bool, "seed": int})
    for variable in handed["variables"]:
        _check_form(variable, _FORM_OF_VARIABLE)
        if not all(isinstance(n, int) and n >= 0 for n in variable["shape"]):
            raise ValueError(f"shape {variable['shape']} cannot be")
        if not tf.as_dtype(variable["dtype"]).is_floating:
            raise ValueError(f"dtype {variable['dtype']} cannot be")
    size, memory = 4 * model_spec.model_words(handed), psutil.virtual_memory().total
    if size > memory:
        raise ValueError(
            f"its variables have {size:,} bytes, and the server's machine {memory:,}"
        )


def _check_form(found: Any, form: Mapping[str, type]) -> None:
    for name, kind in form.items():
        if not isinstance(found[name], kind):
            raise ValueError(f"{name} cannot be {found[name]!r:.100}")


def _check_classes(found: Any) -> None:
    """Raise `ValueError` if Keras would make an object of a class that is not known.

    Of a layer, for example, that takes as much memory as its config says.
    """
    left = [found]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            if "class_name" in one and not _is_known(one):
                names = one.get("module"), one["class_name"]
                raise ValueError(
                    "the server cannot make the optimizer or the compressor of their "
                    "configs; it knows those of Keras and of tf_dgc, and what its own "
                    f"process has registered with Keras. Received: {names!r:.100}"
                )
            left += one.values()
        elif isinstance(one, list):
            left += one


def _is_known(config: dict[str, Any]) -> bool:
    if config["class_name"] == "__numpy__":
        return bool(_NUMBERS.fullmatch(config["config"]["dtype"]))
    registered = config.get("registered_name")
    found = registered and keras.saving.get_registered_object(registered)
    return found is not None if registered else config.get("module") in _MODULES

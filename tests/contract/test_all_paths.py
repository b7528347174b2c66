"""Three implementations of a DGC step give the same bits.

They are `CompressedOptimizer` with `TopK` ("composed"), and `DGCOptimizer` with native
and with TensorFlow operations. Weights, residual and velocity are compared.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import keras
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from paths import PHASES, Example, Numbers, Path, check_equal_steps, examples
from selection import rows

import tf_dgc
from tf_dgc import native_library
from tf_dgc.schedules import PiecewiseConstantSparsity
from tf_dgc.steps import base, generic_step, implementations, native

SGD = keras.optimizers.SGD
AdamW = keras.optimizers.AdamW
HAS_NATIVE = native_library.load_library().library is not None
NATIVE = ("native", "mixed")
EXAMPLES = 8


class Case(NamedTuple):
    """Settings of all paths.

    Attributes:
        workers: number of workers.
        inner: function that creates the inner optimizer.
        sparsity: number or schedule.
        value_dtype: type of sent values.
        dtype: type of the variables.
        missing: tensors without a gradient in the second step.
        exact: whether to draw numbers whose sums are exact: in a dense step of three or
            more workers, the order of the collective's sum may differ.
        paths: names of the paths to compare. "composed" has no dense steps: it codes
            values even if all are sent, and stays sparse even if dense is cheaper.
        apart: whether a separate collective sums uncompressed tensors, however small
            they are.
        settings: further arguments of the optimizer.
    """

    workers: int
    inner: Callable[[], Any] = lambda: SGD(0.125, momentum=0.9)
    sparsity: Any = 0.97
    value_dtype: str | None = None
    dtype: str = "float32"
    missing: tuple[int, ...] = ()
    exact: bool = False
    paths: tuple[str, ...] = ("composed", "tensorflow", "native")
    apart: bool = False
    settings: dict[str, Any] = MappingProxyType({})


FROM_DENSE = PiecewiseConstantSparsity([1, 2], [0.0, 0.9, 0.98])
FROM_COSTLY = PiecewiseConstantSparsity([1, 2], [0.0, 0.2, 0.98])
# A power of two: TensorFlow may multiply it by the learning rate first.
DECAY = 2.0**-6


def sgd_with_decay():
    """Create the inner optimizer of "mixed" paths, where all workers call it."""
    return SGD(0.125, momentum=0.9, weight_decay=DECAY)


# The time of tracing grows with the number of workers; examples take little time.
CASES = {
    "nesterov": Case(1, lambda: SGD(0.125, momentum=0.9, nesterov=True)),
    "error feedback": Case(1, lambda: SGD(0.125)),
    "no correction": Case(
        1, settings={"corrections": tf_dgc.Corrections(momentum=False)}
    ),
    "no masking": Case(
        1, settings={"corrections": tf_dgc.Corrections(factor_masking=False)}
    ),
    "all compressed": Case(1, settings={"min_compress_size": 0}),
    "missing gradients": Case(1, missing=(0, 2)),
    "adam": Case(
        1,
        lambda: keras.optimizers.Adam(0.125),
        0.97,
        "bfloat16",
        settings={"corrections": tf_dgc.Corrections(adam=False)},
    ),
    "adamw": Case(
        1,
        lambda: AdamW(0.125, weight_decay=DECAY),
        FROM_DENSE,
        settings={"corrections": tf_dgc.Corrections(adam=False)},
    ),
    "adam, corrected": Case(
        2, lambda: keras.optimizers.Adam(0.125), 0.97, "bfloat16", exact=True
    ),
    "adamw, corrected, missing gradients": Case(
        1, lambda: AdamW(0.125, weight_decay=DECAY, beta_1=0.0), missing=(0, 2)
    ),
    "adamw, corrected": Case(1, lambda: AdamW(0.125, weight_decay=DECAY), FROM_DENSE),
    "adam, corrected, float64": Case(
        1, lambda: keras.optimizers.Adam(0.125, epsilon=0.0), dtype="float64"
    ),
    "adam, corrected, float16 variables": Case(
        1, lambda: keras.optimizers.Adam(0.125, clipnorm=3.0), dtype="float16"
    ),
    "adam, corrected, uncompressed apart": Case(
        3,
        lambda: keras.optimizers.Adam(0.125),
        FROM_DENSE,
        exact=True,
        apart=True,
        paths=("tensorflow", "native"),
    ),
    "amsgrad": Case(
        2,
        lambda: AdamW(0.125, weight_decay=DECAY, amsgrad=True),
        settings={"corrections": tf_dgc.Corrections(adam=False)},
    ),
    "amsgrad, corrected": Case(
        1, lambda: AdamW(0.125, weight_decay=DECAY, amsgrad=True), FROM_DENSE
    ),
    "adamax, corrected": Case(1, lambda: keras.optimizers.Adamax(0.125)),
    "nadam, corrected": Case(1, lambda: keras.optimizers.Nadam(0.125), FROM_DENSE),
    "momentum after the sum": Case(
        1,
        lambda: SGD(0.125, momentum=0.9, nesterov=True, weight_decay=DECAY),
        settings={"corrections": tf_dgc.Corrections(momentum=False)},
    ),
    "adamw, uncompressed apart": Case(
        3,
        lambda: AdamW(0.125, weight_decay=DECAY),
        FROM_DENSE,
        exact=True,
        apart=True,
        paths=("composed", "native"),
        settings={"corrections": tf_dgc.Corrections(adam=False)},
    ),
    "clipnorm": Case(1, lambda: SGD(0.125, momentum=0.9, clipnorm=3.0)),
    "clipvalue": Case(1, lambda: SGD(0.125, momentum=0.9, clipvalue=0.5)),
    "float16 on the wire": Case(1, value_dtype="float16"),
    "bfloat16 on the wire": Case(1, value_dtype="bfloat16"),
    "mxint8 on the wire": Case(
        1, value_dtype="mxint8", settings={"uncompressed_dtype": "bfloat16"}
    ),
    "mxfp4 on the wire": Case(
        3,
        sgd_with_decay,
        value_dtype="mxfp4",
        settings={"uncompressed_dtype": "mxint8"},
        paths=("tensorflow", "mixed", "composed", "native"),
    ),
    "float64": Case(1, dtype="float64"),
    "float64, coded": Case(1, dtype="float64", value_dtype="float16"),
    "bfloat16 variables": Case(1, value_dtype="sign", dtype="bfloat16"),
    "small loss scale": Case(
        1,
        lambda: SGD(2.0**-14, momentum=0.9, loss_scale_factor=2**-6),
        value_dtype="sign",
        dtype="float16",
    ),
    "never sparse, float16 variables": Case(
        1,
        lambda: SGD(2.0**-14, momentum=0.9, loss_scale_factor=2**-6),
        0.0,
        dtype="float16",
    ),
    "warm-up, float16 variables": Case(
        1, lambda: SGD(2.0**-10, momentum=0.9), FROM_DENSE, dtype="float16"
    ),
    "never sparse": Case(2, sparsity=0.0),
    "float16 variables": Case(
        2,
        lambda: SGD(2.0**-10, momentum=0.9, nesterov=True),
        dtype="float16",
        paths=("composed", "native"),
    ),
    "warm-up": Case(2, sparsity=FROM_DENSE, paths=("composed", "native")),
    "warm-up, coded": Case(
        2, sgd_with_decay, FROM_COSTLY, "sign", paths=("tensorflow", "mixed")
    ),
    "mixed workers": Case(2, inner=sgd_with_decay, paths=("mixed", "native")),
    "momentum": Case(3, paths=("composed", "native")),
    "global_clipnorm": Case(
        2,
        lambda: SGD(0.125, momentum=0.9, global_clipnorm=5.0),
        paths=("tensorflow", "native"),
    ),
    "sign on the wire": Case(4, value_dtype="sign", paths=("tensorflow", "native")),
    "warm-up of four": Case(
        4,
        lambda: SGD(0.125, momentum=0.5),
        FROM_DENSE,
        exact=True,
        paths=("composed", "native"),
    ),
    "uncompressed apart": Case(
        3,
        lambda: SGD(0.125, momentum=0.5),
        exact=True,
        apart=True,
        paths=("composed", "native"),
    ),
    "uncompressed apart, warm-up": Case(
        3,
        sgd_with_decay,
        FROM_DENSE,
        "sign",
        exact=True,
        apart=True,
        paths=("tensorflow", "mixed"),
    ),
    "uncompressed apart, coded": Case(
        3,
        lambda: SGD(0.125, momentum=0.5),
        exact=True,
        apart=True,
        settings={"uncompressed_dtype": "mxint8"},
        paths=("tensorflow", "composed", "native"),
    ),
    "uncompressed apart, float64": Case(
        3, dtype="float64", apart=True, paths=("tensorflow", "native")
    ),
    "costly warm-up": Case(3, sparsity=FROM_COSTLY, paths=("tensorflow", "native")),
}


# Every path, dtype, coding and number of workers at least once; the rest is `slow`.
ALWAYS = [
    "nesterov",
    "missing gradients",
    "adamw, corrected",
    "bfloat16 variables",
    "mixed workers",
]


# --- the paths ------------------------------------------------------------------------


def make_optimizer(path, case):
    if path != "composed" or "uncompressed_dtype" in case.settings:
        return tf_dgc.DGCOptimizer(
            case.inner(), case.sparsity, value_dtype=case.value_dtype, **case.settings
        )
    if case.sparsity == 0:
        return tf_dgc.CompressedOptimizer(case.inner(), "none", **case.settings)
    method = tf_dgc.compressors.TopK(case.sparsity, case.value_dtype)
    settings = {"corrections": tf_dgc.Corrections(), **case.settings}
    corrections = settings["corrections"]
    if corrections.momentum is None:
        settings["corrections"] = dataclasses.replace(corrections, momentum=True)
    return tf_dgc.CompressedOptimizer(case.inner(), method, **settings)


@contextlib.contextmanager
def traced_as(path, apart):
    """Trace with the step implementation of a path.

    All workers ("native"), the first one ("mixed") or none use native operations.
    """
    is_available = native.is_available

    def is_available_on_path(variables):
        context = tf.distribute.get_replica_context()
        replica = tf.get_static_value(context.replica_id_in_sync_group)
        uses_native = path == "native" or (path == "mixed" and replica == 0)
        return uses_native and is_available(variables)

    step_implementations = (
        [generic_step.start_generic_step]
        if path == "composed"
        else implementations.IMPLEMENTATIONS
    )
    threshold = 0 if apart else base._WORTH_A_COLLECTIVE
    with (
        mock.patch.object(native, "is_available", is_available_on_path),
        mock.patch.object(
            native,
            "rules_available",
            lambda variables: path == "native" and not native.is_on_gpu(variables),
        ),
        mock.patch.object(implementations, "IMPLEMENTATIONS", step_implementations),
        mock.patch.object(base, "_WORTH_A_COLLECTIVE", threshold),
    ):
        yield


# --- the inputs -----------------------------------------------------------------------

# All sent values are 0 in float16; some values are beyond the range of float16 sums.
TINY = Example(
    iteration=0,
    velocity=Numbers([0.0], 1e-12, 1),
    residual=Numbers([0.0], 1e-12, 2),
    gradients=[Numbers([0.0], 1e-12, seed) for seed in (3, 4, 5)],
    bad=[],
)
LARGE = Example(
    iteration=1,
    velocity=Numbers([0.0], 1e3, 1),
    residual=Numbers([6e4] + [0.0] * 60, 1e3, 2),
    gradients=[Numbers([0.0], 1e2, seed) for seed in (3, 4, 5)],
    bad=[],
)


def make_path(strategy, path, case):
    with traced_as(path, case.apart):
        optimizer = functools.partial(make_optimizer, path, case)
        return Path(strategy, optimizer, case.dtype, case.missing)


# --- the contract ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", rows(CASES, ALWAYS))
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_all_paths_take_equal_steps(strategies, name):
    case = CASES[name]
    if not HAS_NATIVE:
        case = case._replace(paths=[p for p in case.paths if p not in NATIVE])
    paths = {p: make_path(strategies[case.workers], p, case) for p in case.paths}
    if not paths:
        pytest.skip("this case is about native operations alone")
    wide = "float64" if case.dtype == "float64" else "float32"

    @settings(max_examples=EXAMPLES, phases=PHASES)
    @given(examples(case.workers, case.exact))
    def check(drawn):
        check_equal_steps(paths, drawn, case.workers, wide, case.missing)

    if not case.exact:
        check = example(TINY)(example(LARGE)(check))
    check()

"""The native engine gives the same bits as TensorFlow's operations."""

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import keras
import pytest
import tensorflow as tf
from hypothesis import given, settings
from paths import (
    PHASES,
    Path,
    check_equal_steps,
    check_steps_with_idle_rows,
    examples,
)
from selection import rows

import tf_dgc
from tf_dgc import compressors, native_library
from tf_dgc.steps import base, engine_step, generic_step, implementations, native

pytestmark = pytest.mark.skipif(
    native_library.load_library().library is None,
    reason="there are no native operations",
)
SGD = keras.optimizers.SGD
EXAMPLES = 8


class Case(NamedTuple):
    """A method and its optimizer.

    Attributes:
        method: function that creates the method.
        workers: number of workers.
        inner: function that creates the inner optimizer.
        settings: further arguments of the optimizer.
        apart: whether a separate collective sums uncompressed tensors.
    """

    method: Callable[[], Any]
    workers: int = 1
    inner: Callable[[], Any] = lambda: SGD(0.125)
    settings: dict[str, Any] = MappingProxyType({})
    apart: bool = False


CORRECTED = {"corrections": tf_dgc.Corrections(momentum=True)}
CASES = {
    "two_bit": Case(compressors.TwoBit, 2),
    "two_bit, nesterov": Case(
        compressors.TwoBit, 1, lambda: SGD(0.125, 0.9, nesterov=True), CORRECTED
    ),
    "one worker's ef_sign_sgd": Case(compressors.EFSignSGD),
    "ef_sign_sgd, momentum": Case(
        compressors.EFSignSGD, 2, lambda: SGD(0.125, 0.9), CORRECTED
    ),
    "ef_sign_sgd, adam": Case(compressors.EFSignSGD, 2, keras.optimizers.Adam),
    "ef_sign_sgd, amsgrad": Case(
        compressors.EFSignSGD, 1, lambda: keras.optimizers.Adam(amsgrad=True)
    ),
    "stc, adam": Case(compressors.STC, 1, keras.optimizers.AdamW),
    "count_sketch, adam": Case(
        lambda: compressors.CountSketch(0.9, 3, 0.05), 1, keras.optimizers.Adam
    ),
    "natural": Case(compressors.Natural, 2),
    "natural, error feedback": Case(
        compressors.Natural, settings={"error_feedback": True}
    ),
    "sign_sgd": Case(compressors.SignSGD, 3),
    "signum": Case(compressors.Signum, 2),
    "uniform_8bit": Case(compressors.Uniform8Bit, 2),
    "uniform_8bit, buckets": Case(lambda: compressors.Uniform8Bit(300)),
    "uniform_8bit, by chance": Case(lambda: compressors.Uniform8Bit(512, True), 2),
    "qsgd": Case(lambda: compressors.QSGD(coding="fixed"), 2),
    "qsgd, adam": Case(
        lambda: compressors.QSGD(15, 100, "fixed"),
        1,
        keras.optimizers.Adam,
        {"error_feedback": True},
    ),
    "qsgd, one bucket": Case(lambda: compressors.QSGD(127, 10_000, "fixed")),
    # Longer than a task of the engine, and not of whole words.
    "uniform_8bit, long buckets": Case(lambda: compressors.Uniform8Bit(3001), 2),
    "qsgd, long buckets": Case(
        lambda: compressors.QSGD(127, 3001, "elias"), settings={"error_feedback": True}
    ),
    "diana, long buckets": Case(lambda: compressors.DIANA(3, 2501, coding="fixed"), 2),
    "none": Case(compressors.NoCompression, 2),
    "none, adam": Case(compressors.NoCompression, 1, keras.optimizers.Adam),
    "float16": Case(compressors.Float16, 2),
    "bfloat16, error feedback": Case(
        compressors.BFloat16, 2, settings={"error_feedback": True}
    ),
    "two_bit, uncompressed apart": Case(compressors.TwoBit, 3, apart=True),
    "qsgd, elias": Case(compressors.QSGD, 2),
    "qsgd, elias, error feedback": Case(
        lambda: compressors.QSGD(300, 10_000, "elias"),
        settings={"error_feedback": True},
    ),
    "rotated": Case(compressors.RotatedQuantization, 2),
    "rotated, error feedback": Case(
        lambda: compressors.RotatedQuantization(5, 64),
        settings={"error_feedback": True},
    ),
    "ecq": Case(compressors.ECQ, 2),
    "ecq, fixed": Case(lambda: compressors.ECQ(coding="fixed")),
    "top_k, no error feedback": Case(
        lambda: compressors.TopK(0.9), 2, settings={"error_feedback": False}
    ),
    "top_k in halves, no error feedback": Case(
        lambda: compressors.TopK(0.5, "float16"), settings={"error_feedback": False}
    ),
    "stc, momentum": Case(
        lambda: compressors.STC(0.98), 2, lambda: SGD(0.125, 0.9), CORRECTED
    ),
    "sbc": Case(lambda: compressors.SBC(0.98), 2),
    "sbc, most": Case(lambda: compressors.SBC(0.3)),
    "threshold": Case(lambda: compressors.Threshold(0.5, 0.1), 2),
    "threshold, momentum": Case(
        lambda: compressors.Threshold(1.0, 1.0, value_dtype="bfloat16"),
        1,
        lambda: SGD(0.125, 0.9, nesterov=True),
        CORRECTED,
    ),
    "binary threshold": Case(lambda: compressors.Threshold(0.5, 0.1, True), 2),
    "sampled_threshold": Case(lambda: compressors.SampledThreshold(0.9), 2),
    "sampled_threshold, momentum": Case(
        lambda: compressors.SampledThreshold(0.98),
        1,
        lambda: SGD(0.125, 0.9),
        CORRECTED,
    ),
    "adacomp": Case(compressors.AdaComp, 2),
    "adacomp, momentum": Case(
        lambda: compressors.AdaComp(100, 1.5, 3),
        1,
        lambda: SGD(0.125, 0.9),
        CORRECTED,
    ),
    "adacomp, no error feedback": Case(
        lambda: compressors.AdaComp(7), settings={"error_feedback": False}
    ),
    "variance_based": Case(compressors.VarianceBased, 2),
    "variance_based, momentum": Case(
        lambda: compressors.VarianceBased(0.5, 0.9, 0.2),
        1,
        lambda: SGD(0.125, 0.9),
        CORRECTED,
    ),
    "one_bit": Case(compressors.OneBit, 2),
    "one_bit, momentum": Case(
        lambda: compressors.OneBit(False), 1, lambda: SGD(0.125, 0.9), CORRECTED
    ),
    "random_k": Case(lambda: compressors.RandomK(0.9), 2),
    "random_k, momentum": Case(
        compressors.RandomK, 1, lambda: SGD(0.125, 0.9, nesterov=True), CORRECTED
    ),
    "random_k, unbiased": Case(lambda: compressors.RandomK(0.7, True), 3, apart=True),
    "diana": Case(compressors.DIANA, 2),
    "diana, fixed": Case(
        lambda: compressors.DIANA(3, 100, 0.5, "fixed"), 1, keras.optimizers.Adam
    ),
    "tern_grad": Case(compressors.TernGrad, 2),
    "tern_grad, not clipped": Case(lambda: compressors.TernGrad(None)),
    "tern_grad, uncompressed apart": Case(
        lambda: compressors.TernGrad(1.0), 3, lambda: SGD(0.125, 0.9), apart=True
    ),
    "laq": Case(compressors.LAQ, 2),
    "laq, often lazy": Case(lambda: compressors.LAQ(3, 9.0, 2, 2), 2, apart=True),
    "laq, adam": Case(lambda: compressors.LAQ(12), 1, keras.optimizers.Adam),
    "count_sketch": Case(lambda: compressors.CountSketch(0.9, 3, 0.05), 2),
    "count_sketch, momentum": Case(
        lambda: compressors.CountSketch(0.99, 5, 0.02),
        1,
        lambda: SGD(0.125, 0.9),
        CORRECTED,
    ),
    "count_sketch, no error feedback": Case(
        lambda: compressors.CountSketch(0.95, 1),
        3,
        settings={"error_feedback": False},
    ),
    "chunked_top_k": Case(compressors.ChunkedTopK, 2),
    "chunked_top_k, momentum": Case(
        lambda: compressors.ChunkedTopK(100, 7, 0.9),
        1,
        lambda: SGD(0.125, 0.9),
        CORRECTED,
    ),
    "chunked_top_k, many": Case(lambda: compressors.ChunkedTopK(50, 49, 0.95), 2),
    "all compressed": Case(compressors.EFSignSGD, 2, settings={"min_compress_size": 0}),
}
# These always run and cover every part of the engine.
ALWAYS = [
    "ef_sign_sgd, momentum",
    "uniform_8bit, by chance",
    "qsgd, elias, error feedback",
    "qsgd, long buckets",
    "random_k, unbiased",
    "laq, often lazy",
    "chunked_top_k, momentum",
]


def make_path(strategy, case, step_implementations):
    """Trace with these step implementations."""
    threshold = 0 if case.apart else base._WORTH_A_COLLECTIVE
    with (
        mock.patch.object(implementations, "IMPLEMENTATIONS", step_implementations),
        mock.patch.object(base, "_WORTH_A_COLLECTIVE", threshold),
    ):
        return Path(strategy, functools.partial(make_optimizer, case))


def make_optimizer(case):
    return tf_dgc.CompressedOptimizer(case.inner(), case.method(), **case.settings)


@pytest.mark.parametrize("name", rows(CASES, ALWAYS))
def test_engine_takes_equal_steps(strategies, name):
    case = CASES[name]
    strategy = strategies[case.workers]
    paths = {
        "composed": make_path(strategy, case, [generic_step.start_generic_step]),
        "engine": make_path(strategy, case, [engine_step.start_engine_step]),
    }

    @settings(max_examples=EXAMPLES, phases=PHASES)
    @given(examples(case.workers))
    def check(drawn):
        check_equal_steps(paths, drawn, case.workers)

    check()


@pytest.mark.parametrize("name", ["sign_sgd", "signum"])
def test_rows_without_a_gradient_stay(strategies, name):
    case = CASES[name]
    strategy = strategies[case.workers]
    paths = {
        "composed": make_path(strategy, case, [generic_step.start_generic_step]),
        "engine": make_path(strategy, case, [engine_step.start_engine_step]),
    }
    check_steps_with_idle_rows(paths, case.workers)


def test_workers_with_and_without_the_engine_take_equal_steps(strategies):
    case = CASES["qsgd"]
    paths = {
        "composed": make_path(strategies[2], case, [generic_step.start_generic_step]),
        "mixed": make_path(
            strategies[2], case, [engine_on_the_first, generic_step.start_generic_step]
        ),
    }

    @settings(max_examples=EXAMPLES, phases=PHASES)
    @given(examples(2))
    def check(drawn):
        check_equal_steps(paths, drawn, 2)

    check()


@pytest.mark.parametrize(
    ("name", "has_kernels"),
    rows(
        [("float16", True), ("ef_sign_sgd, adam", True), ("qsgd", False)],
        [("float16", True)],
    ),
)
def test_gpu_inputs_give_equal_steps(strategies, name, has_kernels):
    """GPUs get dense gradients and return sums; here CPU operations do the work."""
    case = CASES[name]
    strategy = strategies[case.workers]
    paths = {"composed": make_path(strategy, case, [generic_step.start_generic_step])}
    step_implementations = (
        [engine_step.start_engine_step]
        if has_kernels
        else [engine_step.start_engine_step, generic_step.start_generic_step]
    )
    with (
        mock.patch.object(native, "has_gpus", lambda: True),
        mock.patch.object(engine_step, "gpu_supports", lambda *_: has_kernels),
    ):
        paths["as on GPUs"] = make_path(strategy, case, step_implementations)

    @settings(max_examples=EXAMPLES, phases=PHASES)
    @given(examples(case.workers))
    def check(drawn):
        check_equal_steps(paths, drawn, case.workers)

    check()


def engine_on_the_first(inputs):
    replica = tf.get_static_value(inputs.worker)
    return engine_step.start_engine_step(inputs) if replica == 0 else None

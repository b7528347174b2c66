"""Preconditioned gradients on the device: the same bits as NumPy and the CPU."""

import numpy as np
import pytest
from common import cuda_library
from engine_steps import Both, draw
from engine_steps import Case as EngineCase
from harness_gpu import settings
from step_oracle import Case, Rule
from test_gpu_compress import SMALL, case, new_gradients, uncompressed

ADAM = np.array(
    [4.0, 0.001, 1e-7, 0.0447, 0.5]
)  # Adam with two workers that have equal gradients
INACTIVE = np.array([0.0, *ADAM[1:]])


def divisor(step):
    """Return a step's divisor; its share changes with Adam's bias correction."""
    return ADAM * [1, 1, 1, 1 / (1 + step), 1]


@pytest.mark.parametrize("name", cuda_library.RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_small_steps(runner, name, dtype):
    """Tensors are divided, undivided, uncompressed and unaligned."""
    cases = [
        case(SMALL, 90, dtype=dtype, divisor=ADAM),
        case(4097, 41, 3, dtype=dtype, divisor=ADAM, shift=1),
        case(5000, 50, 5),
        uncompressed(300, 9),
    ]

    def change(cases, number):
        if number:
            new_gradients(cases, number)
        for c in cases[:2]:
            c.divisor = divisor(number)

    runner.check_steps(cases, Rule(name, masking=False), steps=4, change=change)
    assert np.all(cases[0].moment > 0)
    assert not np.any(cases[2].moment)


def test_small_division_starts_in_a_later_step(runner):
    """Until then gradients accumulate undivided, and the moment stays 0."""
    tensor = case(SMALL, 90, divisor=INACTIVE)

    def change(cases, number):
        new_gradients(cases, number)
        if number == 2:
            assert not np.any(cases[0].moment)
            cases[0].divisor = ADAM

    runner.check_steps([tensor], steps=4, change=change)
    assert np.any(tensor.moment)


def test_small_zeros_without_epsilon(runner):
    """0 / 0 counts as 0."""
    tensor = Case(np.zeros(SMALL, np.float32), 9, divisor=ADAM * [1, 1, 0, 1, 1])
    tensor.gradient[100:200] = 1e-3
    runner.check_steps([tensor], steps=2)
    assert np.isfinite(tensor.residual).all()


def test_small_quotients_are_bounded(runner):
    tensor = case(SMALL, 90, divisor=ADAM)
    tensor.gradient[::7] = 3e38
    (words,) = runner.check_steps([tensor], Rule("none"))
    assert words[2] == 0
    assert np.isfinite(tensor.moment).all()


def test_small_nonfinite_gradient_decays_the_moment(runner):
    """The flag is set, too."""
    cases = [case(SMALL, 90, divisor=ADAM), case(300, 5, 5, divisor=ADAM)]

    def change(cases, number):
        for c in cases:
            c.scale = np.nan if number == 1 else 1.0

    buffers = runner.check_steps(cases, steps=3, change=change)
    assert [int(words[2]) for words in buffers] == [0, 1, 0]


def test_small_moment_without_a_divisor_raises(runner):
    description = {"size": 5, "k": 5, "value_type": 0, "moment": 8}
    tensors = cuda_library.tensors([description])
    with pytest.raises(ValueError, match="a moment needs a divisor"):
        runner.library.compress(None, tensors, settings(Rule()), *[None] * 5)


@pytest.mark.parametrize("name", cuda_library.RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_methods_of_the_engine(
    device, library, cpu, engine, cpu_engine, name, dtype
):
    if cpu_engine is None:
        pytest.skip("there is no compiler for the CPU's engine")
    both = Both(device, library, engine, cpu_engine)
    methods = [
        ("ef_sign_sgd", ()),  # needs a second pass for the whole tensor's mean
        ("two_bit", (0.5,)),
        ("qsgd, fixed", (3, 0, 5000, 0, 0)),
        ("one_bit", (1,)),
    ]
    cases = [
        EngineCase(
            method, draw(9000, i, dtype), parameters, 300, divisor=ADAM, shift=i % 2
        )
        for i, (method, parameters) in enumerate(methods)
    ]
    cases += [
        EngineCase("two_bit", draw(5000, 7, dtype), (0.5,)),
        EngineCase("whole", draw(33, 8), (np.inf,)),
    ]

    def change(number, gradients, scales):
        if number == 1:
            scales = [np.nan, *scales[1:]]
        return gradients, scales

    both.steps(cases, name, count=3, change=change)

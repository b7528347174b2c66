"""The fused step on the device gives the same bits as NumPy and the CPU operations."""

import itertools
import math

import numpy as np
import pytest
import step_oracle
import wire_reference
from common import cuda_library, resnet50
from harness_gpu import FINGERPRINT, same, settings
from step_oracle import Case, Rule

EMULATED_LIMIT = 1_000_000  # entries; larger tensors take too long
SMALL = 9_000  # more than two of the kernels' tiles
VALUE_TYPES = ["float32", "bfloat16", "float16", "sign", "mxint8", "mxfp4"]
EXEMPT = ["exempt", "exempt:bfloat16", "exempt:mxint8"]


def floats(size, seed, dtype="float32"):
    """Return normally distributed numbers; bfloat16 as its bits."""
    numbers = np.random.default_rng(seed).standard_normal(size, np.float32)
    if dtype == "bfloat16":
        return step_oracle.to_bfloat16(numbers)
    return numbers.astype(dtype)


def case(size, k, seed=0, dtype="float32", **rest):
    """Return a tensor in the middle of training."""
    state = {"velocity": floats(size, seed + 1), "residual": floats(size, seed + 2)}
    return Case(floats(size, seed, dtype), k, **{**state, "offset": size // 3, **rest})


def uncompressed(size, seed=0, **rest):
    return case(size, size, seed, value_type="exempt", offset=0, **rest)


def new_gradients(cases, number):
    for i, c in enumerate(cases):
        c.gradient = floats(c.size, 1000 * number + i, c.gradient_type)
        c.offset = (c.offset + 7919) % max(1, c.size)


def sizes_and_densities():
    small = itertools.product(
        [1, 31, 1000, 10_000, 100_000], [1e-4, 1e-3, 1e-2, 0.3, 1]
    )
    large = itertools.product([10**6, 10**7, 10**8], [1e-4, 1e-3, 0.1, 1])
    return [*small, *large]


# --- sizes, densities, types ----------------------------------------------------------


@pytest.mark.parametrize(("size", "density"), sizes_and_densities())
def test_sizes(runner, size, density):
    if size > EMULATED_LIMIT and runner.device.kind == "emulated":
        pytest.skip("takes too long on the emulated device")
    k = max(1, math.ceil(density * size))
    steps = 3 if size < 50_000 or runner.device.kind == "cuda" else 2
    runner.check_steps([case(size, k)], steps=steps, change=new_gradients)


def test_small_empty_tensors(runner):
    """Empty tensors have no memory: their pointers are null."""
    cases = [
        uncompressed(0),
        case(50, 3),
        uncompressed(0),
        uncompressed(0),
        uncompressed(7),
        uncompressed(0),
    ]
    runner.check_steps(cases, steps=2)
    runner.check_steps([uncompressed(0)])


@pytest.mark.parametrize("value_type", [*VALUE_TYPES, *EXEMPT])
@pytest.mark.parametrize("dtype", cuda_library.GRADIENT_TYPES)
def test_small_types(runner, dtype, value_type):
    k = SMALL if value_type in EXEMPT else 101
    tensor = case(SMALL, k, dtype=dtype, value_type=value_type, scale=0.3)
    buffers = runner.check_steps([tensor], steps=2, change=new_gradients)
    assert len({b.tobytes() for b in buffers}) == 2


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("name", cuda_library.RULES)
def test_small_rules(runner, name, masking):
    rule = Rule(name, 0.9, masking)
    cases = [case(SMALL, 90), case(300, 300, 5), uncompressed(300, 9)]
    runner.check_steps(cases, rule, steps=3, change=new_gradients)


def test_small_buffer_equals_the_wire_reference(runner):
    """The oracle of these tests agrees with the reference of the wire format."""
    layout = [
        *((900, "float32", t) for t in VALUE_TYPES),
        (33, "float32", "exempt"),
        (64, "float32", "float32"),
    ]
    counts = [90, 7, 101, 450, 70, 33, 33, 64]
    cases = [
        case(n, k, i, value_type=t)
        for i, ((n, _, t), k) in enumerate(zip(layout, counts, strict=True))
    ]
    (words,) = runner.check_steps(cases)
    words = words.copy()
    words[1] = wire_reference.fingerprint(layout)
    selections, finite = wire_reference.decode(step_oracle.seal(words), layout, counts)
    assert finite
    reencoded = wire_reference.encode(layout, counts, selections, True)
    same(step_oracle.seal(words), reencoded, "words")


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("dtype", cuda_library.GRADIENT_TYPES)
def test_small_unaligned_views(runner, dtype, shift):
    tensor = case(SMALL + 1, 50, dtype=dtype, shift=shift)
    runner.check_steps([tensor], steps=2, change=new_gradients)


# --- content --------------------------------------------------------------------------


def content(kind, size):
    random = np.random.default_rng(3)
    few_zeros_left = np.zeros(size, np.float32)
    few_zeros_left[7:57] = 1
    ulps = np.float32(2**-23)
    functions = {
        "zeros": lambda: np.zeros(size),
        "equal": lambda: np.full(size, -2),
        "few values": lambda: random.integers(-2, 3, size),
        "few zeros left": lambda: few_zeros_left,
        # magnitudes over 60 orders
        "powers": lambda: 10 ** random.uniform(-30, 30, size),
        "nearly equal": lambda: 1 + random.integers(0, 1000, size) * ulps,
        "hardly different": lambda: 1 + random.integers(0, 40, size) * ulps,
        "some above ties": lambda: random.choice(
            [0.5, 1, 7], size, p=[0.7, 0.28, 0.02]
        ),
    }
    return functions[kind]().astype(np.float32)


@pytest.mark.parametrize("k", [1, 100, 2_000, 6_000, 19_999])
@pytest.mark.parametrize(
    "kind",
    [
        "zeros",
        "equal",
        "few values",
        "few zeros left",
        "powers",
        "nearly equal",
        "hardly different",
        "some above ties",
    ],
)
def test_small_ties(runner, kind, k):
    size = 20_000
    for offset in [0, size - 50]:
        tensor = Case(content(kind, size), k, offset=offset)
        runner.check_steps([tensor], steps=2)


def test_small_denormals_are_zero(runner):
    """The CPU flushes denormals to zero too."""
    on_device = runner.step([Case(np.full(5000, 1e-39, np.float32), 5)])
    on_device.queue()
    assert not np.any(on_device.velocity[0].read())
    assert not np.any(on_device.residual[0].read())


@pytest.mark.parametrize("name", cuda_library.RULES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_small_nonfinite_gradient_is_skipped(runner, name, value):
    cases = [case(SMALL, 90), case(300, 5, 5, dtype="float16"), uncompressed(5000, 9)]
    cases[1].gradient[17::100] = value

    def repair(cases, number):
        if number:
            new_gradients(cases, number)

    buffers = runner.check_steps(cases, Rule(name), steps=3, change=repair)
    assert [int(b[2]) for b in buffers] == [1, 0, 0]


@pytest.mark.parametrize("count", [1, 9_000])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800000])
def test_small_nonfinite_residual_sends_k_entries(runner, bits, count):
    """A step creates no such residual, but a user may set one."""
    size, k = 10_000, 9
    tensor = case(size, k)
    tensor.gradient[:] = 0
    before = tensor.residual.view(np.uint32)
    before[100 : 100 + count] = bits
    on_device = runner.step([tensor], Rule("none"))
    num_words = runner.library.words(on_device.tensors)
    on_device.words = runner.device.poisoned(4 * (num_words + size), np.uint32)
    on_device.queue()
    words, residual = on_device.words.read(), on_device.residual[0].read()
    assert np.all(words[num_words:] == words[-1])
    assert np.sum(residual.view(np.uint32) != before) <= k


def test_small_all_nonfinite(runner):
    (words,) = runner.check_steps([Case(np.full(SMALL, np.nan, np.float32), 9)])
    assert words[2] == 1


def test_small_nan_scale_counts_as_nonfinite(runner):
    cases = [case(SMALL, 90), case(300, 5, 5, scale=np.nan)]
    (words,) = runner.check_steps(cases)
    assert words[2] == 1


def test_small_overflow_counts_as_nonfinite(runner):
    tensor = Case(np.full(SMALL, 3e38, np.float32), 9, offset=5)
    buffers = runner.check_steps([tensor], Rule("none"), steps=2)
    assert [int(b[2]) for b in buffers] == [0, 1]


@pytest.mark.parametrize("value_type", [*VALUE_TYPES, *EXEMPT])
def test_small_sent_values_are_at_most_the_largest(runner, value_type):
    k = SMALL if value_type in EXEMPT else 101
    runner.check_steps([case(SMALL, k, value_type=value_type, largest=0.5)], steps=2)


@pytest.mark.parametrize("name", cuda_library.RULES)
def test_small_overflow_by_momentum_alone(runner, name):
    tensor = case(SMALL, 90)
    tensor.velocity[5:50] = tensor.residual[5:50] = 3e38
    (words,) = runner.check_steps([tensor], Rule(name))
    assert words[2] == (name != "none")


# --- many tensors, many steps ---------------------------------------------------------


@pytest.mark.parametrize("value_type", ["float32", "sign"])
def test_resnet50_in_one_call(runner, value_type):
    smaller = 200 if runner.device.kind == "emulated" else 1
    cases = []
    for i, (size, is_uncompressed) in enumerate(resnet50.sizes()):
        size = max(1, size // smaller)
        k = max(1, math.ceil(0.001 * size))
        tensor = case(size, k, 10 * i, value_type=value_type)
        cases.append(uncompressed(size, 10 * i) if is_uncompressed else tensor)
    runner.check_steps(cases, steps=2, change=new_gradients)


@pytest.mark.parametrize("small", [0, 1])
def test_small_many_tensors(runner, small):
    """More than a launch copies to the device, or a block handles at once."""
    cases = [uncompressed(i % 3, i) for i in range(700 * small)]
    cases += [case(100 + i % 7, 1 + i % 5, i, largest=2.0) for i in range(1500)]
    cases[-300:] = [case(90 + i, 60, i) for i in range(300)]  # their residual is read
    cases.append(case(SMALL, SMALL // 3, value_type="sign"))
    runner.check_steps(cases, steps=2, change=new_gradients)


def test_misleading_hints_do_not_change_the_result(runner):
    """Gradients change in magnitude and k changes, so the last step's hints mislead."""
    factors = [1, 1, 1, 1000, 1, 1, 1e-3, 0, 0, 1, 1]
    counts = [30, 30, 31, 31, 31, 3000, 3000, 31, 31, 31, 31]

    def change(cases, number):
        new_gradients(cases, number)
        for c in cases:
            c.gradient *= np.float32(factors[number])
            c.k = counts[number]

    cases = [case(30_000, 30), case(5_000, 30, 9)]
    runner.check_steps(cases, steps=len(factors), change=change)


@pytest.mark.parametrize(("size", "k"), [(30_000, 30), (10_000, 1_000), (10_000, 9)])
def test_any_hint_gives_the_same_result(runner, size, k):
    """A low hint makes all of 10,000 entries candidates."""
    tensor = case(size, k)
    words = step_oracle.step([tensor.copy()], Rule(), FINGERPRINT)
    for threshold in [0, 1, 2**23, 0x3F800000, 0x40000000, 0x7F7FFFFF, 2**31 - 1, -5]:
        on_device = runner.step([tensor])
        on_device.hints.write([[k, threshold, 0]])
        on_device.queue()
        same(on_device.words.read(), words, f"words with hint {threshold}")


@pytest.mark.parametrize("size", [30_000, 10**7])
def test_every_run_gives_the_same_result(runner, size):
    if size > EMULATED_LIMIT and runner.device.kind == "emulated":
        pytest.skip("takes too long on the emulated device")
    cases = [case(size, size // 1000, value_type="sign"), uncompressed(500)]
    results = set()
    for _ in range(5):
        on_device = runner.step(cases)
        on_device.queue()
        on_device.queue()
        results.add(
            on_device.words.read().tobytes() + on_device.residual[0].read().tobytes()
        )
    assert len(results) == 1


# --- wrong arguments ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": 6}, "size or k"),
        ({"k": 0}, "size or k"),
        ({"size": -1}, "size or k"),
        ({"size": 2**31 - 1, "k": 2**31 - 1}, "words"),
        ({"value_type": 1}, "unknown value type"),
        ({"value_type": 10}, "unknown value type"),
    ],
)
def test_small_wrong_arguments(runner, wrong, message):
    tensors = cuda_library.tensors([{"size": 5, "k": 5, "value_type": 0, **wrong}])
    assert runner.library.words(tensors) == -1
    assert runner.library.compress_workspace(tensors) == -1
    rest = [None] * 5
    with pytest.raises(ValueError, match=message):
        runner.library.compress(None, tensors, settings(Rule()), *rest)


@pytest.mark.parametrize("gradient_type", [-1, 1, 4])
def test_small_unknown_gradients(runner, gradient_type):
    description = {"size": 5, "k": 5, "value_type": 0, "gradient_type": gradient_type}
    tensors = cuda_library.tensors([description])
    assert runner.library.words(tensors) > 0  # decoding needs no gradients
    with pytest.raises(ValueError, match="must be float32, bfloat16 or float16"):
        runner.library.compress(None, tensors, settings(Rule()), *[None] * 5)


def test_small_no_tensors(runner):
    with pytest.raises(ValueError, match="no tensors"):
        runner.library.compress(
            None, cuda_library.tensors([]), settings(Rule()), *[None] * 5
        )

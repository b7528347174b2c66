"""The engine's methods on the device give the same bits as the CPU's engine."""

import devices
import numpy as np
import pytest
import step_oracle
from common import cuda_library
from engine_steps import Both, Case, Worker, draw

METHODS = {
    "two_bit": ("two_bit", (0.5,)),
    "ef_sign_sgd": ("ef_sign_sgd", ()),
    "one_bit": ("one_bit", (0,)),
    "one_bit, columns": ("one_bit", (1,)),
    "qsgd": ("qsgd, fixed", (7, 0, 512, 0, 0)),
    "qsgd, buckets of 100": ("qsgd, fixed", (15, 0, 100, 0, 0)),
    "qsgd, long buckets": ("qsgd, fixed", (3, 0, 5000, 0, 0)),
    "qsgd, one bucket": ("qsgd, fixed", (127, 100, 0, 0, 0)),
    "natural": ("natural", ()),
    "uniform_8bit": ("uniform_8bit", (100, 0)),
    "uniform_8bit, by chance": ("uniform_8bit, stochastic", (0, 300)),
    "float16": ("float16", (2047,)),
    "bfloat16": ("bfloat16", (1e37,)),
    "whole": ("whole", (np.inf,)),
    "whole, summed": ("whole", (0.5,)),
}
SUMMED = {"float16": "float16", "bfloat16": "bfloat16", "whole, summed": "float32"}
SIZES = [1, 31, 32, 33, 1024, 4097, 70_001]
RULES = list(cuda_library.RULES)


def case(name, size, seed=0, dtype="float32", **rest):
    """Return a tensor of a method."""
    method, parameters = METHODS[name]
    columns = next(n for n in (300, 7, 3, 1) if size % n == 0)
    settings = {"columns": columns, "summed_as": SUMMED.get(name), **rest}
    return Case(method, draw(size, seed, dtype), parameters, **settings)


def uncompressed(size, seed=0):
    return case("whole", size, seed)


def buffers_of(steps, num_workers):
    """Return the gathered buffers of several workers, and the sums of their vectors."""
    words = [steps[i % len(steps)][0] for i in range(num_workers)]
    return np.stack(words), steps[0][1]


@pytest.fixture
def both(device, library, cpu, engine, cpu_engine):
    if cpu_engine is None:
        pytest.skip("there is no compiler for the CPU's engine")
    return Both(device, library, engine, cpu_engine)


def test_small_all_methods_are_tested(engine):
    assert {name for name, _ in METHODS.values()} == {*engine.methods()}


# --- methods, sizes, types ------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_small_sizes(both, name, size):
    both.steps([case(name, size)])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", METHODS)
def test_small_steps_and_sums(both, name, rule):
    """Tensors of 1 to 4 workers are summed; some are uncompressed."""
    cases = [
        case(name, 9_000, scale=0.3),
        uncompressed(300, 1),
        case(name, 33, 2, "bfloat16"),
        case(name, 1024, 3, "float16", shift=1),
        uncompressed(0),
        uncompressed(5, 4),
    ]
    steps = both.steps(cases, rule, count=3)
    for num_workers in range(1, 5):
        for descend in (False, True):
            buffers, numbers = buffers_of(steps, num_workers)
            error, nonfinite, finite, _ = both.sum(cases, buffers, numbers, descend)
            assert (error, nonfinite) == ("", 0)
            assert np.all(finite == 1)


@pytest.mark.parametrize("name", METHODS)
def test_small_without_a_residual(both, name):
    cases = [case(name, n, n, has_residual=False) for n in (5_000, 31, 70_000)]
    both.steps(cases, worker=3)


def test_small_many_tensors(both):
    """More tensors than a kernel's parameters hold."""
    names = list(METHODS)
    cases = [case(names[i % len(names)], 40 + i, i) for i in range(150)]
    cases += [case(names[0], 40 + i % 9, i) for i in range(600)]
    (sent,) = both.steps(cases, "momentum", count=1)
    both.sum(cases, sent[0][None], sent[1], True)


def test_random_numbers_differ_by_tensor_step_and_worker(both):
    gradient = np.full(5_000, 0.01, np.float32)
    cases = [Case("natural", gradient, has_residual=False) for _ in range(2)]

    def repeat(number, gradients, scales):
        return [gradient, gradient], scales

    parts = [
        part.tobytes()
        for worker in (0, 1)
        for words, _ in both.steps(cases, change=repeat, worker=worker)
        for part in np.split(words[5:], 2)
    ]
    assert len(set(parts)) == 8


# --- content --------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["zeros", "tiny", "huge", "equal"])
@pytest.mark.parametrize("name", METHODS)
def test_small_content(both, name, content):
    size = 5_000
    factor = {"zeros": 0, "tiny": 1e-38, "huge": 1e37, "equal": 1}[content]
    gradient = draw(size, 1) * np.float32(factor)
    if content == "equal":
        gradient[:] = -1.5
    tensor = case(name, size, residual=np.zeros(size, np.float32))
    tensor.gradient = gradient
    steps = both.steps([tensor], count=1)
    both.sum([tensor], *buffers_of(steps, 2), False)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_small_nonfinite_gradient_is_skipped(both, rule, value):
    """The residual stays after a non-finite entry or scale."""
    names = ["two_bit", "ef_sign_sgd", "one_bit", "qsgd", "float16"]
    cases = [case(name, 9_000) for name in names]

    def poison(number, gradients, scales):
        if number == 0:
            gradients = [g.copy() for g in gradients]
            gradients[1][17::1000] = value
        return gradients, [np.nan if number == 1 and i == 2 else 1 for i in range(5)]

    steps = both.steps(cases, rule, count=3, change=poison)
    assert [int(words[2]) for words, _ in steps] == [1, 1, 0]
    assert [numbers["float16"][0] for _, numbers in steps] == [0x3C00, 0x3C00, 0]
    _, nonfinite, _, _ = both.sum(cases, *buffers_of(steps, 3), False)
    assert nonfinite == 2


def test_small_nonfinite_sum_updates_nothing(both):
    cases = [uncompressed(5_000), uncompressed(40), case("two_bit", 50)]
    cases[1].gradient[7] = 3e38
    cases[1].residual[7] = 0
    (sent,) = both.steps(cases, count=1)
    _, _, finite, targets = both.sum(cases, *buffers_of([sent], 2), True)
    assert finite.tolist() == [1, 0, 1]
    assert all(np.all(target == 0.5) for target in targets)
    _, _, finite, targets = both.sum(cases, *buffers_of([sent], 2), False)
    assert finite.tolist() == [1, 0, 1]
    assert np.isinf(targets[1][7])
    assert not np.any(targets[0] == 0.5)


# --- bad buffers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "value", "is_sealed", "message"),
    [
        (0, 7, True, "not one of this version"),
        (1, 7, True, "another model"),
        (3, 7, False, "another length"),
        (4, 7, False, "checksum"),
        (9, 7, False, "checksum"),
        (2, 6, True, "unknown flags"),
    ],
)
@pytest.mark.parametrize("descend", [False, True])
def test_small_bad_buffers_change_nothing(
    both, index, value, is_sealed, message, descend
):
    cases = [case("qsgd", 9_000), uncompressed(20), case("float16", 50)]
    (sent,) = both.steps(cases, count=1)
    buffers, numbers = buffers_of([sent], 4)
    buffers[2, index] = value
    if is_sealed:
        buffers[2] = step_oracle.seal(buffers[2])
    error, _, _, targets = both.sum(cases, buffers, numbers, descend)
    assert error.startswith("The buffer of worker 2 ")
    assert message in error
    assert all(np.all(target == 0.5) for target in targets)


def test_small_random_words_are_decoded_equally(both):
    names = ["two_bit", "ef_sign_sgd", "one_bit", "qsgd", "natural", "uniform_8bit"]
    cases = [case(name, 1_023) for name in names]
    (sent,) = both.steps(cases, count=1)
    random = np.random.default_rng(1)
    for _ in range(5):
        buffers, numbers = buffers_of([sent], 3)
        buffers[1, 5:] = random.integers(0, 2**32, buffers.shape[1] - 5)
        buffers[1] = step_oracle.seal(buffers[1])
        both.sum(cases, buffers, numbers, False)
        both.sum(cases, buffers, numbers, True)


# --- against NumPy --------------------------------------------------------------------


def words_after(both, tensor):
    ((words, _),) = both.steps([tensor], count=1)
    return words[5:]


def bits(condition):
    return step_oracle.pack(condition.astype(np.uint8))


def test_small_two_bits_by_numpy(both):
    tensor = case("two_bit", 1_000)
    value = tensor.residual + tensor.gradient
    expected = np.concatenate([bits(value >= 0.5), bits(value <= -0.5)])
    assert np.array_equal(words_after(both, tensor), expected)


def test_small_signs_by_numpy(both):
    tensor = case("ef_sign_sgd", 20_000)
    value = tensor.residual + tensor.gradient
    mean = np.float32(np.sum(np.abs(value), dtype=np.float64) / value.size)
    words = words_after(both, tensor)
    assert np.array_equal(words, [mean.view(np.uint32), *bits(value < 0)])


def test_small_columns_by_numpy(both):
    tensor = case("one_bit, columns", 9_000)
    value = (tensor.residual + tensor.gradient).reshape(-1, tensor.columns)
    means = [
        np.sum(np.where(side, value, 0), 0, np.float64) / np.sum(side, 0)
        for side in (value >= 0, value < 0)
    ]
    words = words_after(both, tensor)
    decoded = words[: 2 * tensor.columns].view(np.float32)
    np.testing.assert_allclose(decoded, np.concatenate(means), rtol=1e-6)
    assert np.array_equal(words[2 * tensor.columns :], bits(value.ravel() < 0))


def test_small_halves_by_numpy(both):
    tensor = case("float16", 1_001)
    ((_, numbers),) = both.steps([tensor], count=1)
    value = tensor.residual + tensor.gradient
    sums = numbers["float16"].view(np.float16)
    assert np.array_equal(sums, np.concatenate([[0], value.astype(np.float16)]))


# --- queues ---------------------------------------------------------------------------


def test_small_steps_follow_each_other(both):
    cases = [case("qsgd", 9_000), case("ef_sign_sgd", 5_000), uncompressed(40)]
    on_device = Worker(both.device, both.engine, cases, "momentum")
    on_cpu = Worker(devices.Emulated(), both.engine, cases, "momentum")
    workspaces = [
        both.device.poisoned(both.engine.encode_workspace(on_device.tensors))
        for _ in range(3)
    ]
    for workspace in workspaces:
        both.queue(on_device, workspace)
        both.encode_on_cpu(on_cpu)
    on_device.expect(on_cpu)


def test_small_captured_steps(both):
    """Capture fails if a call waits or allocates; replays draw new random numbers."""
    if both.device.kind == "emulated":
        pytest.skip("an emulated device has no graphs")
    cases = [case("qsgd", 9_000), case("one_bit", 5_000), uncompressed(40)]
    on_device = Worker(both.device, both.engine, cases, "momentum")
    on_cpu = Worker(devices.Emulated(), both.engine, cases, "momentum")
    workspace = both.device.poisoned(both.engine.encode_workspace(on_device.tensors))
    both.run(on_device)  # loads the kernels
    both.encode_on_cpu(on_cpu)
    replay = both.device.capture(lambda: both.queue(on_device, workspace))
    for number in range(1, 4):
        gradients = [draw(c.size, number) for c in cases]
        for worker in (on_device, on_cpu):
            worker.write(gradients, [1, 0.5, 1], number)
        replay()
        both.device.synchronize()
        both.encode_on_cpu(on_cpu)
        on_device.expect(on_cpu)

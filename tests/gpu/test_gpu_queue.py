"""Steps are queued without waiting: several steps, streams, captured graphs."""

import numpy as np
import pytest
import step_oracle
from common import cuda_library
from harness_gpu import FINGERPRINT, RIGHT, describe_layout
from step_oracle import Rule
from test_gpu_compress import SMALL, case, floats, uncompressed


def make_cases():
    return [
        case(SMALL, 90),
        case(40_000, 31, 5, value_type="sign"),
        uncompressed(300, 9),
    ]


def words_after(cases, steps):
    """Take steps on the cases, and return the words of the last one."""
    return [step_oracle.step(cases, Rule(), FINGERPRINT) for _ in range(steps)][-1]


def test_small_steps_follow_each_other(runner):
    cases = make_cases()
    on_device = runner.step(cases)
    for _ in range(4):
        on_device.queue()
    on_device.expect(cases, words_after(cases, 4))


@pytest.fixture
def gpu(runner):
    if runner.device.kind == "emulated":
        pytest.skip("an emulated device has no streams and no graphs")
    return runner


def test_small_two_streams(gpu):
    """Two steps at once, each with separate memory."""
    groups = [make_cases(), [case(30_000, 3_000, 77, value_type="bfloat16")]]
    on_device = [gpu.step(cases) for cases in groups]
    gpu.device.synchronize()
    for step in on_device:
        with gpu.device.new_stream():
            for _ in range(3):
                step.queue()
    gpu.device.synchronize()
    for step, cases in zip(on_device, groups, strict=True):
        step.expect(cases, words_after(cases, 3))


def test_small_captured_step(gpu):
    """Capture fails if a call waits or allocates; replays use new gradients."""
    cases = make_cases()
    on_device = gpu.step(cases)
    on_device.queue()  # loads the kernels
    words_after(cases, 1)
    replay = gpu.device.capture(on_device.queue)
    for number in range(4):
        for i, c in enumerate(cases):
            c.gradient = floats(c.size, 100 * number + i)
            c.scale = 1 + number
            c.offset = (c.offset + 123) % c.size
        if number == 2:  # the slow path is in the graph too
            cases[1].gradient[5] = np.inf
        on_device.write(cases)
        replay()
        gpu.device.synchronize()
        on_device.expect(cases, words_after(cases, 1))


def test_small_captured_step_and_decoding(gpu):
    """One worker's step and decoding are one graph, which updates the targets."""
    cases = make_cases()
    on_device = gpu.step(cases)
    layout = [(c.size, c.k, c.value_type) for c in cases]
    tensors = describe_layout(layout)
    targets = [gpu.device.array(np.ones(c.size, np.float32)) for c in cases]
    rate = gpu.device.array(np.array([0.3]))
    workspace = gpu.device.poisoned(gpu.library.decode_workspace(tensors, 1))
    status = gpu.device.poisoned(cuda_library.STATUS_BYTES)

    def queue():
        on_device.queue()
        gpu.library.decode(
            gpu.device.stream,
            tensors,
            FINGERPRINT,
            on_device.words.pointer,
            1,
            on_device.words.shape[0],
            [t.pointer for t in targets],
            rate.pointer,
            workspace.pointer,
            status.pointer,
        )

    queue()
    gpu.device.synchronize()
    replay = gpu.device.capture(queue)
    replay()
    replay()
    gpu.device.synchronize()
    on_device.expect(cases, words_after(cases, 3))
    assert status.read().view(cuda_library.STATUS)[0]["error"] == RIGHT
    for target, c in zip(targets, cases, strict=True):
        changed = np.count_nonzero(target.read() != 1)
        assert 0 < changed <= 3 * c.k

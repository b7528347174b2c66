"""Decoding of all workers' buffers on the device: sums, updates and errors."""

import math

import numpy as np
import pytest
import step_oracle
import wire_reference
from harness_gpu import FINGERPRINT, RIGHT, describe_layout, same
from step_oracle import Case, Rule

LAYOUT = [
    (9_000, 90, "float32"),
    (20_000, 31, "bfloat16"),
    (0, 0, "exempt"),
    (700, 700, "float16"),
    (8_193, 500, "sign"),
    (5_000, 333, "mxint8"),
    (5_000, 801, "mxfp4"),
    (4_501, 4_501, "exempt:bfloat16"),
    (4_501, 4_501, "exempt:mxint8"),
    (333, 333, "exempt"),
]


def buffers_of(layout, num_workers, few=5, num_bad=0):
    """Return buffers [num_workers, words], at most `few` different ones."""
    random = np.random.default_rng(1)
    buffers = []
    for worker in range(min(few, num_workers)):
        cases = [
            Case(random.standard_normal(n, np.float32), k, t, offset=n // 2)
            for n, k, t in layout
        ]
        if worker < num_bad:
            cases[0].gradient[5] = np.nan
        buffers.append(step_oracle.step(cases, Rule(), FINGERPRINT))
    return np.stack([buffers[w % len(buffers)] for w in range(num_workers)])


def expected_targets(layout, buffers, descend):
    """Return the targets, decoded as docs/contributing/wire_format.md describes."""
    at = 5
    targets = []
    for size, k, value_type in layout:
        sums, sent = np.zeros(size, np.float32), np.zeros(size, bool)
        for words in buffers[:, at:]:
            where, values, num_words = read_tensor(words, size, k, value_type)
            sums[where] += values
            sent[where] = True
        target = np.full(size, 0.5, np.float32)
        if descend:
            target[sent] -= sums[sent] * np.float32(0.3)
        targets.append(target if descend else sums)
        at += num_words
    return targets


def read_tensor(words, size, k, value_type):
    """Return positions, values, and the number of words of a tensor."""
    if wire_reference.is_uncompressed(value_type):
        value_type = wire_reference.coded_as(value_type, "float32")
        return slice(None), *read_values(words, 0, size, value_type)
    width = (size // k).bit_length() - 1
    low_words = math.ceil(k * width / 32)
    high_words = math.ceil((k + ((size - 1) >> width)) / 32)
    low = bits_of(words[:low_words])[: k * width].reshape(k, width)
    high = np.flatnonzero(bits_of(words[low_words:][:high_words])) - np.arange(k)
    where = (high << width) + (low << np.arange(width)).sum(axis=1)
    return where, *read_values(words, low_words + high_words, k, value_type)


def read_values(words, at, k, value_type):
    """Return k values from a word on, and the index of the word after them."""
    if value_type == "sign":
        num_words = 1 + math.ceil(k / 32)
        negative = bits_of(words[at + 1 : at + num_words])[:k]
        magnitude = words[at : at + 1].view(np.float32)
        return np.where(negative, -magnitude, magnitude), at + num_words
    if value_type == "float32":
        return words[at : at + k].view(np.float32), at + k
    if value_type in wire_reference.SHARED:
        num_words = wire_reference.num_value_words(k, value_type)
        coded = [int(word) for word in words[at : at + num_words]]
        values = wire_reference.values_of(coded, k, value_type)
        return values.astype(np.float32), at + num_words
    num_words = math.ceil(k / 2)
    halves = words[at : at + num_words].view(np.uint16)[:k]
    if value_type == "float16":
        halves = halves.view(np.float16)
    return step_oracle.widen(halves), at + num_words


def bits_of(words):
    data = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(data, bitorder="little").astype(np.int64)


def check(runner, layout, buffers, descend, num_bad=0):
    status, targets = runner.decode(layout, buffers, descend)
    assert status["error"] == RIGHT, runner.library.describe(int(status["error"]))
    assert status["nonfinite"] == num_bad
    expected = expected_targets(layout, buffers, descend)
    for i, (target, reference) in enumerate(zip(targets, expected, strict=True)):
        same(target, reference, f"target {i}")
    if runner.cpu is None:
        return
    nonfinite, error, cpu_targets = runner.decode_on_cpu(layout, buffers, descend)
    assert (nonfinite, error) == (num_bad, "")
    for i, (target, reference) in enumerate(zip(targets, cpu_targets, strict=True)):
        same(target, reference, f"the CPU operation's target {i}")


@pytest.mark.parametrize("descend", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 8, 70])
def test_small_sum_and_descend(runner, num_workers, descend):
    check(runner, LAYOUT, buffers_of(LAYOUT, num_workers), descend)


@pytest.mark.parametrize("descend", [False, True])
@pytest.mark.parametrize(
    ("size", "k"), [(10**7, 10**4), (10**7, 10**6), (10**8, 10**5)]
)
def test_large(runner, size, k, descend):
    if runner.device.kind == "emulated":
        pytest.skip("takes too long on the emulated device")
    layout = [(size, k, "bfloat16")]
    check(runner, layout, buffers_of(layout, 3), descend)


def test_small_many_tensors(runner):
    layout = [(40 + i % 90, 1 + i % 7, "float32") for i in range(600)]
    check(runner, layout, buffers_of(layout, 2), True)


def test_small_nonfinite_workers_are_counted(runner):
    check(runner, LAYOUT, buffers_of(LAYOUT, 8, few=8, num_bad=3), True, num_bad=3)


# --- bad buffers ----------------------------------------------------------------------


def set_word(index, value):
    def change(words):
        words[index] = value

    return change


def flip_high_bit(add):
    """Set one more of the first tensor's high bits, or clear one."""

    def change(words):
        at = 5 + math.ceil(90 * 6 / 32)
        free = ~words[at] if add else words[at]
        words[at] ^= free & (~free + np.uint32(1))

    return change


@pytest.mark.parametrize(
    ("change", "is_sealed", "message"),
    [
        (set_word(0, 7), True, "not one of this version"),
        (set_word(1, 7), True, "another model"),
        (set_word(3, 7), False, "another length"),
        (set_word(4, 7), False, "checksum"),
        (set_word(9, 7), False, "checksum"),
        (set_word(2, 6), True, "unknown flags"),
        (set_word(-1, 0x7F800000), True, "tensor 9: a value is not finite"),
        (flip_high_bit(True), True, "tensor 0: there are too many positions"),
        (flip_high_bit(False), True, "tensor 0: there are too few positions"),
    ],
)
@pytest.mark.parametrize("descend", [False, True])
def test_small_bad_buffers_change_nothing(runner, change, is_sealed, message, descend):
    buffers = buffers_of(LAYOUT, 4)
    change(buffers[2])
    if is_sealed:
        buffers[2] = step_oracle.seal(buffers[2])
    status, targets = runner.decode(LAYOUT, buffers, descend)
    text = runner.library.describe(int(status["error"]))
    assert text.startswith("The buffer of worker 2 ")
    assert message in text
    for target in targets:
        assert np.all(target == 0.5)
    if runner.cpu is not None:
        _, error, _ = runner.decode_on_cpu(LAYOUT, buffers, descend)
        assert error.startswith("The buffer of worker 2 ")


def test_small_every_flipped_bit_is_an_error(runner):
    layout = [(60, 4, "float32")]
    good = buffers_of(layout, 1)
    for bit in range(32 * good.size):
        words = good.copy()
        words[0, bit // 32] ^= np.uint32(1 << bit % 32)
        status, targets = runner.decode(layout, words, True)
        assert status["error"] != RIGHT
        assert np.all(targets[0] == 0.5)


def test_small_the_first_bad_worker_is_named(runner):
    buffers = buffers_of(LAYOUT, 70)
    buffers[[69, 66]] ^= np.uint32(1)
    status, _ = runner.decode(LAYOUT, buffers, False)
    assert "worker 66 " in runner.library.describe(int(status["error"]))


def test_small_error_texts(runner):
    describe = runner.library.describe
    assert describe(RIGHT) == "The buffers are right"
    assert describe(3 << 40 | 2 << 8 | 9) == (
        "The buffer of worker 3 is wrong in tensor 1: a position is not below the size"
    )
    assert describe(3 << 40 | 3, size=14) == "The buffer of"


@pytest.mark.parametrize(
    ("num_workers", "extra", "message"),
    [(0, 0, "workers"), (70_000, 0, "workers"), (1, 1, "another length")],
)
def test_small_wrong_arguments(runner, num_workers, extra, message):
    layout = [(60, 4, "float32")]
    tensors = describe_layout(layout)
    num_words = runner.library.words(tensors) + extra
    with pytest.raises(ValueError, match=message):
        runner.library.decode(
            None,
            tensors,
            FINGERPRINT,
            None,
            num_workers,
            num_words,
            [None],
            None,
            None,
            None,
        )

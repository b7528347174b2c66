"""Steps and decodings on the device, compared with NumPy and the CPU operations."""

import numpy as np
import step_oracle
from common import cuda_library
from step_oracle import Rule

FINGERPRINT = 0x1234567
RIGHT = 2**64 - 1


class Step:
    """One set of tensors on the device, for any number of steps.

    Args:
        runner: `Runner` with the device and the library.
        cases: list of `step_oracle.Case`; their state is copied.
        rule: how gradients are accumulated.
    """

    def __init__(self, runner, cases, rule=None):
        self._library, self._device = runner.library, runner.device
        array = self._device.array
        self.rule = rule or Rule()
        self.gradients = [array(c.gradient, c.shift) for c in cases]
        self.velocity = [array(c.velocity, c.shift) for c in cases]
        self.residual = [array(c.residual, c.shift) for c in cases]
        self.moment = [array(c.moment, c.shift) for c in cases]
        self.divisor = [array(_divisor(c)) for c in cases]
        self.scales = array(np.array([c.scale for c in cases]))
        self.offsets = array(np.array([c.offset for c in cases], np.int32))
        self.hints = array(np.zeros([len(cases), 3], np.int32))
        self.settings = settings(self.rule)
        self.describe(cases)

    def describe(self, cases):
        """Describe sizes, k and types of the cases; allocate memory for the step."""
        self.tensors = cuda_library.tensors(
            [
                {
                    "size": c.size,
                    "k": c.k,
                    "gradient": self.gradients[i].pointer,
                    "velocity": self.velocity[i].pointer,
                    "residual": self.residual[i].pointer,
                    "gradient_type": cuda_library.GRADIENT_TYPES[c.gradient_type],
                    "value_type": cuda_library.VALUE_TYPES[c.value_type],
                    "largest": c.largest,
                    "moment": None if c.divisor is None else self.moment[i].pointer,
                    "divisor": self.divisor[i].pointer,
                }
                for i, c in enumerate(cases)
            ]
        )
        num_bytes = self._library.compress_workspace(self.tensors)
        self.workspace = self._device.poisoned(num_bytes)
        num_words = self._library.words(self.tensors)
        self.words = self._device.poisoned(4 * num_words, np.uint32)

    def write(self, cases):
        """Copy the cases' gradients, scales, offsets and divisors to the device."""
        for array, c in zip(self.divisor, cases, strict=True):
            array.write(_divisor(c))
        for array, c in zip(self.gradients, cases, strict=True):
            array.write(c.gradient)
        self.scales.write([c.scale for c in cases])
        self.offsets.write([c.offset for c in cases])

    def queue(self):
        """Queue a step on the current stream."""
        self._library.compress(
            self._device.stream,
            self.tensors,
            self.settings,
            self.scales.pointer,
            self.offsets.pointer,
            self.hints.pointer,
            self.workspace.pointer,
            self.words.pointer,
        )

    def expect(self, cases, words):
        """Compare the device's buffer and state with the expected bits."""
        same(self.words.read(), words, "words")
        for i, c in enumerate(cases):
            same(self.residual[i].read(), c.residual, f"residual {i}")
            same(self.moment[i].read(), c.moment, f"moment {i}")
            if self.rule.name != "none":
                same(self.velocity[i].read(), c.velocity, f"velocity {i}")


class Runner:
    """Runs steps on the device, in NumPy and by the CPU operations."""

    def __init__(self, device, library, cpu):
        self.device, self.library, self.cpu = device, library, cpu

    def step(self, cases, rule=None):
        return Step(self, cases, rule)

    def check_steps(self, cases, rule=None, steps=1, change=None):
        """Do steps from the cases' state and compare all of it after each.

        `change(cases, number)` may change gradients, k, scales and offsets before a
        step. Afterwards the cases hold the state after the last step.

        Returns:
            The buffer of each step.
        """
        rule = rule or Rule()
        on_device = self.step(cases, rule)
        buffers = []
        for number in range(steps):
            if change is not None:
                change(cases, number)
            on_device.describe(cases)
            on_device.write(cases)
            on_device.queue()
            cpu_cases = [c.copy() for c in cases]
            words = step_oracle.step(cases, rule, FINGERPRINT)
            on_device.expect(cases, words)
            self._check_cpu(cpu_cases, cases, rule, words)
            buffers.append(words)
        return buffers

    def _check_cpu(self, cpu_cases, cases, rule, words):
        if self.cpu is None:
            return
        cpu_words = np.empty_like(words)
        divisors = list(map(_divisor, cpu_cases))
        tensors = cuda_library.tensors(
            [
                {
                    "size": c.size,
                    "k": c.k,
                    "gradient": c.gradient.ctypes.data,
                    "velocity": c.velocity.ctypes.data,
                    "residual": c.residual.ctypes.data,
                    "gradient_type": cuda_library.GRADIENT_TYPES[c.gradient_type],
                    "value_type": cuda_library.VALUE_TYPES[c.value_type],
                    "largest": c.largest,
                    "moment": None if c.divisor is None else c.moment.ctypes.data,
                    "divisor": divisor.ctypes.data,
                }
                for c, divisor in zip(cpu_cases, divisors, strict=True)
            ]
        )
        scales = np.array([c.scale for c in cpu_cases])
        offsets = np.array([c.offset for c in cpu_cases], np.int32)
        self.cpu.compress(
            tensors,
            settings(rule),
            scales.ctypes.data,
            offsets.ctypes.data,
            cpu_words.ctypes.data,
        )
        same(cpu_words, words, "the CPU operation's words")
        for expected, case in zip(cases, cpu_cases, strict=True):
            same(expected.residual, case.residual, "the CPU operation's residual")
            same(expected.velocity, case.velocity, "the CPU operation's velocity")
            same(expected.moment, case.moment, "the CPU operation's moment")

    def decode(self, layout, buffers, descend):
        """Return the status and the targets, [size] float32, initially 0.5.

        Args:
            layout: (size, k, value type) of each tensor.
            buffers: [workers, words] uint32.
            descend: whether to subtract 0.3 times the sums, or to write them.
        """
        tensors = describe_layout(layout)
        targets = [self.device.array(np.full(n, 0.5, np.float32)) for n, _, _ in layout]
        on_device = self.device.array(buffers)
        rate = self.device.array(np.array([0.3])) if descend else None
        num_bytes = self.library.decode_workspace(tensors, len(buffers))
        workspace = self.device.poisoned(num_bytes)
        status = self.device.poisoned(cuda_library.STATUS_BYTES)
        self.library.decode(
            self.device.stream,
            tensors,
            FINGERPRINT,
            on_device.pointer,
            len(buffers),
            buffers.shape[1],
            [t.pointer for t in targets],
            rate and rate.pointer,
            workspace.pointer,
            status.pointer,
        )
        return status.read().view(cuda_library.STATUS)[0], [t.read() for t in targets]

    def decode_on_cpu(self, layout, buffers, descend):
        """Return the number of non-finite workers, the error, and the targets."""
        targets = [np.full(n, 0.5, np.float32) for n, _, _ in layout]
        rate = np.array([0.3])
        nonfinite, error = self.cpu.decode(
            describe_layout(layout),
            FINGERPRINT,
            buffers.ctypes.data,
            *buffers.shape,
            [t.ctypes.data for t in targets],
            rate.ctypes.data if descend else None,
        )
        return nonfinite, error, targets


def _divisor(case):
    """Return the divisor's numbers; without a divisor, numbers that are not read."""
    unused = np.full(5, np.nan)
    return unused if case.divisor is None else np.asarray(case.divisor, np.float64)


def describe_layout(layout):
    """Return tensors without arrays from (size, k, value type)."""
    return cuda_library.tensors(
        [
            {"size": n, "k": k, "value_type": cuda_library.VALUE_TYPES[value_type]}
            for n, k, value_type in layout
        ]
    )


def settings(rule):
    """Return the library's settings of a rule."""
    return cuda_library.Settings(
        cuda_library.RULES[rule.name], rule.masking, rule.momentum, FINGERPRINT
    )


def same(result, expected, name):
    """Check that two arrays have the same bits; -0 and 0 are equal."""
    if not np.array_equal(result, expected):
        where = np.flatnonzero(result != expected)
        raise AssertionError(
            f"{name}: {where.size} of {expected.size} differ, first at {where[0]}: "
            f"{result[where[0]]}, not {expected[where[0]]}"
        )

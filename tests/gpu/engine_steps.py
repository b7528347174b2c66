"""Steps of the engine's methods on the device and by the CPU's engine."""

import dataclasses

import devices
import numpy as np
from common import cuda_engine, cuda_library
from harness_gpu import FINGERPRINT, RIGHT, same
from step_oracle import to_bfloat16, type_name

VECTORS = {"float32": 0, "bfloat16": 1, "float16": 2}  # index by type
ITEMS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}


@dataclasses.dataclass
class Case:
    """One tensor of a step.

    Attributes:
        method: name of its native method.
        gradient: [size] float32, float16, or uint16: the bits of bfloat16.
        parameters: parameters of the method.
        columns: length of the last axis.
        summed_as: type of the vector in which it is summed; None if it is gathered.
        has_residual: whether there is a residual.
        scale: factor of the gradient.
        shift: number of entries by which the device's arrays are out of alignment.
        divisor: [5] float64 as in `tf_dgc::Divisor`; or None.
        velocity, residual, moment: [size] float32, changed by a step.
    """

    method: str
    gradient: np.ndarray
    parameters: tuple = ()
    columns: int = 1
    summed_as: str | None = None
    has_residual: bool = True
    scale: float = 1.0
    shift: int = 0
    divisor: np.ndarray = None
    velocity: np.ndarray = None
    residual: np.ndarray = None
    moment: np.ndarray = None

    def __post_init__(self):
        random = np.random.default_rng(self.size)
        if self.velocity is None:
            self.velocity = random.standard_normal(self.size, np.float32)
        if self.residual is None:
            self.residual = random.standard_normal(self.size, np.float32)
        if self.moment is None:
            self.moment = np.zeros(self.size, np.float32)

    @property
    def size(self):
        return self.gradient.size

    @property
    def gradient_type(self):
        return type_name(self.gradient)

    def describe(self, index, gradient, velocity, residual, moment=None, divisor=None):
        """Return the libraries' description of the tensor; arguments are addresses."""
        return {
            "method": self.method,
            "parameters": self.parameters,
            "vector": -1 if self.summed_as is None else VECTORS[self.summed_as],
            "size": self.size,
            "columns": self.columns,
            "index": index,
            "gradient_type": cuda_library.GRADIENT_TYPES[self.gradient_type],
            "gradient": gradient,
            "velocity": velocity,
            "residual": residual if self.has_residual else None,
            "moment": None if self.divisor is None else moment,
            "divisor": divisor,
        }


def draw(size, seed, dtype="float32"):
    """Return normally distributed numbers; bfloat16 as its bits."""
    numbers = np.random.default_rng(seed).standard_normal(size, np.float32)
    return to_bfloat16(numbers) if dtype == "bfloat16" else numbers.astype(dtype)


class Worker:
    """One worker's tensors in some memory.

    Args:
        memory: a device, or `devices.Emulated()`.
        engine: library that computes sizes of buffers.
        cases: its tensors; they are copied.
        rule: "none", "momentum" or "nesterov".
        worker: index of the worker.
    """

    def __init__(self, memory, engine, cases, rule="none", worker=0):
        self.memory, self.cases = memory, cases
        self.gradients = [memory.array(c.gradient, c.shift) for c in cases]
        self.velocity = [memory.array(c.velocity, c.shift) for c in cases]
        self.residual = [memory.array(c.residual, c.shift) for c in cases]
        self.moment = [memory.array(c.moment, c.shift) for c in cases]
        unused = np.full(5, np.nan)
        divisors = [unused if c.divisor is None else c.divisor for c in cases]
        self.divisor = [memory.array(np.array(d, np.float64)) for d in divisors]
        self.scales = memory.array(np.array([c.scale for c in cases]))
        self.iteration = memory.array(np.array([0], np.int64))
        self.all_taken = memory.poisoned(1)
        self.coding = cuda_engine.Coding(
            cuda_library.RULES[rule], 0.75, FINGERPRINT, worker, 12345
        )
        self.tensors = cuda_engine.tensors(
            [
                c.describe(
                    i,
                    self.gradients[i].pointer,
                    self.velocity[i].pointer,
                    self.residual[i].pointer,
                    self.moment[i].pointer,
                    self.divisor[i].pointer,
                )
                for i, c in enumerate(cases)
            ]
        )
        self.words = memory.poisoned(4 * engine.words(self.tensors), np.uint32)
        self.numbers = {
            kind: memory.poisoned(
                np.dtype(ITEMS[kind]).itemsize * engine.numbers(self.tensors, at),
                ITEMS[kind],
            )
            for kind, at in VECTORS.items()
        }
        self.vectors = cuda_engine.vectors(
            [
                (array.pointer, cuda_library.GRADIENT_TYPES[kind])
                for kind, array in self.numbers.items()
            ]
        )

    def write(self, gradients, scales, iteration):
        """Write the inputs of a step into memory."""
        for array, gradient in zip(self.gradients, gradients, strict=True):
            array.write(gradient)
        self.scales.write(scales)
        self.iteration.write([iteration])

    def sent(self):
        """Return a copy of the words, and of the numbers by type."""
        numbers = {kind: array.read().copy() for kind, array in self.numbers.items()}
        return self.words.read().copy(), numbers

    def expect(self, other):
        """Check that all results equal another worker's."""
        same(self.words.read(), other.words.read(), "words")
        for kind in VECTORS:
            numbers, expected = self.numbers[kind].read(), other.numbers[kind].read()
            same(numbers, expected, f"numbers as {kind}")
        for i in range(len(self.cases)):
            for name in ("residual", "velocity", "moment"):
                array, expected = getattr(self, name)[i], getattr(other, name)[i]
                same(_bits(array), _bits(expected), f"{name} {i}")


def _bits(array):
    return np.ascontiguousarray(array.read()).view(np.uint32)


class Both:
    """Runs the same steps by the kernels and by the CPU's engine."""

    def __init__(self, device, library, engine, cpu):
        self.device, self.library = device, library
        self.engine, self.cpu = engine, cpu

    def steps(self, cases, rule="none", count=2, change=None, worker=0):
        """Do steps by both, compare all results, and return what each step sent.

        `change(number, gradients, scales)` may replace gradients and scales of a step.
        """
        on_device = Worker(self.device, self.engine, cases, rule, worker)
        on_cpu = Worker(devices.Emulated(), self.engine, cases, rule, worker)
        sent = []
        for number in range(count):
            scales = [c.scale for c in cases]
            gradients = [c.gradient for c in cases]
            if number:
                gradients = [
                    draw(c.size, 1000 * number + i, c.gradient_type)
                    for i, c in enumerate(cases)
                ]
            if change is not None:
                gradients, scales = change(number, gradients, scales)
            on_device.write(gradients, scales, 7 + number)
            on_cpu.write(gradients, scales, 7 + number)
            self.run(on_device)
            self.encode_on_cpu(on_cpu)
            on_device.expect(on_cpu)
            left_out = not on_device.all_taken.read()[0]
            assert left_out == (on_device.numbers["float32"].read()[0] != 0)
            sent.append(on_cpu.sent())
        return sent

    def run(self, worker):
        """Do a step on the device, and wait for it."""
        workspace = self.device.poisoned(self.engine.encode_workspace(worker.tensors))
        self.queue(worker, workspace)
        self.device.synchronize()

    def queue(self, worker, workspace):
        """Queue a step on the device."""
        self.engine.encode(
            self.device.stream,
            worker.tensors,
            worker.coding,
            worker.scales.pointer,
            worker.iteration.pointer,
            worker.vectors,
            workspace.pointer,
            worker.words.pointer,
            worker.all_taken.pointer,
        )

    def encode_on_cpu(self, worker):
        self.cpu.encode(
            worker.tensors,
            worker.coding,
            worker.scales.pointer,
            worker.iteration.pointer,
            worker.vectors,
            worker.words.pointer,
        )

    def sum(self, cases, buffers, numbers, descend):
        """Decode by both, compare, and return the results.

        Args:
            cases: tensors of all workers.
            buffers: [workers, words] uint32.
            numbers: sums of the vectors by type.
            descend: whether to subtract 0.3 times the sums from 0.5, or to write them.

        Returns:
            Text of the error ("" for none), number of non-finite workers, whether each
            sum is finite, and the targets.
        """
        result = self._sum_on_device(cases, buffers, numbers, descend)
        expected = self._sum_on_cpu(cases, buffers, numbers, descend)
        assert result[0][:22] == expected[0][:22]
        for target, expected_target in zip(result[3], expected[3], strict=True):
            same(target.view(np.uint32), expected_target.view(np.uint32), "target")
        if not result[0]:
            assert result[1] == expected[1]
            same(result[2], expected[2], "whether sums are finite")
        return result

    def _sum_on_device(self, cases, buffers, numbers, descend):
        memory = self.device
        arguments = _SumArguments(memory, cases, buffers, numbers, descend)
        tensors = arguments.tensors
        num_bytes = self.engine.sum_workspace(tensors, len(buffers))
        workspace = memory.poisoned(num_bytes)
        status = memory.poisoned(cuda_library.STATUS_BYTES)
        self.engine.sum(
            memory.stream,
            tensors,
            FINGERPRINT,
            arguments.buffers.pointer,
            *buffers.shape,
            arguments.vectors,
            [t.pointer for t in arguments.targets],
            arguments.rate and arguments.rate.pointer,
            arguments.finite.pointer,
            workspace.pointer,
            status.pointer,
        )
        result = status.read().view(cuda_library.STATUS)[0]
        error = self.describe(int(result["error"]))
        return (error, result["nonfinite"], *arguments.read())

    def _sum_on_cpu(self, cases, buffers, numbers, descend):
        arguments = _SumArguments(devices.Emulated(), cases, buffers, numbers, descend)
        nonfinite, error = self.cpu.sum(
            arguments.tensors,
            FINGERPRINT,
            arguments.buffers.pointer,
            *buffers.shape,
            arguments.vectors,
            [t.pointer for t in arguments.targets],
            arguments.rate and arguments.rate.pointer,
            arguments.finite.pointer,
        )
        return (error, nonfinite, *arguments.read())

    def describe(self, error):
        """Return the text of an error, "" for none."""
        return "" if error == RIGHT else self.library.describe(error)


class _SumArguments:
    """Arguments of decoding, in some memory."""

    def __init__(self, memory, cases, buffers, numbers, descend):
        self.tensors = cuda_engine.tensors(
            [c.describe(i, None, None, None) for i, c in enumerate(cases)]
        )
        self.buffers = memory.array(buffers)
        self._numbers = {kind: memory.array(numbers[kind]) for kind in VECTORS}
        self.vectors = cuda_engine.vectors(
            [
                (array.pointer, cuda_library.GRADIENT_TYPES[kind])
                for kind, array in self._numbers.items()
            ]
        )
        self.targets = [memory.array(np.full(c.size, 0.5, np.float32)) for c in cases]
        self.finite = memory.array(np.full(len(cases), 7, np.uint8))
        self.rate = memory.array(np.array([0.3])) if descend else None

    def read(self):
        return self.finite.read(), [t.read() for t in self.targets]

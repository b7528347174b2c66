"""Steps of the engine's methods on the device, and the same by the CPU's engine."""

import dataclasses

import devices
import numpy as np
from common import cuda_engine, cuda_library
from harness_gpu import FINGERPRINT, RIGHT, same
from step_oracle import to_bfloat16, type_name

VECTORS = {"float32": 0, "bfloat16": 1, "float16": 2}  # one of each type
ITEMS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}


@dataclasses.dataclass
class Case:
    """One tensor of a step.

    Attributes:
        method: name of its native method.
        gradient: [size] float32, float16, or uint16: the bits of bfloat16.
        parameters: those of the method.
        columns: length of the last axis.
        summed_as: type of the vector that it is summed in; None if it is gathered.
        keeps: whether there is a residual.
        scale: what the gradient is multiplied by.
        shift: entries by which the arrays are out of alignment on the device.
        divisor: [5] what the gradient is divided by, as of `tf_dgc::Divisor`; or None.
        velocity, residual, moment: [size] float32, changed by a step.
    """

    method: str
    gradient: np.ndarray
    parameters: tuple = ()
    columns: int = 1
    summed_as: str | None = None
    keeps: bool = True
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
        """Return what the libraries are told; arguments are addresses."""
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
            "residual": residual if self.keeps else None,
            "moment": None if self.divisor is None else moment,
            "divisor": divisor,
        }


def draw(size, seed, dtype="float32"):
    """Return normally distributed numbers; bfloat16 as its bits."""
    drawn = np.random.default_rng(seed).standard_normal(size, np.float32)
    return to_bfloat16(drawn) if dtype == "bfloat16" else drawn.astype(dtype)


class Worker:
    """One worker's tensors in some memory.

    Args:
        memory: a device, or `devices.Emulated()`.
        engine: for numbers of words.
        cases: what it has; they are copied.
        rule: "none", "momentum" or "nesterov".
        worker: its index.
    """

    def __init__(self, memory, engine, cases, rule="none", worker=0):
        self.memory, self.cases = memory, cases
        self.gradients = [memory.array(c.gradient, c.shift) for c in cases]
        self.velocity = [memory.array(c.velocity, c.shift) for c in cases]
        self.residual = [memory.array(c.residual, c.shift) for c in cases]
        self.moment = [memory.array(c.moment, c.shift) for c in cases]
        none = np.full(5, np.nan)
        self.divisor = [
            memory.array(np.array(none if c.divisor is None else c.divisor, np.float64))
            for c in cases
        ]
        self.scales = memory.array(np.array([c.scale for c in cases]))
        self.iteration = memory.array(np.array([0], np.int64))
        self.all_taken = memory.poisoned(1)
        self.coding = cuda_engine.Coding(
            cuda_library.RULES[rule], 0.75, FINGERPRINT, worker, 12345
        )
        own = self.velocity, self.residual, self.moment, self.divisor
        arrays = zip(cases, self.gradients, *own, strict=True)
        self.tensors = cuda_engine.tensors(
            [
                c.describe(i, *(array.pointer for array in of_case))
                for i, (c, *of_case) in enumerate(arrays)
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
        """Bring another step's inputs into memory."""
        for array, gradient in zip(self.gradients, gradients, strict=True):
            array.write(gradient)
        self.scales.write(scales)
        self.iteration.write([iteration])

    def sent(self):
        """Return words and, by type, numbers, as they are now."""
        numbers = {kind: array.read().copy() for kind, array in self.numbers.items()}
        return self.words.read().copy(), numbers

    def expect(self, other):
        """Check that everything is what another worker has."""
        same(self.words.read(), other.words.read(), "words")
        for kind in VECTORS:
            mine, theirs = self.numbers[kind].read(), other.numbers[kind].read()
            same(mine, theirs, f"numbers as {kind}")
        for i in range(len(self.cases)):
            for what in ("residual", "velocity", "moment"):
                mine, theirs = getattr(self, what)[i], getattr(other, what)[i]
                same(_bits(mine), _bits(theirs), f"{what} {i}")


def _bits(array):
    return np.ascontiguousarray(array.read()).view(np.uint32)


class Both:
    """The kernels and the CPU's engine, side by side."""

    def __init__(self, device, library, engine, cpu):
        self.device, self.library = device, library
        self.engine, self.cpu = engine, cpu

    def steps(self, cases, rule="none", count=2, change=None, worker=0):
        """Do steps by both, compare everything, and return what each sent.

        `change(number)` may return gradients and scales of a step.
        """
        mine = Worker(self.device, self.engine, cases, rule, worker)
        theirs = Worker(devices.Emulated(), self.engine, cases, rule, worker)
        done = []
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
            for worker_ in (mine, theirs):
                worker_.write(gradients, scales, 7 + number)
            self.queue(mine)
            self.encode_on_cpu(theirs)
            mine.expect(theirs)
            left_out = not mine.all_taken.read()[0]
            assert left_out == (mine.numbers["float32"].read()[0] != 0)
            done.append(theirs.sent())
        return done

    def queue(self, worker):
        """Do a step on the device."""
        workspace = self.device.poisoned(self.engine.encode_workspace(worker.tensors))
        self.launch(worker, workspace)
        self.device.synchronize()

    def launch(self, worker, workspace):
        """Only queue it."""
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
        """Decode by both; compare; return what is wrong, non-finite workers, and sums.

        Args:
            cases: what all workers know of the tensors.
            buffers: [workers, words] uint32.
            numbers: sums of the vectors by type.
            descend: whether 0.3 times the sums is subtracted from 0.5, or they are
                written.

        Returns:
            Text, number, whether each sum is finite, and the targets.
        """
        mine = self._sum_on_device(cases, buffers, numbers, descend)
        theirs = self._sum_on_cpu(cases, buffers, numbers, descend)
        assert mine[0][:22] == theirs[0][:22]
        for found, expected in zip(mine[3], theirs[3], strict=True):
            same(found.view(np.uint32), expected.view(np.uint32), "target")
        if not mine[0]:
            assert mine[1] == theirs[1]
            same(mine[2], theirs[2], "whether sums are finite")
        return mine

    def _sum_on_device(self, cases, buffers, numbers, descend):
        memory = self.device
        given = _Given(memory, cases, buffers, numbers, descend)
        tensors = given.tensors
        num_bytes = self.engine.sum_workspace(tensors, len(buffers))
        workspace = memory.poisoned(num_bytes)
        status = memory.poisoned(cuda_library.STATUS_BYTES)
        self.engine.sum(
            memory.stream,
            tensors,
            FINGERPRINT,
            given.buffers.pointer,
            *buffers.shape,
            given.vectors,
            [t.pointer for t in given.targets],
            given.rate and given.rate.pointer,
            given.finite.pointer,
            workspace.pointer,
            status.pointer,
        )
        found = status.read().view(cuda_library.STATUS)[0]
        return (self.describe(int(found["error"])), found["nonfinite"], *given.read())

    def _sum_on_cpu(self, cases, buffers, numbers, descend):
        given = _Given(devices.Emulated(), cases, buffers, numbers, descend)
        nonfinite, wrong = self.cpu.sum(
            given.tensors,
            FINGERPRINT,
            given.buffers.pointer,
            *buffers.shape,
            given.vectors,
            [t.pointer for t in given.targets],
            given.rate and given.rate.pointer,
            given.finite.pointer,
        )
        return (wrong, nonfinite, *given.read())

    def describe(self, error):
        """Return what a status says is wrong, or ""."""
        return "" if error == RIGHT else self.library.describe(error)


class _Given:
    """What decoding takes, in some memory."""

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

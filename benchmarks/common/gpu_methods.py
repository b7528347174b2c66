"""Contenders of `gpu_compress.py` for the engine's methods: a step, and decoding."""

import torch

from common import cuda_engine, cuda_library
from common.gpu_contenders import (
    DEVICE,
    FINGERPRINT,
    MOMENTUM,
    create_buffers,
    replayed,
    stream,
)

# By name: parameters; bytes that a step with momentum reads and writes per entry of a
# float32 gradient (gpu.md); and the dtype of the vector to sum, or None for a
# method that is gathered.
METHODS = {
    "two_bit": ((0.5,), 20, None),
    "qsgd, fixed": ((7, 0, 512, 0, 0), 20, None),
    "natural": ((), 21, None),
    "float16": ((2047,), 22, "float16"),
    "ef_sign_sgd": ((), 28, None),
    "one_bit": ((0,), 32, None),
}


class Encoding:
    """A step of one tensor, with its own state.

    Args:
        engine: a `cuda_engine.Engine`.
        method: a name of `METHODS`.
        flat: float32 gradients, one per round in turn.
    """

    def __init__(self, engine, method, flat):
        self._engine = engine
        self._flat = flat
        parameters, _, sum_dtype = METHODS[method]
        n = flat[0].numel()
        self.velocity = torch.zeros(n, device=DEVICE)
        self.residual = torch.zeros(n, device=DEVICE)
        self.tensors = [
            cuda_engine.tensors(
                [
                    {
                        "method": method,
                        "parameters": parameters,
                        "vector": 0 if sum_dtype else -1,
                        "size": n,
                        "gradient": gradient.data_ptr(),
                        "velocity": self.velocity.data_ptr(),
                        "residual": self.residual.data_ptr(),
                    }
                ]
            )
            for gradient in flat
        ]
        momentum = cuda_library.RULES["momentum"]
        self._coding = cuda_engine.Coding(momentum, MOMENTUM, FINGERPRINT, 0, 1)
        self._scales = torch.ones(1, dtype=torch.float64, device=DEVICE)
        self._iteration = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self._finite = _bytes(1)
        self._workspace = _bytes(engine.encode_workspace(self.tensors[0]))
        num_words = engine.words(self.tensors[0])
        self.words = torch.zeros(num_words, dtype=torch.int32, device=DEVICE)
        self.numbers = _bytes(2 * engine.numbers(self.tensors[0], 0))
        self.vectors = cuda_engine.vectors(
            [(self.numbers.data_ptr(), cuda_library.VALUE_TYPES[sum_dtype])]
            if sum_dtype
            else []
        )

    def queued(self, number):
        """Queue a step: a few launches."""
        self._engine.encode(
            stream(),
            self.tensors[number % len(self.tensors)],
            self._coding,
            self._scales.data_ptr(),
            self._iteration.data_ptr(),
            self.vectors,
            self._workspace.data_ptr(),
            self.words.data_ptr(),
            self._finite.data_ptr(),
        )

    def captured(self):
        """Return a contender that replays the steps from graphs, one per gradient."""
        return replayed(self.queued, len(self._flat))

    def check(self):
        """Raise if the step left out its gradient."""
        if not int(self._finite[0]):
            raise RuntimeError("a step left its gradient out")


class Summing:
    """Decodes buffers of one step, or their sum, and subtracts it from a variable.

    Args:
        engine: a `cuda_engine.Engine`.
        encoding: `Encoding` whose steps fill the buffers.
        num_workers: number of buffers.
    """

    def __init__(self, engine, encoding, num_workers=8):
        self._engine = engine
        self._encoding = encoding
        self._buffers = create_buffers(encoding, num_workers)
        self._target = torch.zeros_like(encoding.residual)
        self._rate = torch.tensor([0.1], dtype=torch.float64, device=DEVICE)
        num_bytes = engine.sum_workspace(encoding.tensors[0], num_workers)
        self._workspace = _bytes(num_bytes)
        self._finite = _bytes(1)
        self._status = torch.zeros(2, dtype=torch.int64, device=DEVICE)

    def queued(self, _):
        """Queue the decoding."""
        self._engine.sum(
            stream(),
            self._encoding.tensors[0],
            FINGERPRINT,
            self._buffers.data_ptr(),
            *self._buffers.shape,
            self._encoding.vectors,
            [self._target.data_ptr()],
            self._rate.data_ptr(),
            self._finite.data_ptr(),
            self._workspace.data_ptr(),
            self._status.data_ptr(),
        )

    def check(self):
        """Raise if the kernel updated nothing, and so did hardly any work."""
        succeeded = int(self._status[0]) % 2**64 == 2**64 - 1
        if not succeeded or not int(self._finite[0]):
            raise RuntimeError("a sum was rejected")


def _bytes(count):
    return torch.zeros(count, dtype=torch.uint8, device=DEVICE)

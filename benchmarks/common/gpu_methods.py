"""What `gpu_compress.py` times of the engine's methods: a step, and a decoding."""

import torch

from common import cuda_engine, cuda_library
from common.gpu_contenders import (
    DEVICE,
    FINGERPRINT,
    MOMENTUM,
    buffers_of,
    replayed,
    stream,
)

# Name and parameters; bytes that a step reads and writes of an entry of a float32
# gradient, with momentum (docs/gpu.md); and the type of the vector that it is summed
# in, if it is.
METHODS = {
    "two_bit": ((0.5,), 20, None),
    "qsgd, fixed": ((7, 0, 512, 0, 0), 20, None),
    "natural": ((), 21, None),
    "float16": ((2047,), 22, "float16"),
    "ef_sign_sgd": ((), 28, None),
    "one_bit": ((0,), 32, None),
}


class Encoding:
    """A step of one tensor, with state of its own.

    Args:
        engine: a `cuda_engine.Engine`.
        method: a name of `METHODS`.
        flat: float32 gradients, one for each round in turn.
    """

    def __init__(self, engine, method, flat):
        self._engine, self._flat = engine, flat
        parameters, _, self.summed_as = METHODS[method]
        n = flat[0].numel()
        self.velocity, self.residual = (torch.zeros(n, device=DEVICE) for _ in range(2))
        self.tensors = [
            cuda_engine.tensors(
                [
                    {
                        "method": method,
                        "parameters": parameters,
                        "vector": 0 if self.summed_as else -1,
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
        self._taken = _bytes(1)
        self._workspace = _bytes(engine.encode_workspace(self.tensors[0]))
        num_words = engine.words(self.tensors[0])
        self.words = torch.zeros(num_words, dtype=torch.int32, device=DEVICE)
        self.numbers = _bytes(2 * engine.numbers(self.tensors[0], 0))
        self.vectors = cuda_engine.vectors(
            [(self.numbers.data_ptr(), cuda_library.VALUE_TYPES[self.summed_as])]
            if self.summed_as
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
            self._taken.data_ptr(),
        )

    def captured(self):
        """Return a contender that replays the steps from graphs, one per gradient."""
        return replayed(self.queued, len(self._flat))

    def check(self):
        """Raise if a gradient was left out: then it was another step."""
        if not int(self._taken[0]):
            raise RuntimeError("a step left its gradient out")


class Summing:
    """Eight workers' buffers of one step, or their sum, subtracted from a variable.

    Args:
        engine: a `cuda_engine.Engine`.
        encoding: whose steps make the buffers.
        num_workers: how many buffers.
    """

    def __init__(self, engine, encoding, num_workers=8):
        self._engine, self._encoding = engine, encoding
        self._buffers = buffers_of(encoding, num_workers)
        self._target = torch.zeros_like(encoding.residual)
        self._rate = torch.tensor([0.1], dtype=torch.float64, device=DEVICE)
        num_bytes = engine.sum_workspace(encoding.tensors[0], num_workers)
        self._workspace, self._finite = _bytes(num_bytes), _bytes(1)
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
        """Raise if nothing was updated: then hardly any work was done."""
        right = int(self._status[0]) % 2**64 == 2**64 - 1
        if not right or not int(self._finite[0]):
            raise RuntimeError("a sum was refused")


def _bytes(count):
    return torch.zeros(count, dtype=torch.uint8, device=DEVICE)

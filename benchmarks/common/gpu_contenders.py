"""Contenders of `gpu_compress.py`: the kernels, a copy, and selections in PyTorch.

A contender is a function of the round's number that only queues work on PyTorch's
current stream (except `sampled`, which waits for the size of its selection).
"""

import math

import torch

from common import cuda_library

DEVICE = "cuda"
MOMENTUM = 0.9
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
FINGERPRINT = 1


def stream():
    """Return the address of PyTorch's current stream."""
    return torch.cuda.current_stream().cuda_stream


def gradients(n, dtype, count):
    """Return `count` random gradients of n entries."""
    return [torch.randn(n, device=DEVICE).to(DTYPES[dtype]) for _ in range(count)]


class Kernels:
    """The fused step, with its own state.

    Args:
        library: a `cuda_library.Library`.
        sizes: (entries, whether uncompressed) of each tensor.
        sparsity: share of entries not sent.
        dtype: name of the gradients' dtype.
        flat: concatenated gradients of all tensors, one per round in turn.
    """

    def __init__(self, library, sizes, sparsity, dtype, flat):
        self._library = library
        self._sizes = sizes
        self.velocity = [torch.zeros(n, device=DEVICE) for n, _ in sizes]
        self.residual = [torch.zeros(n, device=DEVICE) for n, _ in sizes]
        self._gradients = [g.split([n for n, _ in sizes]) for g in flat]
        counts = [
            n if uncompressed else num_sent(n, sparsity) for n, uncompressed in sizes
        ]
        self.layouts = [
            cuda_library.tensors(
                [
                    self._describe(i, counts[i], gradients[i], dtype)
                    for i in range(len(sizes))
                ]
            )
            for gradients in self._gradients
        ]
        self._settings = cuda_library.Settings(1, 1, MOMENTUM, FINGERPRINT)
        self._scales = torch.ones(len(sizes), dtype=torch.float64, device=DEVICE)
        self._offsets = torch.zeros(len(sizes), dtype=torch.int32, device=DEVICE)
        self.hints = torch.zeros(len(sizes), 3, dtype=torch.int32, device=DEVICE)
        self.num_bytes = library.compress_workspace(self.layouts[0])
        self._workspace = torch.empty(self.num_bytes, dtype=torch.uint8, device=DEVICE)
        num_words = library.words(self.layouts[0])
        self.words = torch.zeros(num_words, dtype=torch.int32, device=DEVICE)

    def queued(self, number):
        """Queue a step: a few launches."""
        self._library.compress(
            stream(),
            self.layouts[number % len(self.layouts)],
            self._settings,
            self._scales.data_ptr(),
            self._offsets.data_ptr(),
            self.hints.data_ptr(),
            self._workspace.data_ptr(),
            self.words.data_ptr(),
        )

    def captured(self):
        """Return a contender that replays the steps from graphs, one per gradient."""
        return replayed(self.queued, len(self.layouts))

    def _describe(self, i, k, gradient, dtype):
        n, uncompressed = self._sizes[i]
        value_type = "exempt" if uncompressed else "float32"
        return {
            "size": n,
            "k": k,
            "gradient": gradient.data_ptr(),
            "velocity": self.velocity[i].data_ptr(),
            "residual": self.residual[i].data_ptr(),
            "gradient_type": cuda_library.GRADIENT_TYPES[dtype],
            "value_type": cuda_library.VALUE_TYPES[value_type],
        }


class Decoding:
    """Decodes buffers of one step and subtracts them from the variables.

    Args:
        library: a `cuda_library.Library`.
        kernels: `Kernels` whose steps fill the buffers.
        num_workers: number of buffers.
    """

    def __init__(self, library, kernels, num_workers=8):
        self._library = library
        self._tensors = kernels.layouts[0]
        self._buffers = create_buffers(kernels, num_workers)
        self._targets = [torch.zeros_like(v) for v in kernels.residual]
        self._rate = torch.tensor([0.1], dtype=torch.float64, device=DEVICE)
        num_bytes = library.decode_workspace(self._tensors, num_workers)
        self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
        self._status = torch.zeros(2, dtype=torch.int64, device=DEVICE)

    def queued(self, _):
        """Queue the decoding."""
        self._library.decode(
            stream(),
            self._tensors,
            FINGERPRINT,
            self._buffers.data_ptr(),
            *self._buffers.shape,
            [t.data_ptr() for t in self._targets],
            self._rate.data_ptr(),
            self._workspace.data_ptr(),
            self._status.data_ptr(),
        )

    def check(self):
        """Raise if the kernel rejected the buffers, and so did hardly any work."""
        error = int(self._status[0]) % 2**64
        if error != 2**64 - 1:
            raise RuntimeError(self._library.describe(error))


class Torch:
    """Momentum correction and selection in PyTorch; arguments as in `Kernels`."""

    def __init__(self, n, sparsity, flat):
        self._k = num_sent(n, sparsity)
        self._flat = flat
        self._velocity = torch.zeros(n, device=DEVICE)
        self._residual = torch.zeros(n, device=DEVICE)

    def correct(self, number):
        """Accumulate the gradient; two fused multiply-adds in place."""
        self._velocity.mul_(MOMENTUM).add_(self._flat[number % len(self._flat)])
        self._residual.add_(self._velocity)

    def top_k(self, number):
        """Send exactly k: `torch.topk` of the magnitudes, gather, mask."""
        self.correct(number)
        self._send(torch.topk(self._residual.abs(), self._k, sorted=False).indices)

    def sampled(self, number):
        """Send about k, with a threshold from 1 % of the entries, as in Lin et al."""
        self.correct(number)
        magnitude = self._residual.abs()
        n = magnitude.numel()
        sample = magnitude[torch.randint(n, (max(1, n // 100),), device=DEVICE)]
        sample_k = max(1, self._k * sample.numel() // n)
        threshold = torch.topk(sample, sample_k).values[-1]
        self._send(torch.nonzero(magnitude >= threshold).view(-1))

    def _send(self, positions):
        values = self._residual[positions]
        self._residual[positions] = 0
        self._velocity[positions] = 0
        return positions, values


def floor(n, num_bytes):
    """Return a contender that copies: it reads and writes n * num_bytes in total."""
    shape = {"dtype": torch.uint8, "device": DEVICE}
    source = torch.zeros(n * num_bytes // 2, **shape)
    target = torch.empty_like(source)
    return lambda _: target.copy_(source)


def create_buffers(sender, num_workers):
    """Return the buffers of `num_workers` steps as rows.

    Args:
        sender: `Kernels` or `gpu_methods.Encoding`.
        num_workers: number of steps.
    """
    buffers = []
    for number in range(num_workers):
        sender.queued(number)
        buffers.append(sender.words.clone())
    return torch.stack(buffers)


def replayed(queued, count):
    """Return a contender that replays `queued(number)` from `count` graphs in turn."""
    graphs = [_capture(queued, number) for number in range(count)]
    return lambda number: graphs[number % count].replay()


def _capture(queued, number):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queued(number)
    return graph


def num_sent(n, sparsity):
    """Return k, the number of entries sent, as the optimizer computes it."""
    return max(1, math.ceil(round((1 - sparsity) * n, 5)))

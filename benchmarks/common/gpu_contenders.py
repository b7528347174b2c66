"""What `gpu_compress.py` times: the kernels, a copy, and selections in PyTorch.

A contender is a function of the number of the round that only queues work on PyTorch's
current stream (but for `sampled`, whose selection waits for its own size).
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
    """Return `count` gradients of n entries, so that no step repeats the last one."""
    made = (torch.randn(n, device=DEVICE) for _ in range(count))
    return [g.to(DTYPES[dtype]) for g in made]


class Kernels:
    """The fused step, with state and gradients of its own.

    Args:
        library: a `cuda_library.Library`.
        sizes: (entries, whether sent whole) of each tensor.
        sparsity: share of entries that are not sent.
        dtype: of the gradients.
        flat: gradients of all tensors one after the other, one for each round in turn.
    """

    def __init__(self, library, sizes, sparsity, dtype, flat):
        self._library, self._sizes = library, sizes
        zeros = [[torch.zeros(n, device=DEVICE) for n, _ in sizes] for _ in range(2)]
        self.velocity, self.residual = zeros
        self._parts = [g.split([n for n, _ in sizes]) for g in flat]
        counts = [n if whole else num_sent(n, sparsity) for n, whole in sizes]
        self.layouts = [
            cuda_library.tensors(
                [
                    self._describe(i, counts[i], parts[i], dtype)
                    for i in range(len(sizes))
                ]
            )
            for parts in self._parts
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
        n, whole = self._sizes[i]
        return {
            "size": n,
            "k": k,
            "gradient": gradient.data_ptr(),
            "velocity": self.velocity[i].data_ptr(),
            "residual": self.residual[i].data_ptr(),
            "gradient_type": cuda_library.GRADIENT_TYPES[dtype],
            "value_type": cuda_library.VALUE_TYPES["exempt" if whole else "float32"],
        }


class Decoding:
    """Eight workers' buffers of one step, subtracted from the variables.

    Args:
        kernels: whose steps make the buffers.
        num_workers: how many buffers.
    """

    def __init__(self, library, kernels, num_workers=8):
        self._library, self._tensors = library, kernels.layouts[0]
        self._buffers = buffers_of(kernels, num_workers)
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
        """Raise if the buffers were refused: then hardly any work was done."""
        error = int(self._status[0]) % 2**64
        if error != 2**64 - 1:
            raise RuntimeError(self._library.describe(error))


class Torch:
    """The correction in PyTorch, and selections after it; arguments as `Kernels`."""

    def __init__(self, n, sparsity, flat):
        self._k, self._flat = num_sent(n, sparsity), flat
        self._velocity, self._residual = (
            torch.zeros(n, device=DEVICE) for _ in range(2)
        )

    def correct(self, number):
        """Accumulate the gradient; two fused multiply-adds in place."""
        self._velocity.mul_(MOMENTUM).add_(self._flat[number % len(self._flat)])
        self._residual.add_(self._velocity)

    def top_k(self, number):
        """Send exactly k: `torch.topk` of the magnitudes, gather, mask."""
        self.correct(number)
        self._send(torch.topk(self._residual.abs(), self._k, sorted=False).indices)

    def sampled(self, number):
        """Send about k, as the authors' code does: a threshold from 1 % of entries."""
        self.correct(number)
        magnitude = self._residual.abs()
        n = magnitude.numel()
        sample = magnitude[torch.randint(n, (max(1, n // 100),), device=DEVICE)]
        wanted = max(1, self._k * sample.numel() // n)
        threshold = torch.topk(sample, wanted).values[-1]
        self._send(torch.nonzero(magnitude >= threshold).view(-1))

    def _send(self, where):
        values = self._residual[where]
        self._residual[where] = 0
        self._velocity[where] = 0
        return where, values


def floor(n, num_bytes):
    """Return a copy that reads and writes together n times this many bytes."""
    shape = {"dtype": torch.uint8, "device": DEVICE}
    source = torch.zeros(n * num_bytes // 2, **shape)
    target = torch.empty_like(source)
    return lambda _: target.copy_(source)


def buffers_of(sender, num_workers):
    """Return buffers, one a row, of so many steps of what has `queued` and `words`."""
    made = []
    for number in range(num_workers):
        sender.queued(number)
        made.append(sender.words.clone())
    return torch.stack(made)


def replayed(queued, count):
    """Return a contender that replays `queued(number)` from as many graphs, in turn."""
    replays = [capture(lambda i=i: queued(i)) for i in range(count)]
    return lambda number: replays[number % count]()


def capture(queue):
    """Return a function that replays what `queue()` queues."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queue()
    return graph.replay


def num_sent(n, sparsity):
    """Return k as the optimizer does."""
    return max(1, math.ceil(round((1 - sparsity) * n, 5)))

"""Memory and streams of the device, by PyTorch, CuPy, or NumPy if it is emulated."""

import contextlib
import ctypes
import importlib

import numpy as np

ALIGNMENT = 256  # alignment of GPU allocators
POISON = 0x5A


class NoDeviceError(Exception):
    """Raised if there is no usable GPU; the text says why."""


class Array:
    """An array in the device's memory.

    Args:
        device: `Device` that holds it.
        content: NumPy array.
        shift: number of entries by which it is out of alignment.
        is_written: whether to copy the content, or only to allocate memory for it.
    """

    def __init__(self, device, content, shift=0, is_written=True):
        self.dtype, self.shape = content.dtype, content.shape
        self._device = device
        self._start = shift * content.itemsize
        self._memory = device.allocate(self._start + content.nbytes)
        if is_written:
            self.write(content)

    @property
    def pointer(self):
        """Address of the content, None if it is empty."""
        if not np.prod(self.shape):
            return None
        return self._device.address(self._memory) + self._start

    def write(self, content):
        """Replace the content."""
        content = np.array(content, self.dtype).reshape(self.shape)
        self._device.write(
            self._memory, self._start, content.reshape(-1).view(np.uint8)
        )

    def read(self):
        """Wait for the device, and return the content."""
        count = self.dtype.itemsize * int(np.prod(self.shape))
        data = self._device.read(self._memory, self._start, count)
        return data.view(self.dtype).reshape(self.shape)


class Device:
    """Base class of devices."""

    poisons = True

    def array(self, content, shift=0):
        """Return a copy of a NumPy array on the device."""
        return Array(self, np.asarray(content), shift)

    def poisoned(self, num_bytes, dtype=np.uint8):
        """Return memory that is not zero, like reused memory.

        Without `poisons` nothing is written, so that a tool can find early reads.
        """
        content = np.full(num_bytes, POISON, np.uint8).view(dtype)
        return Array(self, content, is_written=self.poisons)


class Emulated(Device):
    """The host's memory; work is done when it is queued."""

    kind = "emulated"
    stream = None

    def allocate(self, num_bytes):
        return np.empty(num_bytes + ALIGNMENT, np.uint8)

    def address(self, memory):
        return -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT

    def write(self, memory, start, content):
        self._view(memory, start, content.size)[:] = content

    def read(self, memory, start, count):
        return self._view(memory, start, count).copy()

    def synchronize(self):
        pass

    def _view(self, memory, start, count):
        start += self.address(memory) - memory.ctypes.data
        return memory[start : start + count]


class Torch(Device):
    """A GPU by way of PyTorch."""

    kind = "cuda"

    def __init__(self):
        self._torch = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise NoDeviceError(
                f"PyTorch {self._torch.__version__} finds no usable GPU"
            )
        self._torch.cuda.init()

    @property
    def stream(self):
        """Address of the current stream."""
        return self._torch.cuda.current_stream().cuda_stream

    def allocate(self, num_bytes):
        return self._torch.empty(num_bytes, dtype=self._torch.uint8, device="cuda")

    def address(self, memory):
        return memory.data_ptr()

    def write(self, memory, start, content):
        host = self._torch.from_numpy(content)
        memory[start : start + content.size].copy_(host)

    def read(self, memory, start, count):
        self.synchronize()
        return memory[start : start + count].cpu().numpy()

    def synchronize(self):
        self._torch.cuda.synchronize()

    @contextlib.contextmanager
    def new_stream(self):
        """Make a new stream the current one."""
        with self._torch.cuda.stream(self._torch.cuda.Stream()):
            yield

    def capture(self, queue):
        """Capture what a function queues; return a function that replays it."""
        self.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        # "global": a call that waits for the device fails, in any thread.
        with self._torch.cuda.graph(graph, capture_error_mode="global"):
            queue()
        return graph.replay


class Cupy(Device):
    """A GPU by way of CuPy."""

    kind = "cuda"

    def __init__(self):
        self._cupy = importlib.import_module("cupy")
        if self._cupy.cuda.runtime.getDeviceCount() == 0:
            raise NoDeviceError(f"CuPy {self._cupy.__version__} finds no usable GPU")

    @property
    def stream(self):
        """Address of the current stream."""
        return self._cupy.cuda.get_current_stream().ptr

    def allocate(self, num_bytes):
        return self._cupy.empty(num_bytes, self._cupy.uint8)

    def address(self, memory):
        return memory.data.ptr

    def write(self, memory, start, content):
        memory[start : start + content.size].set(content)
        self.synchronize()  # the host's memory is only borrowed

    def read(self, memory, start, count):
        self.synchronize()
        return memory[start : start + count].get()

    def synchronize(self):
        self._cupy.cuda.Device().synchronize()

    @contextlib.contextmanager
    def new_stream(self):
        """Make a new stream the current one."""
        with self._cupy.cuda.Stream(non_blocking=True):
            yield

    def capture(self, queue):
        """Capture what a function queues; return a function that replays it."""
        self.synchronize()
        stream = self._cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture(self._cupy.cuda.runtime.streamCaptureModeGlobal)
            queue()
            graph = stream.end_capture()
        return lambda: graph.launch(self._cupy.cuda.get_current_stream())


def find():
    """Return a GPU.

    Raises:
        NoDeviceError: if there is none, or neither PyTorch nor CuPy.
    """
    require_driver()
    missing = []
    for kind, name in [(Torch, "torch"), (Cupy, "cupy")]:
        try:
            return kind()
        except ImportError as error:
            missing.append(f"{name}: {error}")
    raise NoDeviceError(
        f"PyTorch or CuPy is needed to allocate memory of the GPU: {'; '.join(missing)}"
    )


def require_driver():
    """Raise without a GPU, before a large module is imported."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoDeviceError(f"no GPU: NVIDIA's driver is not here ({error})") from None
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code or count.value == 0:
        raise NoDeviceError(
            f"no GPU: the driver shows {count.value} of them (error {code}); if "
            "CUDA_VISIBLE_DEVICES hides them, as the tests of TensorFlow do, run "
            "`pytest tests/gpu` by itself"
        )

"""What the test device counts and fails with (`custom_ops/test_device/runtime.h`)."""

import ctypes
import pathlib
import sysconfig

import pytest

LIBRARY = (
    pathlib.Path(sysconfig.get_path("purelib"))
    / "tensorflow-plugins"
    / "libtf_dgc_test_device.so"
)
needs_test_device = pytest.mark.skipif(
    not LIBRARY.exists(), reason="needs the test device"
)


class DeviceCounters:
    """Counts kernel calls and copies to the host since the last reset."""

    def __init__(self):
        self._library = ctypes.CDLL(str(LIBRARY))
        for name in ("num_calls", "largest_copy"):
            self._function(name).restype = ctypes.c_int64

    def _function(self, name):
        return getattr(self._library, f"tf_dgc_test_device_{name}")

    def reset(self):
        self._function("reset")()

    @property
    def num_calls(self):
        return self._function("num_calls")()

    @property
    def largest_copy(self):
        return self._function("largest_copy")()

    def fail(self, text):
        """Let the next call of a kernel fail with this text."""
        self._function("fail")(text.encode())

    def limit(self, num_bytes):
        """Let all allocations of more bytes fail; 0 takes that back."""
        self._function("limit")(ctypes.c_size_t(num_bytes))

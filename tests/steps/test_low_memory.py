"""A native operation without memory raises, in a process of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

from tf_dgc import native_library

SCRIPT = pathlib.Path(__file__).with_name("low_memory.py")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.skipif(
    native_library.load_library().library is None, reason="no native operations"
)
def test_step_without_memory_raises():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, timeout=120, check=True
    )

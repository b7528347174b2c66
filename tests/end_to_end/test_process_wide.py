"""Settings of TensorFlow that hold for a whole process, in one of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("process_wide.py")


@pytest.mark.slow
def test_settings_of_the_process_change_nothing():
    subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        timeout=280,
        check=True,
    )

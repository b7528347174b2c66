"""Process-wide settings of TensorFlow, in a separate process."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("process_wide.py")


@pytest.mark.slow
def test_process_wide_settings_do_not_change_weights():
    subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        timeout=280,
        check=True,
    )

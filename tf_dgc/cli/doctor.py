"""Doctor: which path is live in this installation, and why."""

import os
import platform
import shlex
import shutil
import subprocess
import sys

import keras
import tensorflow as tf

import tf_dgc
from tf_dgc import native_library
from tf_dgc._internals import tracing
from tf_dgc.multiworker.launch import onednn


def main() -> int:
    """Print what was found; return 1 if native operations are wanted and missing."""
    try:
        state = native_library.load_library()
    except (ImportError, ValueError) as error:
        print(f"native operations: error. {error}", file=sys.stderr)
        return 1
    for name, value in report(state):
        print(f"{name:<20}{value}")
    if advice := onednn.advice():
        print(f"\n{advice}")
    missing = state.enabled and state.library is None
    if missing:
        print(f"\nSteps take several times as long. {native_library.ADVICE}")
    return int(missing)


def report(state: native_library.NativeLibrary) -> list[tuple[str, str]]:
    """Return names and values to print.

    Args:
        state: state of the native operations in this process.
    """
    live = state.library is not None
    rows = [
        ("tf_dgc", f"{tf_dgc.__version__} in {os.path.dirname(tf_dgc.__file__)}"),
        ("Python", f"{platform.python_version()} ({platform.machine()})"),
        ("TensorFlow", tf.__version__),
        ("Keras", keras.__version__),
        ("processor", onednn.processor()),
        ("oneDNN", _onednn()),
        ("compiler here", _compiler()),
        ("TF_DGC_NATIVE", os.environ.get("TF_DGC_NATIVE", "not set")),
        ("native operations", f"{'yes' if live else 'no'}: {state.reason}"),
    ]
    if state.stamp:
        rows += [
            ("  built for", f"TensorFlow {state.stamp.get('tensorflow')}"),
            ("  built by", state.stamp.get("compiler", "unknown")),
        ]
    if live:
        problem = state.cuda_problem
        usable = f"not used: {problem}" if problem else "yes"
        rows += [
            ("  vector level", state.vector_level),
            ("  CUDA kernels", f"{usable}; nvcc {state.cuda}" if state.cuda else "no"),
        ]
        devices = "CPUs" if problem else "CPUs and GPUs"
        path = f"native, on {devices}; TensorFlow operations elsewhere and within XLA"
    else:
        path = "TensorFlow operations"
    rows.append(("path", path))
    return rows


def _onednn() -> str:
    """Return what TensorFlow does, and who decided that."""
    wish = os.environ.get(onednn.VARIABLE)
    reason = (
        "TensorFlow's default here" if wish is None else f"{onednn.VARIABLE}={wish}"
    )
    return f"{'on' if tracing.uses_onednn() else 'off'}: {reason}"


def _compiler() -> str:
    """Return what `custom_ops/builder.py` would compile with."""
    wish = os.environ.get("CXX", "")
    try:
        command = shlex.split(wish) or ["g++"]
        if shutil.which(command[0]) is None:
            return f"none ({command[0]} not found)"
        result = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, check=False
        )
    except (OSError, ValueError) as error:
        return f"none (CXX={wish}: {error})"
    return (result.stdout.strip() or "unknown").splitlines()[0]

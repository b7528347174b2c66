"""`tf-dgc doctor`: which step implementation this installation uses, and why."""

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
from tf_dgc.steps import gpu_check


def main() -> int:
    """Print the report; return 1 if native operations are wanted and missing."""
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
        print(f"\nSteps take several times longer. {native_library.ADVICE}")
    return int(missing)


def report(state: native_library.NativeLibrary) -> list[tuple[str, str]]:
    """Return names and values to print."""
    is_native = state.library is not None
    rows = [
        ("tf_dgc", f"{tf_dgc.__version__} in {os.path.dirname(tf_dgc.__file__)}"),
        ("Python", f"{platform.python_version()} ({platform.machine()})"),
        ("TensorFlow", tf.__version__),
        ("Keras", keras.__version__),
        ("processor", onednn.processor()),
        ("oneDNN", _onednn()),
        ("compiler here", _compiler()),
        ("TF_DGC_NATIVE", os.environ.get("TF_DGC_NATIVE", "not set")),
        ("native operations", f"{'yes' if is_native else 'no'}: {state.reason}"),
    ]
    if state.stamp:
        rows += [
            ("  built for", f"TensorFlow {state.stamp.get('tensorflow')}"),
            ("  built by", state.stamp.get("compiler", "unknown")),
        ]
    if is_native:
        problem = state.cuda_problem or gpu_check.find_problem()
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
    value = os.environ.get(onednn.VARIABLE)
    reason = (
        "TensorFlow's default here" if value is None else f"{onednn.VARIABLE}={value}"
    )
    return f"{'on' if tracing.uses_onednn() else 'off'}: {reason}"


def _compiler() -> str:
    configured = os.environ.get("CXX", "")
    try:
        command = shlex.split(configured) or ["g++"]
        if shutil.which(command[0]) is None:
            return f"none ({command[0]} not found)"
        result = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, check=False
        )
    except (OSError, ValueError) as error:
        return f"none (CXX={configured}: {error})"
    return (result.stdout.strip() or "unknown").splitlines()[0]

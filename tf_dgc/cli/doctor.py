"""`tf-dgc doctor`: what this installation uses and why; whether workers could start."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

import keras
import psutil
import tensorflow as tf

import tf_dgc
from tf_dgc import native_library
from tf_dgc._internals import tracing
from tf_dgc.cli import cluster_checks
from tf_dgc.multiworker.launch import onednn
from tf_dgc.steps import gpu_check


def main(hosts: Sequence[str] = (), ssh: str = "") -> int:
    """Print the report; return 1 if native operations are missing or a check fails."""
    try:
        state = native_library.load_library()
    except (ImportError, ValueError) as error:
        print(f"native operations: error. {error}", file=sys.stderr)
        return 1
    for name, value in report(state):
        print(f"{name:<20}{value}", flush=True)
    checks = cluster_checks.check_tf_config()
    if hosts:
        checks += cluster_checks.check_hosts(hosts, ssh)
    for check in checks:
        marker = "PROBLEM: " if check.is_problem else ""
        print(f"{check.name:<19} {marker}{check.text}")
    if advice := onednn.advice():
        print(f"\n{advice}")
    missing = state.enabled and state.library is None
    if missing:
        print(f"\nCompression takes several times as long. {native_library.ADVICE}")
    return int(missing or any(check.is_problem for check in checks))


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
        ("memory", _memory()),
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
        problem = gpu_check.find_problem()
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


def _memory() -> str:
    memory = psutil.virtual_memory()
    return f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB are free"


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

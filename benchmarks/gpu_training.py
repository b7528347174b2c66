"""Trains on a GPU with TensorFlow, and times steps: the check of a machine with one.

    python benchmarks/gpu_training.py --json gpu_training.json

First the tests on GPUs; then `examples/digits.py` with one and with two processes on
the first GPU; then steps without communication, of the shapes of a perceptron and of
ResNet-50 (25 million entries each): stock SGD, DGC with TensorFlow's operations
(`tf.math.top_k`), and DGC with the CUDA kernels, in turn. It needs pytest and
scikit-learn, and takes up to five minutes. `--quick` is for the test device
(`.ci/test-device`): tensors are 64 times as small.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import tensorflow as tf
from absl import app, flags
from common import reporting

from tf_dgc.steps import gpu_check

_QUICK = flags.DEFINE_bool("quick", False, "Small tensors and few steps.")
_TESTS = flags.DEFINE_bool("tests", True, "Run the tests on GPUs first.")
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Rounds of timed steps.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "File to write the rows to.")

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_WORKER = pathlib.Path(__file__).parent / "workers" / "gpu_step_worker.py"
_OPTIMIZERS = {  # optimizer of the worker, TF_DGC_CUDA
    "SGD": ("sgd", ""),
    "DGC, tf.math.top_k": ("dgc", "0"),
    "DGC, CUDA kernels": ("dgc", "1"),
}
COLUMNS = [
    ("model", "shapes", "s"),
    ("optimizer", "optimizer", "s"),
    ("entries", "entries", ",d"),
    ("median_ms", "step (ms)", ".3f"),
    ("ratio_to_sgd", "by SGD", ".2f"),
    ("peak_bytes", "peak memory (bytes)", ",d"),
]


def run(program, *arguments, **variables):
    """Run a program of this environment; return its output and its seconds."""
    # By its path, as `python -m` would import the package of the source tree.
    command = [pathlib.Path(sys.executable).with_name(program), *arguments]
    environment = {**os.environ, "TF_FORCE_GPU_ALLOW_GROWTH": "true", **variables}
    start = time.perf_counter()
    finished = subprocess.run(
        command,
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        print(finished.stdout[-4000:], finished.stderr[-4000:], file=sys.stderr)
        raise SystemExit(f"{' '.join(map(str, command))} failed")
    return finished.stdout, time.perf_counter() - start


def run_tests():
    """Run the tests on GPUs, with the kernels required."""
    tests = ["tests/on_gpu", "tests/contract/test_nonfinite.py"]
    output, seconds = run("pytest", "-q", "--on-gpu", *tests, TF_DGC_CUDA="1")
    print(f"tests: {output.strip().splitlines()[-1]} ({seconds:.0f} s)")


def train_digits(workers):
    """Train the digits, dense and with DGC, and print what the example prints."""
    script = ["examples/digits.py", "--seeds=1"]
    if _QUICK.value:
        script.append("--steps=20")
    output, seconds = run("tf-dgc", "run", f"--workers={workers}", *script)
    print(f"digits, {workers} processes ({seconds:.0f} s):\n{output.strip()}")


def time_steps(model):
    """Time the optimizers in turn; return a row for each."""
    sizes = ["--divide=64", "--steps=3"] if _QUICK.value else []
    measured = {name: [] for name in _OPTIMIZERS}
    for _ in range(_ROUNDS.value):
        for name, (optimizer, cuda) in _OPTIMIZERS.items():
            arguments = [f"--model={model}", f"--optimizer={optimizer}", *sizes]
            output, _ = run("python", _WORKER, *arguments, TF_DGC_CUDA=cuda)
            line = next(x for x in output.splitlines() if x.startswith("ROW "))
            measured[name].append(json.loads(line.removeprefix("ROW ")))
    rows = []
    for name, results in measured.items():
        median = statistics.median(r["median_ms"] for r in results)
        row = {"model": model, "optimizer": name, **results[0], "median_ms": median}
        rows.append({**row, "ratio_to_sgd": median / (rows or [row])[0]["median_ms"]})
    return rows


def main(_):
    """Run all parts; end with an error if one fails."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise SystemExit("TensorFlow has no GPU here.")
    details = tf.config.experimental.get_device_details(gpus[0])
    print(f"TensorFlow {tf.__version__}, {details.get('device_name', gpus[0].name)}")
    problem = gpu_check.find_problem()
    if problem:
        raise SystemExit(f"The CUDA kernels are not used: {problem}")
    if _TESTS.value:
        run_tests()
    for workers in (1, 2):
        train_digits(workers)
    rows = [row for model in ("mlp", "resnet50") for row in time_steps(model)]
    reporting.report(rows, COLUMNS, "Steps on a GPU, no communication", _JSON.value)


if __name__ == "__main__":
    app.run(main)

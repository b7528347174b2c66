"""Times a compressed step on a GPU.

    python benchmarks/gpu_compress.py --json gpu.json

Needs a GPU with some 30 GB, PyTorch and nvcc, but not TensorFlow. Paths take turns
within one run and are timed by events on the device:

- `floor`: a copy on the device of as many bytes as a step must move. A step reads
  gradient, velocity and residual and writes the latter two: 20 bytes per entry of a
  float32 gradient;
- `graph` and `queued`: the fused step of `custom_ops/cuda`, replayed from a CUDA graph
  or launched anew;
- `161 tensors`: the same for the variables of a ResNet-50 in one call;
- `torch top_k`: momentum correction, `torch.topk` of the magnitudes and masking;
- `torch sampled`: the same, with a threshold from a sample (not exactly k entries);
- `torch correction`: momentum correction alone;
- `decode 8`: decodes eight such buffers and subtracts them from the variables;
- for each method of the engine (`custom_ops/cuda_engine`): `graph`, `queued` and
  `decode 8`, and a copy of as many bytes as the method must move.
"""

import itertools
import pathlib
import random
import statistics
import sys

import numpy as np
from absl import app, flags
from common import cuda_engine, cuda_library, progress, reporting, resnet50

_SIZES = flags.DEFINE_list("sizes", ["2.556e7", "1e8"], "Entries of the tensor.")
_SPARSITIES = flags.DEFINE_list("sparsities", ["0.999"], "Shares of entries not sent.")
_DTYPES = flags.DEFINE_list(
    "dtypes", ["float32", "bfloat16", "float16"], "Types of the gradient."
)
_ROUNDS = flags.DEFINE_integer("rounds", 50, "Rounds that are timed.", lower_bound=3)
_WARM_UP = flags.DEFINE_integer("warm_up", 200, "Rounds before them.", lower_bound=1)
_GRADIENTS = flags.DEFINE_integer(
    "gradients", 16, "Different gradients, which take turns.", lower_bound=1
)
_LIBRARY = flags.DEFINE_string(
    "library", None, "Library with the kernels; built with nvcc by default."
)
_JSON = flags.DEFINE_string("json", None, "File to write the rows of the table to.")

# Copied before each measurement: flushes the cache, and lets the host queue the
# contender meanwhile, so that launch overhead does not count.
BALLAST = 1 << 29  # bytes

COLUMNS = [
    ("path", "path", "s"),
    ("n", "n", ",d"),
    ("sparsity", "sparsity", ".2%"),
    ("dtype", "type", "s"),
    ("median_ms", "median (ms)", ",.3f"),
    ("iqr_ms", "IQR (ms)", ".3f"),
    ("by_floor", "by floor", ".2f"),
    ("by_one_tensor", "by one tensor", ".2f"),
    ("top_k_by_this", "torch top_k by this", ".1f"),
    ("gb_per_s", "GB/s", ",.0f"),
]


def main(_):
    """Measure all cases and print the table."""
    torch = _torch()
    try:
        path = _LIBRARY.value or cuda_library.build("cuda")
    except (FileNotFoundError, RuntimeError) as error:
        sys.exit(f"gpu_compress.py: {error}")
    library = cuda_library.Library(path)
    rows = []
    cases = itertools.product(_SIZES.value, _SPARSITIES.value, _DTYPES.value)
    for n, sparsity, dtype in progress.track(cases, "cases", ", ".join):
        rows += measure(library, int(float(n)), float(sparsity), dtype)
        torch.cuda.empty_cache()
    rows += measure_many(library, float(_SPARSITIES.value[0]))
    rows += measure_methods(cuda_engine.Engine(path), int(float(_SIZES.value[0])))
    card = torch.cuda.get_device_properties(0)
    title = f"Compressing on one {card.name}"
    reporting.report(rows, COLUMNS, title, _JSON.value, origin(torch, path))


def measure(library, n, sparsity, dtype):
    """Time all paths for one tensor; return one row per path."""
    from common import gpu_contenders as contenders

    flat = contenders.gradients(n, dtype, _GRADIENTS.value)
    num_bytes = 16 + flat[0].element_size()
    queued, graph, sender = (
        contenders.Kernels(library, [(n, False)], sparsity, dtype, flat)
        for _ in range(3)
    )
    torch_steps = [contenders.Torch(n, sparsity, flat) for _ in range(3)]
    warm_up(queued.queued, graph.queued)
    decoding = contenders.Decoding(library, sender)
    paths = {
        "floor": contenders.floor(n, num_bytes),
        "graph": graph.captured(),
        "queued": queued.queued,
        "torch top_k": torch_steps[0].top_k,
        "torch sampled": torch_steps[1].sampled,
        "torch correction": torch_steps[2].correct,
        "decode 8": decoding.queued,
    }
    times = time_paths(paths)
    decoding.check()
    check_words(queued, graph)
    rows = create_rows(times, n, sparsity, dtype, num_bytes)
    for row in rows:
        if row["path"] in ("graph", "queued"):
            row["workspace_bytes"] = queued.num_bytes
    return rows


def measure_many(library, sparsity):
    """Time ResNet-50's tensors in one call, and one tensor of the same total size."""
    from common import gpu_contenders as contenders

    sizes = resnet50.sizes()
    n = sum(size for size, _ in sizes)
    flat = contenders.gradients(n, "float32", _GRADIENTS.value)
    paths = {"floor": contenders.floor(n, 20)}
    for name, tensors in {"1 tensor": [(n, False)], "161 tensors": sizes}.items():
        for launch in ("queued", "graph"):
            kernels = contenders.Kernels(library, tensors, sparsity, "float32", flat)
            warm_up(kernels.queued)
            paths[f"{name}, {launch}"] = (
                kernels.queued if launch == "queued" else kernels.captured()
            )
    times = time_paths(paths)
    rows = create_rows(times, n, sparsity, "float32", 20)
    for row in rows:
        if row["path"].startswith("161"):
            one = times[row["path"].replace("161 tensors", "1 tensor")]
            row["by_one_tensor"] = row["median_ms"] / statistics.median(one)
    return rows


def measure_methods(engine, n):
    """Time the engine's methods on one tensor; return the rows of all."""
    from common import gpu_contenders as contenders
    from common import gpu_methods

    flat = contenders.gradients(n, "float32", _GRADIENTS.value)
    rows = []
    for method in progress.track(gpu_methods.METHODS, "methods", str):
        _, num_bytes, _ = gpu_methods.METHODS[method]
        queued, graph, sender = (
            gpu_methods.Encoding(engine, method, flat) for _ in range(3)
        )
        warm_up(queued.queued, graph.queued)
        decoding = gpu_methods.Summing(engine, sender)
        paths = {
            "floor": contenders.floor(n, num_bytes),
            "graph": graph.captured(),
            "queued": queued.queued,
            "decode 8": decoding.queued,
        }
        times = time_paths(paths)
        for path in (queued, graph, decoding):
            path.check()
        method_rows = create_rows(times, n, None, "float32", num_bytes)
        rows += [{**row, "path": f"{method}, {row['path']}"} for row in method_rows]
    return rows


def warm_up(*paths):
    """Load the kernels before graphs are captured, and let hints converge."""
    import torch

    for number in range(_WARM_UP.value):
        for path in paths:
            path(number)
    torch.cuda.synchronize()


def time_paths(paths):
    """Time each path once per round, in random order; return milliseconds by name."""
    import torch
    from common import gpu_contenders as contenders

    ballast = contenders.floor(BALLAST, 2)
    events = {name: [] for name in paths}
    order = list(paths)
    for number in range(_WARM_UP.value + _ROUNDS.value):
        random.shuffle(order)
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            ballast(number)
            start.record()
            paths[name](number)
            end.record()
            if number >= _WARM_UP.value:
                events[name].append((start, end))
        torch.cuda.synchronize()
    return {
        name: [start.elapsed_time(end) for start, end in pairs]
        for name, pairs in events.items()
    }


def create_rows(times, n, sparsity, dtype, num_bytes):
    """Return a row per path, with ratios to the copy and to `torch top_k`."""
    median = {name: statistics.median(t) for name, t in times.items()}
    top_k = median.get("torch top_k")
    rows = []
    for name, t in times.items():
        low, high = np.percentile(t, [25, 75])
        row = {
            "path": name,
            "n": n,
            "sparsity": sparsity,
            "dtype": dtype,
            "median_ms": median[name],
            "iqr_ms": float(high - low),
            "min_ms": min(t),
            "max_ms": max(t),
            "rounds": len(t),
            "by_floor": median[name] / median["floor"],
            "top_k_by_this": top_k and top_k / median[name],
        }
        if name == "decode 8":  # moves other bytes
            row["by_floor"] = row["top_k_by_this"] = None
        else:
            row["gb_per_s"] = n * num_bytes / median[name] / 1e6
        rows.append(row)
    return rows


def check_words(*steps):
    """Print a note if the last steps had no good hint, unlike steady training.

    Raises:
        RuntimeError: if a step did not happen.
    """
    for step in steps:
        magic, _, flags_ = step.words[:3].tolist()
        if magic != 0x44474301 or flags_ != 0:
            raise RuntimeError(f"a step left header {magic:#x} and flags {flags_}")
        if (step.hints[:, 1] == 0).any():
            note = "note: the last step had no good hint and read the residual again"
            print(note, file=sys.stderr)


def origin(torch, path):
    """Return the card, versions and commit."""
    card = torch.cuda.get_device_properties(0)
    return {
        "card": card.name,
        "processors": card.multi_processor_count,
        "memory_bytes": card.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "library": pathlib.Path(path).name,
        "commit": reporting.commit(),
    }


def _torch():
    """Return PyTorch; exit with a message if it or the GPU is missing."""
    try:
        import torch
    except ImportError:
        sys.exit("gpu_compress.py needs PyTorch, which is not installed here.")
    if not torch.cuda.is_available():
        sys.exit("gpu_compress.py needs an NVIDIA GPU, and PyTorch finds none here.")
    return torch


if __name__ == "__main__":
    app.run(main)

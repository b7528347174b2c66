"""Modes of `step.py --peers`: PyTorch's DistributedDataParallel over gloo.

Workers of PyTorch and of TensorFlow share this module, which imports neither.
"""

import importlib.util

MODES = {
    "torch": "all-reduce of whole gradients",
    "torch-fp16": "fp16_compress_hook",
    "torch-powersgd": "powerSGD_hook",
}
RANK = 4  # of the hook, and the default of `tf_dgc.compressors.PowerSGD`

BATCH_SIZE = 16  # per worker
PERCEPTRONS = {
    "mlp": (1024, 4096, 1000),
    "tiny": (64, 256, 10),
    "medium": (256, 880, 10),
}
"""By name: inputs, units of both hidden layers, and classes."""


def unsupported_reason(model, loop):
    """Return why a comparison with PyTorch is impossible; None if it is possible."""
    if model not in PERCEPTRONS:
        return f"trains --model {' or '.join(PERCEPTRONS)}. Received: --model {model}"
    if loop != "custom":
        return f"has a loop of its own: --loop custom. Received: --loop {loop}"
    if importlib.util.find_spec("torch") is None:
        return "needs PyTorch, of which a build for CPUs is enough: pip install torch"
    return None

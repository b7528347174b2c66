"""Whether this process uses the CUDA kernels.

Before they are first used, every GPU takes two small steps with them. The results must
be those of the CPU operations, bit for bit.
"""

import functools
import threading
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import native_library
from tf_dgc._internals import tf_collectives

_SIZES = [4500, 70]  # more than one tile of the kernels, and a part of one
_COUNTS = [45, 70]  # the second tensor is sent whole
_FINGERPRINT = 1
_lock = threading.Lock()


def uses_kernels() -> bool:
    """Return whether steps on GPUs use the CUDA kernels.

    Raises:
        RuntimeError: if `TF_DGC_CUDA=1` requires them and they cannot be used.
    """
    problem = find_problem()
    if not problem:
        return True
    library = native_library.load_library()
    if native_library.cuda_setting() == "1":
        raise RuntimeError(
            "TF_DGC_CUDA=1 requires the CUDA kernels of tf_dgc, and they cannot be "
            f"used: {problem}. Without TF_DGC_CUDA=1, TensorFlow operations take the "
            "steps."
        )
    if library.cuda and native_library.cuda_setting() != "0":
        _warn(problem)
    return False


@functools.cache
def _warn(problem: str) -> None:
    warnings.warn(
        f"tf_dgc does not use its CUDA kernels: {problem}. TensorFlow operations take "
        "the steps on GPUs, with the same results, and take longer. `tf-dgc doctor` "
        "repeats the check; TF_DGC_CUDA=0 disables the kernels and this warning.",
        RuntimeWarning,
        stacklevel=2,
    )


def find_problem() -> str:
    """Return why the CUDA kernels are not used on this process's GPUs, or ""."""
    with _lock, tf.init_scope():
        return _find_problem()


@functools.cache
def _find_problem() -> str:
    num_gpus = len(tf.config.get_visible_devices("GPU"))  # of this worker
    if not num_gpus:  # first: CUDA's own message would be about its driver
        return "TensorFlow has no GPU"
    library = native_library.load_library()
    if library.cuda_problem:
        return library.cuda_problem
    expected = _take_step(library.library, "CPU:0")
    for gpu in range(num_gpus):
        problem = _compare(library.library, f"GPU:{gpu}", expected)
        if problem:
            return f"on GPU:{gpu}, {problem}"
    return ""


def _compare(operations: Any, device: str, expected: dict[str, np.ndarray]) -> str:
    try:
        result = _take_step(operations, device)
    except tf.errors.OpError as error:
        text = " ".join(error.message.split())
        return f"a first step failed: {text[max(text.find('CUDA'), 0) :][:200]}"
    for name, value in expected.items():
        if value.tobytes() != result[name].tobytes():
            differ = np.count_nonzero(value != result[name])
            return (
                f"the {name} of a first step differ from the CPU's, in {differ} of "
                f"{value.size} numbers"
            )
    return ""


def _take_step(operations: Any, device: str) -> dict[str, np.ndarray]:
    """Return what steps of top-k and of EF-SignSGD on a device send, keep and sum."""
    random = np.random.default_rng(1)
    gradients = [random.normal(size=n).astype(np.float32) for n in _SIZES]
    state = {
        name: [
            tf_collectives.local_variable(random.normal(size=n), tf.float32, device)
            for n in _SIZES
        ]
        for name in ("velocity", "residual", "residual of signs")
    }
    handles = {name: [v.handle for v in values] for name, values in state.items()}

    def step() -> dict[str, list[tf.Tensor]]:
        with tf.device(device):
            values = [tf.constant(g) for g in gradients]
            top_k = _top_k(operations, values, handles["velocity"], handles["residual"])
            signs = _signs(operations, values, handles["residual of signs"])
        return {**top_k, **signs}

    results = {**tf.function(step).get_concrete_function()(), **state}
    return {k: np.concatenate([v.numpy() for v in vs]) for k, vs in results.items()}


def _top_k(
    operations: Any,
    gradients: list[tf.Tensor],
    velocity: list[tf.Tensor],
    residual: list[tf.Tensor],
) -> dict[str, list[tf.Tensor]]:
    layout = {"value_types": ["float32", "exempt"], "fingerprint": _FINGERPRINT}
    words = operations.tf_dgc_compress(
        gradients=gradients,
        velocity=velocity,
        residual=residual,
        momentum=tf.constant(0.9, tf.float64),
        scales=tf.constant([0.5, 2.0], tf.float64),
        counts=tf.constant(_COUNTS),
        offsets=tf.constant([7, 0]),
        nesterov=True,
        factor_masking=True,
        largest_exponents=[1024, 1024],
        **_not_divided(),
        **layout,
    )
    _, sums = operations.tf_dgc_sum(
        buffers=tf.stack([words, words]),
        counts=tf.constant(_COUNTS),
        T=[tf.float32] * len(_SIZES),
        sizes=_SIZES,
        **layout,
    )
    return {"words": [words], "sums": sums}


def _signs(
    operations: Any, gradients: list[tf.Tensor], residual: list[tf.Tensor]
) -> dict[str, list[tf.Tensor]]:
    num = len(_SIZES)
    methods = {
        "methods": ["ef_sign_sgd"] * num,
        "num_parameters": [0] * num,
        "parameters": [],
        "sizes": _SIZES,
        "columns": [10] * num,
        "vectors": [-1] * num,
        "indices": list(range(num)),
        "seed": 0,
        "fingerprints": [_FINGERPRINT],
        "firsts": [""] * num,
        "first_vectors": [-1] * num,
        "num_numbers": [0] * num,
    }
    _, _, words, _, _ = operations.tf_dgc_encode(
        gradients=gradients,
        velocity=[],
        residual=residual,
        states=[],
        momentum=tf.constant(0.0, tf.float64),
        scales=tf.constant([0.5, 2.0], tf.float64),
        iteration=tf.constant(3, tf.int64),
        round=0,
        worker=tf.constant(0),
        nesterov=False,
        factor_masking=False,
        numbers=tf.zeros([0]),
        V=[],
        **_not_divided(),
        **methods,
    )
    _, _, _, sums = operations.tf_dgc_decode(
        buffers=[tf.stack([words, words])],
        totals=[],
        iteration=tf.constant(3, tf.int64),
        numbers=tf.zeros([0]),
        shared=[],
        num_tensors=num,
        **methods,
    )
    return {"words of signs": [words], "sums of signs": sums}


def _not_divided() -> dict[str, Any]:
    """Return the operands of dense gradients that are not divided."""
    divisors = tf.zeros([0, 5], tf.float64)
    return {
        "rows": [],
        "sparse": [],
        "moments": [],
        "divided": [],
        "divisors": divisors,
    }

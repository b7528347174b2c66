"""Models train on GPUs: `fit`, mixed precision, checkpoints, two processes."""

import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from device_counters import DeviceCounters, needs_test_device
from small_model import create_model, fit

import tf_dgc

WORKER = pathlib.Path(__file__).parent / "gpu_worker.py"


@needs_test_device
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_fit(strategies, replicas, policy):
    counters = DeviceCounters()
    counters.reset()
    with tf_dgc.prepare(strategies[replicas]).scope():
        model = create_model(policy)
    losses = fit(model)
    assert counters.num_calls >= 12 * replicas
    assert losses[-1] < 0.8 * losses[0]
    for weight in model.weights:
        assert "GPU" in weight.value.device
        copies = strategies[replicas].experimental_local_results(weight.value)
        for copy in copies:
            np.testing.assert_array_equal(copy.numpy(), copies[0].numpy())


def test_checkpoint_of_a_gpu_continues_on_a_cpu_and_back(tmp_path):
    path, back = tmp_path / "gpu.keras", tmp_path / "cpu.keras"
    model = create_model()
    fit(model)
    model.save(path)
    with tf.device("CPU:0"):
        on_cpu = keras.models.load_model(path)
        assert "CPU" in on_cpu.weights[0].value.device
        assert_equal_variables(on_cpu, model)
        fit(on_cpu)
        on_cpu.save(back)
    on_gpu = keras.models.load_model(back)
    assert "GPU" in on_gpu.weights[0].value.device
    assert_equal_variables(on_gpu, on_cpu)
    # Kernels and CPU operations have the same bits; Keras's gradients need not.
    fit(model)
    for weight, expected in zip(model.weights, on_cpu.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), 1e-4, 1e-5)


def assert_equal_variables(model, expected):
    pairs = zip(
        [*model.weights, *model.optimizer.variables],
        [*expected.weights, *expected.optimizer.variables],
        strict=True,
    )
    for variable, value in pairs:
        np.testing.assert_array_equal(variable.numpy(), value.numpy(), value.path)


@pytest.mark.workers
def test_two_processes(tmp_path):
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers=2", str(WORKER)]
    finished = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    first, second = (json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2))
    assert first["weights"] == second["weights"]
    assert "GPU" in first["device"]
    assert first["losses"][-1] < 0.8 * first["losses"][0]

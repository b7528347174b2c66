"""Steps on a GPU are the CPU's, bit for bit, and stay on the GPU."""

import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from device_counters import DeviceCounters, needs_test_device
from harness import Trainer, initial_weights, make_gradients
from tensorflow.python.framework import kernels

import tf_dgc
from tf_dgc import compressors, native_library
from tf_dgc.steps import gpu_check

SGD = keras.optimizers.SGD
STEPS = 4
METHODS = {
    "two_bit": compressors.TwoBit,
    "ef_sign_sgd": compressors.EFSignSGD,
    "one_bit": compressors.OneBit,
    "qsgd": lambda: compressors.QSGD(coding="fixed"),
    "natural": compressors.Natural,
    "uniform_8bit": compressors.Uniform8Bit,
    "uniform_8bit, stochastic": lambda: compressors.Uniform8Bit(stochastic=True),
    "float16": compressors.Float16,
}
OPTIMIZERS = {
    "dgc": lambda: tf_dgc.DGCOptimizer(SGD(0.125, 0.9), sparsity=0.97),
    "dgc, nesterov": lambda: tf_dgc.DGCOptimizer(
        SGD(0.125, 0.9, nesterov=True), sparsity=0.9, value_dtype="bfloat16"
    ),
    "dgc, adam": lambda: tf_dgc.DGCOptimizer(
        keras.optimizers.Adam(0.01), sparsity=0.97
    ),
    "dgc, plain": lambda: tf_dgc.DGCOptimizer(SGD(0.125), sparsity=0.97),
    **{
        name: lambda make=make: tf_dgc.CompressedOptimizer(SGD(0.125, 0.9), make())
        for name, make in METHODS.items()
    },
}
HOST_MEMORY = {
    "TfDgcCompress": "velocity residual momentum counts rows moments",
    "TfDgcSum": "counts nonfinite",
    "TfDgcDescend": "variables counts nonfinite",
    "TfDgcEncode": "velocity residual states rows moments momentum numbers worker "
    "entries notes",
    "TfDgcDecode": "numbers shared nonfinite norms",
}


def train(strategy, make_optimizer, workers, traced=True):
    trainer = Trainer(strategy, make_optimizer, initial_weights("float32"), traced)
    for gradients in make_gradients(workers, STEPS, "float32"):
        trainer.step(gradients)
    return trainer


def assert_equal_state(trainer, expected, rtol=0.0):
    # Names of optimizers and variables have a number.
    pairs = zip(trainer.state().items(), expected.state().values(), strict=True)
    for (path, copies), values in pairs:
        for copy, value in zip(copies, values, strict=True):
            np.testing.assert_allclose(copy, value, rtol, rtol, err_msg=path)


def on_cpus(workers):
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(workers)])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_two_gpus_are_those_of_two_cpus(strategies, name):
    trainer = train(strategies[2], OPTIMIZERS[name], 2)
    assert "GPU" in trainer.variables[0].value.device
    # On a GPU, the update of Adam is Keras's.
    rtol = 1e-6 if name == "dgc, adam" else 0.0
    assert_equal_state(trainer, train(on_cpus(2), OPTIMIZERS[name], 2), rtol)


@pytest.mark.parametrize("name", ["dgc", "dgc, plain", "dgc, adam", "ef_sign_sgd"])
def test_values_that_were_read_before_a_step_stay(strategies, name):
    """A variable's memory that a tensor shares is copied before it is written."""
    trainer = Trainer(
        strategies[1], OPTIMIZERS[name], initial_weights("float32"), traced=True
    )
    expected = Trainer(
        on_cpus(1), OPTIMIZERS[name], initial_weights("float32"), traced=True
    )
    for gradients in make_gradients(1, STEPS, "float32"):
        variables = [*trainer.variables, *trainer.optimizer.variables]
        read = [v.value.read_value() for v in variables]
        copies = [value.numpy() for value in read]
        trainer.step(gradients)
        expected.step(gradients)
        for value, copy in zip(read, copies, strict=True):
            np.testing.assert_array_equal(value.numpy(), copy)
    assert_equal_state(trainer, expected, 1e-6 if name == "dgc, adam" else 0.0)


def test_eager_steps_are_those_of_a_cpu(strategies):
    trainer = train(strategies[2], OPTIMIZERS["dgc"], 2, traced=False)
    assert_equal_state(trainer, train(on_cpus(2), OPTIMIZERS["dgc"], 2))


@needs_test_device
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_stay_on_the_gpu(strategies, name):
    shapes = [(200, 300), (300,)]
    trainer = Trainer(
        strategies[2],
        OPTIMIZERS[name],
        initial_weights("float32", shapes),
        traced=True,
    )
    steps = [
        trainer.per_replica(g) for g in make_gradients(2, 2, "float32", shapes=shapes)
    ]
    trainer._run(steps[0])
    counters = DeviceCounters()
    counters.reset()
    trainer._run(steps[1])
    assert counters.num_calls >= 4  # two replicas, encoding and decoding
    # Keras's update of momentum and Adam has no kernel on the test device.
    if name == "dgc, plain":
        assert counters.largest_copy < 200 * 300 * 4 / 2


@needs_test_device
@pytest.mark.parametrize("traced", [True, False])
def test_a_failing_kernel_ends_the_step(strategies, traced):
    trainer = Trainer(
        strategies[1], OPTIMIZERS["dgc"], initial_weights("float32"), traced
    )
    first, second = make_gradients(1, 2, "float32")
    trainer.step(first)
    DeviceCounters().fail("out of memory")
    with pytest.raises(tf.errors.InternalError, match=r"kernels.*out of memory"):
        trainer.step(second)


@needs_test_device
def test_no_memory_for_the_workspace(strategies):
    """The step ends with an error, and has changed nothing."""
    shapes = [(8, 8), (8,)]
    trainer = Trainer(
        strategies[1],
        OPTIMIZERS["dgc"],
        initial_weights("float32", shapes),
        traced=True,
    )
    first, second = make_gradients(1, 2, "float32", shapes)
    trainer.step(first)
    before = trainer.state()
    inputs = trainer.per_replica(second)
    DeviceCounters().limit(1024)  # more than a gradient, less than the workspace
    try:
        with pytest.raises(tf.errors.ResourceExhaustedError):
            trainer._run(inputs)
    finally:
        DeviceCounters().limit(0)
    for path, copies in trainer.state().items():
        if "iteration" not in path:
            np.testing.assert_array_equal(copies, before[path], path)


@pytest.mark.parametrize("name", HOST_MEMORY)
def test_memory_of_every_input_and_output(name):
    native_library.load_library()
    for kernel in kernels.get_registered_kernels_for_op(name).kernel:
        if kernel.device_type == "GPU":
            assert sorted(kernel.host_memory_arg) == sorted(HOST_MEMORY[name].split())
            break
    else:
        pytest.fail(f"{name} has no kernel for GPUs")


def test_all_methods_with_kernels_are_tested():
    have_kernels = set(native_library.load_library().cuda_methods) - {"whole"}
    assert have_kernels - {"bfloat16"} == {
        make().native((8, 8)).name for make in METHODS.values()
    } - {"bfloat16"}


@pytest.fixture
def unchecked(monkeypatch):
    """Forget the check of the kernels, before and after a test."""
    monkeypatch.delenv("TF_DGC_CUDA", raising=False)
    gpu_check._find_problem.cache_clear()
    gpu_check._warn.cache_clear()
    yield monkeypatch
    gpu_check._find_problem.cache_clear()


@needs_test_device
def test_kernels_are_used_if_they_are_right(unchecked):
    counters = DeviceCounters()
    counters.reset()
    assert gpu_check.uses_kernels()
    assert counters.num_calls >= 4


@needs_test_device
@pytest.mark.parametrize("setting", ["", "1"])
def test_kernels_that_fail_are_not_used(unchecked, strategies, setting):
    unchecked.setenv("TF_DGC_CUDA", setting)
    DeviceCounters().fail("no kernel image is available")
    if setting == "1":
        with pytest.raises(RuntimeError, match="no kernel image is available"):
            train(strategies[1], OPTIMIZERS["dgc"], 1)
        return
    with pytest.warns(RuntimeWarning, match="no kernel image is available"):
        trainer = train(strategies[1], OPTIMIZERS["dgc"], 1)
    assert not gpu_check.uses_kernels()
    assert_equal_state(trainer, train(on_cpus(1), OPTIMIZERS["dgc"], 1))


RESULTS = "words, velocity, residual, sums"
RESULTS += ", words of signs, residual of signs, sums of signs"


@pytest.mark.parametrize("name", RESULTS.split(", "))
def test_kernels_with_other_results_are_not_used(unchecked, name):
    take_step = gpu_check._take_step

    def take_other_step(operations, device):
        results = take_step(operations, device)
        if "GPU" in device:
            results[name].reshape(-1).view(np.int32)[3] += 1
        return results

    unchecked.setattr(gpu_check, "_take_step", take_other_step)
    with pytest.warns(RuntimeWarning, match=f"the {name} of a first step differ"):
        assert not gpu_check.uses_kernels()


def test_one_of_two_gpus_has_other_results(unchecked):
    take_step = gpu_check._take_step

    def take_other_step(operations, device):
        results = take_step(operations, device)
        if device == "GPU:1":
            results["sums"] += 1
        return results

    unchecked.setattr(gpu_check, "_take_step", take_other_step)
    with pytest.warns(RuntimeWarning, match="on GPU:1, the sums"):
        assert not gpu_check.uses_kernels()


@needs_test_device
@pytest.mark.parametrize(
    ("error", "message"), [("35", "driver version is insufficient"), ("100", "no CUDA")]
)
def test_a_driver_that_is_too_old(unchecked, error, message):
    unchecked.setenv("TF_DGC_TEST_DEVICE_ERROR", error)
    with pytest.warns(RuntimeWarning, match=message):
        assert not gpu_check.uses_kernels()


def test_kernels_can_be_disabled(unchecked):
    unchecked.setenv("TF_DGC_CUDA", "0")
    assert not gpu_check.uses_kernels()
    unchecked.setenv("TF_DGC_CUDA", "perhaps")
    with pytest.raises(ValueError, match="TF_DGC_CUDA=perhaps"):
        gpu_check.uses_kernels()


@needs_test_device
@pytest.mark.exhaustive
def test_check_of_a_machine_with_a_gpu(tmp_path):
    path = tmp_path / "rows.json"
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_training.py"
    arguments = ["--quick", "--notests", "--rounds=1", f"--json={path}"]
    subprocess.run([sys.executable, script, *arguments], check=True, timeout=240)
    assert len(json.loads(path.read_text())) == 6

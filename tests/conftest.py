import os

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the tests are about CPUs
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.pop("TF_CONFIG", None)

import keras
import pytest
import tensorflow as tf

MAX_WORKERS = 4


def pytest_configure(config):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * MAX_WORKERS
    )


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def strategies():
    """Return a strategy by number of workers, all in this process."""
    mirrored = {n: _mirrored(n) for n in range(2, MAX_WORKERS + 1)}
    return {1: tf.distribute.get_strategy(), **mirrored}


def _mirrored(num_workers):
    class Strategy(tf.distribute.MirroredStrategy):
        # TensorFlow's own tests set this too: collective groups of different sizes in
        # one process need keys of their own.
        _collective_key_base = 1000 * num_workers

    return Strategy([f"CPU:{i}" for i in range(num_workers)])

"""Options, fixtures and order of all tests: a plugin that conftest.py loads."""

import ast
import collections
import functools
import gc
import os
import pathlib
import re
import signal
import sys
from unittest import mock

import pytest

MAX_WORKERS = 8
GPU_TESTS = pathlib.Path(__file__).parents[1] / "gpu"


def pytest_addoption(parser):
    parser.addoption(
        "--traced",
        action="store_true",
        help="trace the steps of the tests' `Trainer` (most are eager by default); "
        "take all steps and examples (most tests take a few by default); and leave "
        "out tests that neither changes, unless they are `slow` or `exhaustive`",
    )
    parser.addoption(
        "--on-gpu",
        action="store_true",
        help="use GPUs, or the test device (.ci/test-device); every replica has one, "
        "or a share of the first",
    )


def pytest_configure(config):
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # this process runs no test itself
    # tests/gpu alone needs no TensorFlow but a GPU. All other tests use CPUs.
    if not all(_is_gpu_test(a, config.invocation_params.dir) for a in config.args):
        if config.getoption("--on-gpu"):
            _prepare_gpus()
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
            _prepare_tensorflow()
        _prepare_hypothesis()
    if config.getoption("--traced") or config.getoption("--on-gpu"):
        from harness import Trainer

        Trainer.always_traced = True


def pytest_collection_modifyitems(config, items):
    if config.getoption("--traced"):
        unchanged = set(filter(_is_the_same_traced, items))
        config.hook.pytest_deselected(items=list(unchanged))
        items[:] = [item for item in items if item not in unchanged]
    # First the files that start workers, which take longest; then those of many tests.
    with_workers = {item.path for item in items if item.get_closest_marker("workers")}
    sizes = collections.Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in with_workers, -sizes[item.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let one process run all tests of a file: they share fixtures.

    One process also runs all files that use `starter`, which imports TensorFlow twice.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            uses = "starter" in _text(config.rootpath / file)
            return "starter" if uses else file

    config.option.loadscopereorder = False  # files with few tests take longest
    return Scheduling(config, log)


@functools.cache
def _text(path):
    return path.read_text()


def _is_the_same_traced(item):
    if any(item.get_closest_marker(mark) for mark in ("slow", "exhaustive")):
        return False
    return item.originalname not in _using_trainers(item.path)


@functools.cache
def _using_trainers(path):
    """Return the functions of a file that step a trainer or take fewer examples."""
    text = path.read_text()
    names = {"Trainer", "fewer", "check_equal_steps"}
    bodies = {
        node.name: set(re.findall(r"\w+", ast.unparse(node)))
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for _ in bodies:  # each round adds callers of the functions so far
        names |= {name for name, words in bodies.items() if words & names}
    return names


def _is_gpu_test(argument, directory):
    path = (directory / argument.split("::")[0]).resolve()
    return GPU_TESTS in [path, *path.parents]


def _prepare_hypothesis():
    """Set no deadline for examples: a busy machine may be slow."""
    from hypothesis import settings

    settings.register_profile("tests", deadline=None)
    settings.load_profile("tests")


def _prepare_gpus():
    """Make a GPU for each replica, of the test device or of the first GPU."""
    os.environ["TF_DGC_TEST_DEVICES"] = str(MAX_WORKERS)
    _prepare_tensorflow()
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise pytest.UsageError(
            "--on-gpu needs a GPU or the test device; there is none."
        )
    if len(gpus) < MAX_WORKERS:
        logical = tf.config.LogicalDeviceConfiguration(memory_limit=4096)
        tf.config.set_visible_devices(gpus[0], "GPU")
        tf.config.set_logical_device_configuration(gpus[0], [logical] * MAX_WORKERS)


def _prepare_tensorflow():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.pop("TF_CONFIG", None)
    sys.modules["sklearn"] = None  # Keras would load it, which takes 1 s and more
    import keras  # noqa: F401
    import tensorflow as tf

    gc.freeze()  # half a million objects of imported modules are not collected
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * MAX_WORKERS
    )


@pytest.fixture(autouse=True)
def _in_the_foreground():
    """Handle interrupts and hang-ups, which `&` and `nohup` of a shell ignore."""
    actions = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, actions[number]) for number in actions}
    yield
    for number, action in before.items():
        signal.signal(number, action)


@pytest.fixture(autouse=True)
def _fixed_seed():
    import keras
    from tensorflow.python.eager import context

    # Clearing the kernel cache would take an eighth of the suite's time.
    with mock.patch.object(context.pywrap_tfe, "TFE_ContextClearCaches"):
        keras.utils.set_random_seed(0)


@pytest.fixture
def retracing_warnings(monkeypatch):
    """Return the list of TensorFlow's warnings, about this test's functions alone."""
    import tensorflow as tf
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    texts = []
    detectors = polymorphic_function._FrequentTracingDetectorManager()
    monkeypatch.setattr(
        polymorphic_function, "_frequent_tracing_detector_manager", detectors
    )
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *_: texts.append(text))
    return texts


@pytest.fixture(scope="session")
def strategies():
    """Return a strategy by number of workers, all in this process."""
    import tensorflow as tf

    return _Strategies({1: tf.distribute.get_strategy()})


class _Strategies(dict):
    """Creates strategies of several workers on demand."""

    def __missing__(self, num_workers):
        self[num_workers] = _mirrored(num_workers)
        return self[num_workers]


@pytest.fixture(scope="session")
def starter():
    """Return a starter of workers that need not import TensorFlow."""
    from real_workers import Starter

    with Starter() as starter:
        yield starter


def _mirrored(num_workers):
    import tensorflow as tf

    class Strategy(tf.distribute.MirroredStrategy):
        # TensorFlow's tests set this too: in one process, collective groups of
        # different sizes need different keys.
        _collective_key_base = 1000 * num_workers

    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return Strategy([f"{kind}:{i}" for i in range(num_workers)])

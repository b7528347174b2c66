"""The CUDA kernels without TensorFlow: `pytest tests/gpu`, see docs/research/gpu.md."""

import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

import devices  # noqa: E402
from common import cuda_engine, cuda_library  # noqa: E402
from harness_gpu import Runner  # noqa: E402


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=("cuda", "emulated"),
        default="cuda",
        help="where the kernels run: on a GPU, or the same code on the CPU",
    )
    parser.addoption(
        "--no-poison",
        action="store_true",
        help="do not write memory that a step must write first, for initcheck",
    )
    parser.addoption(
        "--cuda-library", help="path of a library to use instead of building custom_ops"
    )


def pytest_collection_modifyitems(items):
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _fixed_seed():
    """Overrides the fixture of the other tests, which seeds Keras."""


@pytest.fixture(scope="session")
def device(request):
    """Return the device of the kernels; skip all tests if there is none."""
    kind = request.config.getoption("--device", "cuda")
    try:
        device = devices.Emulated() if kind == "emulated" else devices.find()
    except devices.NoDeviceError as reason:
        pytest.skip(str(reason))
    device.poisons = not request.config.getoption("--no-poison", False)
    return device


@pytest.fixture(scope="session")
def path(request, device):
    """Return the path of the kernels' library."""
    path = request.config.getoption("--cuda-library", None)
    if path is None:
        try:
            path = cuda_library.build(device.kind)
        except FileNotFoundError as reason:
            pytest.skip(str(reason))
    return path


@pytest.fixture(scope="session")
def library(path):
    return cuda_library.Library(path)


@pytest.fixture(scope="session")
def engine(path):
    return cuda_engine.Engine(path)


@pytest.fixture(scope="session")
def cpu_path():
    """Return the path of the CPU operations, None without a compiler."""
    try:
        return cuda_library.build("cpu")
    except FileNotFoundError:
        return None


@pytest.fixture(scope="session")
def cpu(cpu_path):
    return cpu_path and cuda_library.Cpu(cpu_path)


@pytest.fixture(scope="session")
def cpu_engine(cpu_path):
    return cpu_path and cuda_engine.Cpu(cpu_path)


@pytest.fixture
def runner(device, library, cpu):
    return Runner(device, library, cpu)

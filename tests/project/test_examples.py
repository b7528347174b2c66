"""The examples run as their docstrings say, with less data."""

import json
import pathlib
import re
import sys

import programs
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SHARED = pathlib.Path(__file__).parents[3] / "shared" / "tensorflow_datasets"
KEYS = {
    "method",
    "sparsity",
    "val_accuracy",
    "bytes_per_step",
    "dense_bytes_per_step",
    "ratio",
    "step_ms",
    "workers",
}


def launch(tmp_path, script, *flags, workers=2):
    """Run an example under the launcher; return its rows and its output."""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers", str(workers)]
    command += [str(EXAMPLES / script), *flags, f"--json={path}"]
    finished = programs.run(command, merged=True)
    rows = json.loads(path.read_text()) if path.exists() else None
    return finished.returncode, rows, finished.stdout


@pytest.fixture
def run(starter, tmp_path):
    """Return a function that runs an example on two workers without the launcher.

    The function returns the rows, and the output of the first worker.
    """

    def run(script, *flags):
        path = tmp_path / "rows.json"
        command = [EXAMPLES / script, *flags, f"--json={path}"]
        finished = starter.run(command, 2, tmp_path)
        assert finished.codes == [0, 0]
        return json.loads(path.read_text()), finished.outputs[0]

    return run


@pytest.mark.slow
@pytest.mark.workers
def test_digits(tmp_path):
    code, rows, output = launch(tmp_path, "digits.py", "--steps=80", "--seeds=1")
    assert code == 0
    before, _, table = output.partition("digits, mean of")
    assert len(before.splitlines()) <= 15, before
    assert table.count("bytes per step and worker") == 1
    assert "coordination_service.cc" not in output
    dense, dgc = rows
    assert set(dense) == set(dgc) == KEYS
    assert (dense["method"], dgc["method"]) == ("dense", "dgc")
    assert dense["workers"] == dgc["workers"] == 2
    assert dense["ratio"] == 1
    assert dgc["ratio"] > 10  # low, because the run is short
    assert dgc["dense_bytes_per_step"] == dense["bytes_per_step"]
    assert min(dense["val_accuracy"], dgc["val_accuracy"]) > 0.7


@pytest.mark.slow
@pytest.mark.workers
def test_custom_loop(run):
    rows, _ = run("custom_loop.py", "--steps=60")
    assert set(rows[0]) == KEYS
    assert rows[0]["val_accuracy"] > 0.7


@pytest.mark.slow
@pytest.mark.workers
def test_multi_worker_with_keras(run, tmp_path):
    flags = [f"--directory={tmp_path}", "--epochs=2", "--steps=12"]
    rows, output = run("multi_worker_with_keras.py", *flags)
    assert set(rows[0]) == KEYS
    trained, loaded, restored = re.findall(
        r"(?:trained|loaded|restored): (\S+)", output
    )
    assert trained == loaded == restored
    files = {path.name for path in tmp_path.iterdir()}
    assert files >= {"model.keras", "checkpoints", "epoch-1.keras", "epoch-2.keras"}
    assert not files & {"backup", "temporary_1"}


@pytest.mark.slow
@pytest.mark.workers
def test_multi_worker_custom_loop(run, tmp_path):
    flags = [f"--directory={tmp_path / 'checkpoints'}", "--steps=12"]
    script = "multi_worker_custom_loop.py"
    rows, _ = run(script, *flags, "--epochs=1")
    assert set(rows[0]) == KEYS
    _, output = run(script, *flags, "--epochs=3")
    assert re.findall(r"epoch (\d)[:\n]", output) == ["1", "1", "2"]


@pytest.mark.slow
@pytest.mark.workers
def test_own_compressor(starter, tmp_path):
    finished = starter.run([EXAMPLES / "own_compressor.py"], 2, tmp_path)
    assert finished.codes == [0, 0]
    output = finished.outputs[0]
    before, after = re.findall(r"loss (\S+) -> (\S+)", output)[0]
    assert float(after) < 0.5 * float(before)
    assert "1/16 of dense" in output


@pytest.mark.slow
@pytest.mark.workers
def test_server(tmp_path):
    command = [sys.executable, "-m", "tf_dgc", "run", "--servers", "1", "--workers"]
    command += ["2", "--output", "all", EXAMPLES / "server.py", "--steps=60"]
    finished = programs.run(command, merged=True)
    assert finished.returncode == 0
    results = re.findall(
        r"worker (\d): (\d+) steps per second, accuracy (\S+)% ", finished.stdout
    )
    assert sorted(rank for rank, *_ in results) == ["0", "1"]
    assert min(float(accuracy) for *_, accuracy in results) > 70


@pytest.mark.exhaustive
@pytest.mark.workers
def test_server_embedding():
    command = [sys.executable, "-m", "tf_dgc", "run", "--servers", "2", "--workers"]
    command += ["2", "--output", "all", EXAMPLES / "server_embedding.py"]
    finished = programs.run(command, merged=True)
    assert finished.returncode == 0
    pattern = (
        r"worker (\d): (\S+)% right, a push is (\S+) bytes and a pull (\S+), of (\S+)"
    )
    results = re.findall(pattern, finished.stdout)
    assert sorted(rank for rank, *_ in results) == ["0", "1"]
    for _, accuracy, *sizes in results:
        push, pull, whole = (int(size.replace(",", "")) for size in sizes)
        assert float(accuracy) > 75
        assert 0 < push < whole / 30
        assert 0 < pull < whole / 10


@pytest.mark.exhaustive
@pytest.mark.workers
@pytest.mark.skipif(not SHARED.exists(), reason=f"MNIST is not in {SHARED}")
def test_mnist(tmp_path):
    flags = [f"--data_dir={SHARED}", "--epochs=1", "--batch_size=1000"]
    code, rows, _ = launch(tmp_path, "mnist.py", *flags)
    assert code == 0
    assert [row["method"] for row in rows] == ["dense", "dgc"]
    assert min(row["val_accuracy"] for row in rows) > 0.7


@pytest.mark.exhaustive
@pytest.mark.workers
def test_mnist_says_how_to_get_the_data(tmp_path):
    code, _, output = launch(tmp_path, "mnist.py", f"--data_dir={tmp_path}", workers=1)
    assert code != 0
    assert "examples/mnist.py --download" in output


@pytest.mark.exhaustive
@pytest.mark.workers
def test_two_sites(tmp_path):
    flags = ["--period=10", "--batch_size=16", "--rounds=10", "--epochs=2"]
    flags += [f"--directory={tmp_path / 'backups'}"]
    code, _, output = launch(tmp_path, "two_sites.py", *flags)
    assert code == 0
    assert "20 rounds of 10 steps" in output
    accuracy, sites = re.findall(r"accuracy (\S+)% at (\d) sites", output)[0]
    assert float(accuracy) > 40  # 10 by chance
    assert sites == "2"
    assert int(re.findall(r"per round, 1/(\d+)", output)[0]) > 20


def run_short(script, *flags, workers=2):
    """Run a short example; return its output."""
    command = [sys.executable, "-m", "tf_dgc", "run", "--workers", str(workers)]
    finished = programs.run([*command, EXAMPLES / script, *flags], merged=True)
    assert finished.returncode == 0
    return finished.stdout


def find_numbers(pattern, text):
    """Return the numbers of the only match."""
    (numbers,) = re.findall(pattern, text)
    numbers = [numbers] if isinstance(numbers, str) else numbers
    return [float(number.replace(",", "")) for number in numbers]


@pytest.mark.workers
@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(2, marks=pytest.mark.slow),
    ],
)
def test_generator(workers):
    output = run_short("generator.py", workers=workers)
    assert find_numbers(r"accuracy (\S+)% after 200 steps", output)[0] > 80
    assert find_numbers(r"bytes per step, 1/(\d+)", output)[0] > 20


@pytest.mark.exhaustive
@pytest.mark.workers
def test_image_classification(tmp_path):
    flags = ["--steps=40", "--epochs=2", f"--record={tmp_path / 'run.json'}"]
    output = run_short("image_classification.py", *flags)
    assert find_numbers(r"accuracy \S+%, 1/(\d+) sent", output)[0] > 10
    epochs = json.loads((tmp_path / "run.json").read_text())["epochs"]
    assert [e["steps"] for e in epochs] == [40, 80]
    first, last = (e["logs"]["loss"] for e in epochs)
    assert last < first - 0.05  # its moving averages need more steps


@pytest.mark.exhaustive
@pytest.mark.workers
def test_text_classification():
    output = run_short("text_classification.py")
    assert find_numbers(r"accuracy (\S+)%", output)[0] > 80
    assert find_numbers(r"bytes per step, 1/(\d+)", output)[0] > 20


@pytest.mark.exhaustive
@pytest.mark.workers
def test_gan():
    output = run_short("gan.py")
    assert find_numbers(r"points are (\S+) from the circle", output)[0] < 0.4
    for name in ("generator", "critic"):
        assert find_numbers(rf"{name}: (\S+) bytes per step", output)[0] > 0


@pytest.mark.exhaustive
@pytest.mark.workers
def test_custom_train_step():
    first, last, ratio = find_numbers(
        r"error (\S+) -> (\S+), 1/(\d+) sent", run_short("custom_train_step.py")
    )
    assert last < 0.6 * first
    assert ratio > 5


@pytest.mark.exhaustive
@pytest.mark.workers
def test_transfer_learning():
    output = run_short("transfer_learning.py")
    pattern = r"accuracy (\S+)%, (\S+) bytes"
    before, frozen, whole = (
        find_numbers(f"{phase}: {pattern}", output)
        for phase in ("before", "frozen", "all")
    )
    assert min(before[0], frozen[0], whole[0]) > 70
    assert frozen[1] < 0.3 * whole[1]  # frozen variables are not sent


@pytest.mark.exhaustive
@pytest.mark.workers
@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [("mixed_float16", "LossScaleOptimizer"), ("mixed_bfloat16", "DGCOptimizer")],
)
def test_mixed_precision(policy, optimizer):
    output = run_short("mixed_precision.py", f"--policy={policy}")
    accuracy, optimizer_name = re.findall(r"accuracy (\S+)%, (\w+)", output)[0]
    assert float(accuracy) > 80
    assert optimizer_name == optimizer
    assert ("loss scale none" in output) == (policy == "mixed_bfloat16")


SHORT = """
    image_classification text_classification gan custom_train_step transfer_learning
    mixed_precision server_embedding generator
"""


@pytest.mark.parametrize("name", SHORT.split())
def test_examples_are_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80

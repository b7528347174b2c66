"""Real worker processes on loopback, under stock MultiWorkerMirroredStrategy."""

import json
import pathlib
import re
import signal
import sys

import numpy as np
import programs
import pytest
from selection import exhaustive, rows, slow

from tf_dgc.reports import record

pytestmark = pytest.mark.workers
SUPPORT = pathlib.Path(__file__).parents[1] / "support"
SCRIPT = SUPPORT / "worker_scenarios.py"


@pytest.fixture
def run(starter):
    """Return a function that runs a scenario on several workers."""

    def run(scenario, num_workers, directory, **settings):
        command = [SCRIPT, scenario, directory]
        return starter.run(command, num_workers, directory, **settings)

    return run


@pytest.mark.parametrize(
    "num_workers", [exhaustive(1), 2, exhaustive(3), exhaustive(4)]
)
def test_fit_evaluate_predict_save_load(run, tmp_path, num_workers):
    finished = run("fit", num_workers, tmp_path)
    assert finished.codes == [0] * num_workers
    first = finished.findings[0]
    assert first["staleness"] > 0
    for findings in finished.findings:  # staleness differs between workers
        for name in ("staleness_mean", "staleness_p99", "staleness_max"):
            assert findings["history"].pop(name)[-1] >= 0
    for other in finished.findings[1:]:
        for key in ("weights", "residual", "history", "evaluate"):
            assert other[key] == first[key], key
    losses = first["history"]["loss"]
    assert losses[-1] < losses[0]
    validated = first["history"]["val_loss"]
    assert first["evaluate"][0] == pytest.approx(validated[-1], rel=1e-4)
    assert first["predictions"] == [70, 1]
    assert first["restored"]
    assert first["history"]["bytes_per_step"][-1] == first["stats"] > 0
    if num_workers > 1:
        assert "Pass that one to `tf_dgc.prepare" in first["second strategy"]


def test_only_the_first_worker_writes_logs_to_one_path(run, tmp_path):
    finished = run("logs", 2, tmp_path)
    assert finished.codes == [0, 0]
    processes = [str(findings["process"]) for findings in finished.findings]
    for name, process in (
        ("logs", processes[0]),
        ("own-0", processes[0]),
        ("own-1", processes[1]),
    ):
        for part in ("train", "validation"):
            files = [path.name for path in (tmp_path / name / part).iterdir()]
            assert files
            assert {file.split(".")[-3] for file in files} == {process}, files
    epochs = record.read_logdir(tmp_path / "logs").epochs
    history = finished.findings[0]["history"]
    for key in ("loss", "val_loss", "total_bytes"):
        values = [epoch.logs[key] for epoch in epochs]
        assert values == pytest.approx(history[key]), key
    rows = (tmp_path / "log.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1"]


@pytest.mark.parametrize(
    "methods", [slow("power_sgd"), slow("sign_sgd,bfloat16,diana")]
)
def test_other_methods(run, tmp_path, methods):
    """The methods use two rounds, votes, narrow sums and state."""
    finished = run("methods", 2, tmp_path, METHODS=methods)
    assert finished.codes == [0, 0]
    first, second = finished.findings
    for name, result in first.items():
        assert result["weights"] == second[name]["weights"], name
        assert result["restored"], name
        losses = result["history"]["loss"]
        assert losses[-1] < losses[0], name


@pytest.mark.slow
def test_two_levels(run, tmp_path):
    finished = run("two_levels", 4, tmp_path)
    assert finished.codes == [0] * 4
    first, *others = finished.findings
    for other in others:
        assert other["weights"] == first["weights"]
    assert len({findings["state"] for findings in finished.findings}) == 4
    losses = first["history"]["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_all_choose_the_same_collective(run, tmp_path):
    """One worker has no native operations and merges more slowly."""
    finished = run("auto", 3, tmp_path, last={"TF_DGC_NATIVE": "0"})
    assert finished.codes == [0] * 3
    first, *others = finished.findings
    for other in others:
        assert other["weights"] == first["weights"]
        assert other["chosen"] == first["chosen"]
    assert "auto" not in first["chosen"]
    losses = first["history"]["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("methods", ["dgc", exhaustive("float16,power_sgd,qsgd,none")])
def test_overlapping_steps_give_equal_bits(run, tmp_path, methods):
    finished = run("overlap", 2, tmp_path, METHODS=methods)
    assert finished.codes == [0, 0]
    first, second = finished.findings
    for name in methods.split(","):
        whole, buckets = (first[f"{name} {overlap}"] for overlap in (False, 1e6))
        assert whole["weights"] == buckets["weights"]
        assert whole["history"]["loss"] == buckets["history"]["loss"]
        assert whole["collective"] == "ring"
        assert buckets["collective"] == "ring, 5 buckets"
        losses = buckets["history"]["loss"]
        assert losses[-1] < losses[0]
    for name, result in second.items():
        assert result["weights"] == first[name]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("last", [{}, {"TF_DGC_NATIVE": "0"}], ids=["same", "mixed"])
def test_steps_per_execution_with_a_schedule(run, tmp_path, last):
    """In the mixed case, the last worker has no native operations."""
    finished = run("steps_per_execution", 2, tmp_path, last=last)
    assert finished.codes == [0, 0]
    hashes = {h for findings in finished.findings for h in findings.values()}
    assert len(hashes) == 1


def test_stock_sgd_trains_and_equals_sparsity_0(run, tmp_path):
    """One case accumulates gradients and overwrites weights by their averages."""
    finished = run("stock", 2, tmp_path)
    assert finished.codes == [0, 0]
    for findings in finished.findings:
        for kind in ("", " with conditions"):
            wrapped, stock = findings[f"wrapped{kind}"], findings[f"stock{kind}"]
            np.testing.assert_allclose(wrapped, stock, rtol=1e-5)


@pytest.mark.parametrize("scenario", ["nan", slow("mixed_bfloat16")])
def test_nan_on_one_worker(run, tmp_path, scenario):
    finished = run(scenario, 2, tmp_path)
    assert finished.codes == [0, 0]
    assert finished.findings[0] == finished.findings[1]
    assert finished.findings[0]["nonfinite"] == 1
    assert finished.findings[0]["finite"]
    assert sum("holds NaN or Inf" in output for output in finished.outputs) == 1


@pytest.mark.slow
def test_overflow_on_the_last_worker(run, tmp_path):
    """All workers skip the step and halve the scale, like stock SGD."""
    finished = run("mixed_precision", 2, tmp_path)
    assert finished.codes == [0, 0]
    assert finished.findings[0] == finished.findings[1]
    results = finished.findings[0]
    for result in results.values():
        assert result["scales"] == [[2**14, i] for i in range(4)]
        assert np.all(np.isfinite(result["values"]))
    np.testing.assert_allclose(
        results["wrapped"]["values"], results["stock"]["values"], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("other_sparsity", "optimizer.sparsity: 0.9"),
        pytest.param(
            "other_period", "optimizer.period at step 0", marks=pytest.mark.slow
        ),
        pytest.param(
            "other_inner", "optimizer.inner.class_name: 'Adam", marks=pytest.mark.slow
        ),
    ],
)
def test_every_worker_reports_the_difference(run, tmp_path, scenario, message):
    finished = run(scenario, 2, tmp_path)
    assert all(finished.codes)
    for output in finished.outputs:
        assert message in output


@pytest.mark.parametrize(
    ("scenario", "shapes"),
    [
        ("other_shape", ["[50,48]", "[50,40]"]),
        pytest.param("more_layers", ["[40,40]", "[40,1]"], marks=pytest.mark.slow),
    ],
)
def test_different_models_raise_at_once(run, tmp_path, scenario, shapes):
    finished = run(scenario, 2, tmp_path, TF_DGC_TIMEOUT="1000")
    assert all(finished.codes)
    for output in finished.outputs:
        for shape in shapes:
            assert shape in output


ALIKE = "all workers must make the same calls in the same order"


def place(text):
    """Return an error's description of the scenario line that contains a text."""
    lines = SCRIPT.read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line]
    return f"{SCRIPT}:{number} in "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "places"),
    [
        (
            "predicts_alone",
            [
                (place("# on this one alone"), "self.model.predict(make_data()[0]"),
                (place("history = model.fit("), "history = model.fit("),
            ],
        ),
        pytest.param(
            "other_function",
            [
                (place("step(several=RANK == 0)"), "step(several=RANK == 0)"),
                (place('reduce("SUM", tf.ones([7])'), "STRATEGY.reduce("),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param("gradients_of_one_stock", [], marks=pytest.mark.slow),
        # After steps with both gradients and with one, and with both only.
        pytest.param(
            "gradients_of_one [true, false, true]",
            2 * [(place("# the first one with both"), "step(RANK == 0)")],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gradients_of_one [true]",
            2 * [(place("# the first one with both"), "step(RANK == 0)")],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_workers_in_different_collectives(run, tmp_path, scenario, places):
    """The error shows each worker's line and does not mention the network."""
    name, _, before = scenario.partition(" ")
    finished = run(name, 2, tmp_path, TF_DGC_TIMEOUT="10", BEFORE=before)
    assert all(finished.codes)
    for output in finished.outputs:
        error = output.rpartition("RuntimeError: tf_dgc: ")[2]
        head, *lines = error.splitlines()
        assert "the workers are in different collectives" in head
        for rank, (where, text) in enumerate(places):
            assert f"  worker {rank} (" in lines[rank]
            assert f"at {where}" in lines[rank]
            assert f": {text}" in lines[rank]
        assert ALIKE in lines[-1]
        assert "the network" not in error
        assert "--max-restarts" not in error


def test_gradients_of_other_variables(run, tmp_path):
    """Workers compare them while the first step is traced, and raise at once."""
    settings = {"TF_DGC_TIMEOUT": "1000", "BEFORE": "[]"}
    finished = run("gradients_of_one", 2, tmp_path, **settings)
    assert all(finished.codes)
    first = "'a gradient' on worker 0"
    second = "'no gradient' on worker 1"
    texts = [f"{first}, {second}", f"{second}, {first}"]
    for output, text in zip(finished.outputs, texts, strict=True):
        assert "The workers have gradients for different variables" in output
        assert f"  alone (variable 1): {text}" in output
        assert "  both" not in output


@pytest.mark.slow
def test_equal_initial_weights_are_not_sent(tmp_path):
    """Bytes are checked if the workers have a loopback of their own."""
    prefix = programs.loopback_prefix()
    launcher = [sys.executable, "-m", "tf_dgc", "run", "--workers=2"]
    finished = programs.run([*(prefix or []), *launcher, SCRIPT, "start", tmp_path])
    assert finished.returncode == 0
    paths = [tmp_path / f"{rank}.json" for rank in range(2)]
    first, second = [json.loads(path.read_text()) for path in paths]
    for seeds, share in [("equal", 0.05), ("different", 1.05)]:
        assert first[seeds]["digest"] == second[seeds]["digest"]
        sent = min(first[seeds]["sent"], second[seeds]["sent"])
        assert sent < share * first[seeds]["weights"] or not prefix, seeds
    assert first["different"]["digest"] != first["equal"]["digest"]
    assert first["others"] == second["others"]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["chief_saves_alone", "chief_checkpoints_alone"])
def test_reading_the_state_on_one_worker_raises(run, tmp_path, scenario):
    finished = run(scenario, 2, tmp_path)
    assert finished.codes[0]
    assert "not on the chief alone" in finished.outputs[0]


@pytest.mark.parametrize(("victim", "late"), rows([(1, 0), (0, 1)], [(0, 1)]))
def test_a_peer_that_ends_by_its_own_error(run, tmp_path, victim, late):
    """All workers report its error, also if it was the coordinator and ended before."""
    environment = {"PEER_VICTIM": str(victim), "PEER_LATE": str(late)}
    finished = run("peer_ends", 2, tmp_path, TF_DGC_TIMEOUT="1000", **environment)
    (results,) = finished.findings
    reason = "ended with ValueError: the disk of this worker is full. Training cannot"
    for operation, (error, text, seconds) in results.items():
        # Keras wraps errors of loading weights in its own ValueError.
        expected = "ValueError" if operation == "load weights" else "RuntimeError"
        assert error == expected, operation
        assert f"cannot go on: worker {victim} (" in text, operation
        assert reason in text, operation
        assert seconds < 40, operation


@pytest.mark.slow
def test_a_peer_that_leaves(run, tmp_path):
    """A worker that ends by `sys.exit` tells the others."""
    finished = run("peer_leaves", 2, tmp_path, TF_DGC_TIMEOUT="1000")
    assert finished.codes[1] == 3
    ((error, text, seconds),) = finished.findings
    assert error == "RuntimeError"
    assert re.search(r"cannot go on: worker 1 \(\S+\) has ended: its program", text)
    assert seconds < 100


PARTS = ["model-0.weights.h5", "part-0.h5", "part-1.h5"]


def files_of_backups(directory):
    """Return the files of each backup, by its number."""
    names = [path.name for path in (directory / "backup").iterdir()]
    files = {}
    for name in sorted(names, key=lambda name: ("manifest" in name, name)):
        backup, _, rest = name.partition(".")
        files.setdefault(int(backup.removeprefix("backup-")), []).append(rest)
    return files


@pytest.mark.slow
def test_killed_while_it_saves_and_resumed(run, tmp_path):
    """Two workers end like an undisturbed run; three keep the total residual."""
    killed = run("backup_until_the_chief_dies", 2, tmp_path)
    assert killed.codes[0] == -signal.SIGKILL
    assert killed.codes[1]
    assert files_of_backups(tmp_path) == {1: [*PARTS, "manifest-0.json"], 2: PARTS}
    resumed = run("resume", 2, tmp_path)
    assert resumed.codes == [0, 0]
    assert [findings["equal"] for findings in resumed.findings] == [True, True]
    assert files_of_backups(tmp_path) == {5: [*PARTS, "manifest-0.json"]}
    elsewhere = run("resume_elsewhere", 3, tmp_path)
    assert elsewhere.codes == [0, 0, 0]
    first = elsewhere.findings[0]
    assert all(first["residual"])
    assert first["largest"] > 0
    assert first["gone"]
    assert {f["weights"] for f in elsewhere.findings} == {first["weights"]}


@pytest.mark.slow
def test_divergence(run, tmp_path):
    finished = run("divergence", 2, tmp_path)
    assert finished.codes == [0, 0]
    text = r"iteration 4: worker 1 \(.*\) from worker 0 \(.*\) in dense_\d/kernel, "
    for errors, output in zip(finished.findings, finished.outputs, strict=True):
        assert re.search(f"WARNING: tf_dgc: Workers differ at {text}", output)
        assert re.search(text, errors["raise"])
        assert "warn" not in errors


@pytest.mark.slow
def test_coordination(run, tmp_path):
    """Waiting does not block other threads, and ends with an error."""
    finished = run("coordination", 2, tmp_path)
    assert finished.codes == [0, 0]
    for findings in finished.findings:
        assert findings["notes"] == ["größe 0", "größe 1"]
        assert findings["again"] == "again"
    first = finished.findings[0]
    assert first["set twice"][1] == "AlreadyExistsError"
    for operation in ("lookup", "barrier"):
        standstill, error = first[operation]
        assert error == "DeadlineExceededError"
        assert standstill < 0.5  # of 1 s

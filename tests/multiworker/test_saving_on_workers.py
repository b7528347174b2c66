"""Saving on two real workers by each API, in one run."""

import pathlib
import re

import pytest

pytestmark = [pytest.mark.workers, pytest.mark.exhaustive]
SCRIPT = pathlib.Path(__file__).with_name("saving_scenarios.py")


@pytest.fixture(scope="module")
def finished(starter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saving")
    finished = starter.run([SCRIPT, "saving", folder], 2, folder)
    assert len(finished.findings) == 2  # exit codes after a failure may differ
    assert not list(folder.rglob(".unfinished*"))
    assert not list(folder.rglob(".tf_dgc*"))
    return finished


def findings_of(finished, scenario):
    return [finding[scenario] for finding in finished.findings]


def test_one_file_for_all_workers(finished):
    for finding in findings_of(finished, "save_to_one_path"):
        assert finding["keras"]
        assert finding["weights"]
        assert finding["checkpoint"]
        assert "Several workers write to the same file" in finding["shared"]
        assert "from the same checkpoint" in finding["different"]


def test_keras_callbacks_with_one_path(finished):
    for finding in findings_of(finished, "use_stock_callbacks"):
        assert finding["restored"]
        assert finding["loaded"]
        assert finding["epochs"] == []
        assert finding["backups"] == [
            "backup-2.manifest-0.json",
            "backup-2.model-0.weights.h5",
            "backup-2.part-0.h5",
            "backup-2.part-1.h5",
        ]
        assert set(finding["files"]) >= {
            *("m.keras", "m.weights.h5", "new/1/m.keras", "saved.weights.h5"),
            *("by_hand.keras", "by_hand.weights.h5"),
        }
        assert "tf_dgc.callbacks.BackupAndRestore" in finding["derived"]
        assert "`filepath` must end in `.keras`" in finding["legacy"]
        assert "same callbacks that save" in finding["chief"]
        assert "must be to a file that ends in '.keras'" in finding["save"]


def test_one_path_with_a_stock_optimizer(finished):
    """Workers write to different files, or only the chief writes."""
    first, second = findings_of(finished, "use_a_stock_optimizer")
    assert not {*first.pop("written")} & {*second.pop("written")}
    assert first == second
    assert first["epochs"] == [2]  # continues from the backup's epoch
    assert first["backups"] == [
        "backup-3.manifest-0.json",
        "backup-3.model-0.weights.h5",
        "backup-3.part-0.h5",
        "backup-3.part-1.h5",
    ]
    assert first["files"] == [
        *("a.keras", "a.weights.h5", "b.keras", "b.weights.h5", "chief.keras"),
        *("chief.weights.h5", "derived.keras", "old.h5"),
    ]
    assert "same callbacks that restore" in first["some"]


def test_backups_in_a_directory_of_each_worker(finished):
    for rank, finding in enumerate(findings_of(finished, "back_up_to_own_directories")):
        assert finding["files"] == [
            f"backup-2.manifest-{rank}.json",
            f"backup-2.model-{rank}.weights.h5",
            f"backup-2.part-{rank}.h5",
        ]
        for missing in ("part-0", "part-1", "model-0", "model-1"):
            assert f"backup-2.{missing}" in finding["exchanged"]
        assert "as many workers as before, each on the same" in finding["exchanged"]
        assert finding["resumed"]
        assert finding["together"]


def test_a_save_ends_when_all_have_written(finished):
    """Otherwise the scenario misses a file; the error names the failed worker."""
    first, second = findings_of(finished, "save_to_own_paths")
    assert re.search("RuntimeError: .*worker 1 ", first["error"])
    assert second["error"] == "OSError: the disk of this worker is full"

"""Saving on two real workers, by all ways there are, in one run."""

import pathlib
import re

import pytest

pytestmark = [pytest.mark.workers, pytest.mark.exhaustive]
SCRIPT = pathlib.Path(__file__).with_name("saving_scenarios.py")


@pytest.fixture(scope="module")
def finished(starter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saving")
    finished = starter.run([SCRIPT, "saving", folder], 2, folder)
    assert len(finished.findings) == 2  # how they end after a failure is left open
    assert not list(folder.rglob(".unfinished*"))
    assert not list(folder.rglob(".tf_dgc*"))
    return finished


def of(finished, part):
    return [found[part] for found in finished.findings]


def test_one_file_for_all_workers(finished):
    for found in of(finished, "save_to_one_path"):
        assert found["keras"]
        assert found["weights"]
        assert found["checkpoint"]
        assert "Several workers write to the same file" in found["shared"]
        assert "from the same checkpoint" in found["different"]


def test_keras_callbacks_with_one_path(finished):
    for found in of(finished, "use_stock_callbacks"):
        assert found["restored"]
        assert found["loaded"]
        assert found["epochs"] == []
        assert found["backups"] == [
            "backup-2.manifest-0.json",
            "backup-2.model-0.weights.h5",
            "backup-2.part-0.h5",
            "backup-2.part-1.h5",
        ]
        assert set(found["files"]) >= {
            *("m.keras", "m.weights.h5", "new/1/m.keras", "saved.weights.h5"),
            *("by_hand.keras", "by_hand.weights.h5"),
        }
        assert "tf_dgc.callbacks.BackupAndRestore" in found["derived"]
        assert "`filepath` must end in `.keras`" in found["legacy"]
        assert "same callbacks that save" in found["chief"]
        assert "must be to a file that ends in '.keras'" in found["save"]


def test_one_path_with_a_stock_optimizer(finished):
    """All write, none to what another one writes; or the chief alone."""
    first, second = of(finished, "use_a_stock_optimizer")
    assert not {*first.pop("written")} & {*second.pop("written")}
    assert first == second
    assert first["epochs"] == [2]  # goes on where the backup was made
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
    for rank, found in enumerate(of(finished, "back_up_to_own_directories")):
        assert found["files"] == [
            f"backup-2.manifest-{rank}.json",
            f"backup-2.model-{rank}.weights.h5",
            f"backup-2.part-{rank}.h5",
        ]
        for missing in ("part-0", "part-1", "model-0", "model-1"):
            assert f"backup-2.{missing}" in found["exchanged"]
        assert "same number of workers, each where it was" in found["exchanged"]
        assert found["resumed"]
        assert found["together"]


def test_a_save_ends_when_all_have_written(finished):
    """Or the scenario does not find a file; and one that cannot write is named."""
    first, second = of(finished, "save_to_own_paths")
    assert re.search("RuntimeError: .*worker 1 ", first["error"])
    assert second["error"] == "OSError: the disk of this worker is full"

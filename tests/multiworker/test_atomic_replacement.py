"""`replacing` replaces a file atomically, also if several processes write it."""

import os
import stat
import uuid

import pytest

from tf_dgc.multiworker.saving import replacing


def test_concurrent_writers_each_write_a_whole_file(tmp_path):
    """Workers of a parameter server may save to one path."""
    path = tmp_path / "model.keras"
    with replacing(path) as one, open(one, "w") as file:
        file.write("A" * 10)
        file.flush()
        with replacing(path) as other:
            other.write_text("BBBB")
        assert path.read_text() == "BBBB"
        file.write("A" * 10)
        file.flush()
        assert path.read_text() == "BBBB"
    assert path.read_text() == "A" * 20
    assert list(tmp_path.iterdir()) == [path]


def test_only_old_unfinished_files_are_removed(tmp_path):
    path = tmp_path / "model.keras"
    unfinished_files = [
        *(f".unfinished.{uuid.uuid4().hex}.model.keras" for _ in range(3)),
        f".unfinished.{uuid.uuid4().hex}.other.keras",
        ".unfinished.model.keras",
    ]
    for name, hours in zip(unfinished_files, [2, 0, 0.9, 2, 2], strict=True):
        (tmp_path / name).write_text("half of")
        time = (tmp_path / name).stat().st_mtime - 3600 * hours
        os.utime(tmp_path / name, (time, time))
    with pytest.raises(OSError, match="full"), replacing(path):
        raise OSError("the disk is full")
    assert {p.name for p in tmp_path.iterdir()} == {*unfinished_files}
    with replacing(path) as unfinished:
        unfinished.write_text("whole")
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"model.keras", *unfinished_files[1:]}


def test_links_and_permissions_are_preserved(tmp_path):
    """Replacing a file acts like writing to it."""
    (tmp_path / "large").mkdir()
    target, link = tmp_path / "large" / "model.keras", tmp_path / "model.keras"
    link.symlink_to(target)
    for text in ("one", "two"):
        with replacing(link) as unfinished:
            unfinished.write_text(text)
        assert link.is_symlink()
        assert target.read_text() == text
        if text == "one":
            target.chmod(0o640)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large", "model.keras"]

"""`benchmarks/methods.py` times parts of a step and has a floor for every method."""

import importlib
import json
import pathlib
import sys

import numpy as np
import programs
import pytest

from tf_dgc import compressors, native_library

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
ENTRIES = 64 * 256 + 256 + 9 * 16 * 32
KEYS = "method shapes threads variables parameters turns step_ms step_p90_ms \
step_processor_ms step_floor_ms step_ratio extra_memory gathered_memory commit \
processor onednn"
PARTS = "compress_ms compress_floor_ms decode_2_ms decode_8_ms decode_8_floor_ms \
update_ms step_2_ms compress_ratio decode_8_ratio bytes_per_step requests"


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def links(common):
    """Return the module of link speeds, which needs matplotlib."""
    pytest.importorskip("matplotlib")
    return importlib.import_module("common.links")


@pytest.mark.exhaustive
@pytest.mark.skipif(
    native_library.load_library().library is None,
    reason=native_library.load_library().reason,
)
def test_methods(links, tmp_path):
    """A sum, a gather, the fused step, and the optimizer alone."""
    rows, output = tmp_path / "rows.json", tmp_path / "table.md"
    methods = ["sgd", "none", "two_bit", "dgc"]
    finished = programs.run(
        [
            sys.executable,
            BENCHMARKS / "methods.py",
            "--quick",
            "--seconds=0.2",
            "--shapes=tiny",
            f"--only={','.join(methods)}",
            f"--json={rows}",
            f"--markdown={output}",
            f"--plot={tmp_path / 'links.svg'}",
        ]
    )
    assert finished.returncode == 0
    row_of = {row["method"]: row for row in json.loads(rows.read_text())}
    assert list(row_of) == methods
    for row in row_of.values():
        assert set(row) >= set(KEYS.split())
        assert row["parameters"] == ENTRIES
        assert row["step_ms"] > 0
        assert f" {row['method']} |" in output.read_text()
    del row_of["sgd"]
    for row in row_of.values():
        assert set(row) >= set(PARTS.split())
        assert row["compress_ms"] > 0
    sent = {name: row["bytes_per_step"] / (4 * ENTRIES) for name, row in row_of.items()}
    assert 1 <= sent["none"] < 1.01
    assert sent["dgc"] < sent["two_bit"] < 0.1
    gathered = {name: row["gathered_memory"] for name, row in row_of.items()}
    assert gathered["none"] == 0
    assert gathered["two_bit"] == pytest.approx(2 * sent["two_bit"])
    assert [row["requests"] for row in row_of.values()] == [1] * 3
    picture = (tmp_path / "links.svg").read_text()
    assert all(f"<!-- {name} -->" in picture for name in row_of)


@pytest.mark.exhaustive
def test_cached(tmp_path):
    path = tmp_path / "rows.json"
    flags = ["--only=sgd,two_bit", "--entries=1e6", "--rounds=3", f"--json={path}"]
    command = [sys.executable, BENCHMARKS / "cached.py", *flags]
    assert programs.run(command).returncode == 0
    rows = json.loads(path.read_text())
    assert [row["method"] for row in rows] == ["sgd", "two_bit"]
    for row in rows:
        assert row["by_floor"] == pytest.approx(row["memory_ns"] / row["floor_ns"])
        assert row["memory_ns"] > 0


def test_every_method_has_a_floor(common, monkeypatch):
    from common import floors

    assert set(floors.COMPRESS) <= {*compressors.METHODS, "dgc", "dgc_adamw"}
    assert all(map(floors.compress_passes, compressors.METHODS))
    monkeypatch.delitem(floors.COMPRESS, "top_k")
    monkeypatch.delitem(floors.COMPRESS, "natural")
    assert floors.compress_passes("top_k") == ["g r -> r p"]
    assert floors.compress_passes("natural") == ["g -> p"]
    assert floors.compress_passes("sgd") is None


@pytest.mark.slow
def test_arrays_that_a_floor_writes(common):
    """All written entries change, and arrays that are only read do not."""
    from common.floors import Floors

    sizes = [3000, 1, 5000]
    floors = Floors("two_bit", sizes, sum(sizes) // 4, summed=False, threads=2)
    run = floors.function("compress")
    arrays = floors._arrays
    assert {name: len(array) for name, array in arrays.items()} == {
        "g": 8001, "r": 8001, "p0": 501,
    }  # fmt: skip
    before = {name: array.copy() for name, array in arrays.items()}
    run()
    np.testing.assert_array_equal(before["g"], arrays["g"])
    assert np.all(before["r"] != arrays["r"])
    assert np.all((before["p0"] != arrays["p0"])[:500])
    assert set(floors._arrays) == {"g", "r", "p0"}
    floors.function("decode", 8)()
    assert set(floors._arrays) == {"g", "r", "s", *(f"p{i}" for i in range(8))}


def test_fastest_method_by_link_speed(links):
    """Bytes decide on slow links, and local work on fast ones."""

    def row(name, local_ms, num_bytes):
        return {
            "method": name,
            "step_2_ms": local_ms,
            "requests": 1,
            "bytes_per_step": num_bytes,
        }

    # Equal at 79.2 Mbit/s, where 0.99e6 bytes take 100 ms.
    rows = [row("quick", 0.0, 1_000_000), row("small", 100.0, 10_000), {"method": "s"}]
    (first, low, middle), (second, same, high) = links.fastest(rows)
    assert (first, second) == ("small", "quick")
    assert low == pytest.approx(1e7)
    assert high == pytest.approx(1e10)
    assert middle == same == pytest.approx(79.2e6, rel=0.03)
    assert links.step_ms(rows[1], 1e7) == pytest.approx(100 + links.LATENCY_MS + 8)
    assert "`small` from 10 Mbit/s to 79 Mbit/s, `quick`" in links.describe_fastest(
        rows
    )


@pytest.mark.parametrize(
    "heights", [[0.1, 0.1, 0.1], [0.5, 0.99, 1.0, 1.0], [0.0, 0.3, 0.9]]
)
def test_labels_do_not_overlap(links, heights):
    spread = links._spread(heights)
    assert np.all(np.diff(spread) >= links._GAP - 1e-9)
    assert max(spread) <= 1
    assert np.max(np.abs(np.subtract(spread, heights))) <= 3 * links._GAP

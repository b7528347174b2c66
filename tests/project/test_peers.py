"""`benchmarks/step.py --peers` trains the same model with PyTorch on the same links."""

import json
import pathlib
import sys

import programs
import pytest

STEP = pathlib.Path(__file__).parents[2] / "benchmarks" / "step.py"


@pytest.mark.slow
@pytest.mark.workers
def test_peers(tmp_path):
    """PyTorch's rows have the same fields, and its hooks reduce the bytes."""
    pytest.importorskip("torch")
    path = tmp_path / "step.json"
    finished = programs.run(
        [
            sys.executable,
            STEP,
            "--model=tiny",
            "--modes=dense",
            "--peers",
            "--steps=5",
            f"--json={path}",
        ]
    )
    assert finished.returncode == 0
    assert "Times do not compare" not in finished.stdout
    tf_dgc_row, *torch_rows = json.loads(path.read_text())
    modes = ["torch", "torch-fp16", "torch-powersgd"]
    assert [row["mode"] for row in torch_rows] == modes
    for row in torch_rows:
        assert row["parameters"] == tf_dgc_row["parameters"]
        assert row["variables"] == tf_dgc_row["variables"]
        assert row["gradients_ms"] > 0
        assert 0 < row["median_ms"] <= row["p90_ms"]
    dense, half, factors = (row["bytes_per_step"] for row in torch_rows)
    assert dense == pytest.approx(tf_dgc_row["bytes_per_step"], rel=0.1)
    assert half == pytest.approx(dense / 2, rel=0.1)
    assert factors < dense / 4


def test_unsupported_peers(monkeypatch):
    monkeypatch.syspath_prepend(STEP.parent)
    from common import peers

    assert "--model cnn" in peers.unsupported_reason("cnn", "custom")
    assert "--loop fit" in peers.unsupported_reason("mlp", "fit")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert "needs PyTorch" in peers.unsupported_reason("mlp", "custom")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    assert peers.unsupported_reason("tiny", "custom") is None

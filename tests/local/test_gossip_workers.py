"""Gossip between worker processes: connections and weights."""

import pathlib

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).with_name("gossip_worker.py")


@pytest.mark.workers
@pytest.mark.slow
def test_three_workers_contact_only_their_neighbors(starter, tmp_path):
    finished = starter.run([SCRIPT, tmp_path], 3, tmp_path)
    assert finished.codes == [0, 0, 0]
    expected_groups = {
        "d-psgd": [["(0, 1)"], ["(0, 1)", "(1, 2)"], ["(1, 2)"]],
        "choco": [["(0, 1)"], ["(0, 1)", "(1, 2)"], ["(1, 2)"]],
        "one-peer": [["(0, 1)", "(0, 2)"], ["(0, 1)", "(1, 2)"], ["(0, 2)", "(1, 2)"]],
    }
    for name, groups in expected_groups.items():
        results = [worker[name] for worker in finished.findings]
        for worker, expected in zip(results, groups, strict=True):
            first, *_, last = worker["started"]
            used = {g for g, n in last.items() if n > first.get(g, 0)}
            assert used == set(expected), name  # no group of all workers
            assert worker["unchanged"]
            assert worker["steps"] == 2 + 1
        check_weights(*results)


def check_weights(*results):
    for step, weights in enumerate(zip(*(f["weights"] for f in results), strict=True)):
        kernels = [np.array(w[0]) for w in weights]
        assert len({k.tobytes() for k in kernels}) == 3, step
    mean = np.mean(kernels, axis=0)
    for worker in results:
        assert worker["consensus"] == results[0]["consensus"]
        assert worker["loss"] == results[0]["loss"]
        np.testing.assert_allclose(worker["consensus"][0], mean, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(worker["saved"][0], mean, rtol=1e-5, atol=1e-7)

"""Gossip of real workers: who contacts whom, and what all of them come to."""

import pathlib

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).with_name("gossip_worker.py")


@pytest.mark.workers
@pytest.mark.slow
def test_three_workers_contact_their_neighbours_only(starter, tmp_path):
    finished = starter.run([SCRIPT, tmp_path], 3, tmp_path)
    assert finished.codes == [0, 0, 0]
    linked = {
        "d-psgd": [["(0, 1)"], ["(0, 1)", "(1, 2)"], ["(1, 2)"]],
        "choco": [["(0, 1)"], ["(0, 1)", "(1, 2)"], ["(1, 2)"]],
        "one-peer": [["(0, 1)", "(0, 2)"], ["(0, 1)", "(1, 2)"], ["(0, 2)", "(1, 2)"]],
    }
    for name, groups in linked.items():
        found = [worker[name] for worker in finished.findings]
        for worker, mine in zip(found, groups, strict=True):
            first, *_, last = worker["started"]
            new = {g for g, n in last.items() if n > first.get(g, 0)}
            assert new == set(mine), name  # and none of all workers
            assert worker["unchanged"]
            assert worker["steps"] == 2 + 1
        check_weights(*found)


def check_weights(*found):
    for step, one_by_one in enumerate(zip(*(f["weights"] for f in found), strict=True)):
        kernels = [np.array(w[0]) for w in one_by_one]
        assert len({k.tobytes() for k in kernels}) == 3, step
    mean = np.mean(kernels, axis=0)
    for worker in found:
        assert worker["consensus"] == found[0]["consensus"]
        assert worker["loss"] == found[0]["loss"]
        np.testing.assert_allclose(worker["consensus"][0], mean, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(worker["saved"][0], mean, rtol=1e-5, atol=1e-7)

"""Buckets of tensors for the backward pass, planned by the cost model."""

import itertools

import numpy as np
import pytest

from tf_dgc.collectives import (
    LinkSpeeds,
    RequestSize,
    Ring,
    cost_model,
    predict_seconds,
)
from tf_dgc.collectives.cost_model import TransferTimes


def test_tensors_wait_if_a_startup_costs_more():
    costs = TransferTimes(1.0, [0.1, 0.1, 2.0])
    assert cost_model.plan_buckets([1.0, 1.1, 1.2], costs) == [[0, 1, 2]]
    assert cost_model.plan_buckets([1.0, 1.9, 2.5], costs) == [[0], [1, 2]]


def test_slow_backward_pass_sends_each_tensor_at_once():
    costs = TransferTimes(1.0, [2.0, 0.0, 2.0, 2.0])
    assert cost_model.plan_buckets([1e3, 2e3, 3e3, 4e3], costs) == [[0], [1], [2], [3]]


def test_tensors_ready_during_a_transfer_share_a_bucket():
    costs = TransferTimes(1.0, [10.0, 1.0, 1.0, 1.0])
    assert cost_model.plan_buckets([0.0, 2.0, 3.0, 4.0], costs) == [[0], [1, 2, 3]]


def test_finish_time():
    costs = TransferTimes(1.0, [2.0, 2.0, 4.0])
    assert cost_model.finish_time([1.0, 2.0, 3.0], [[0], [1], [2]], costs) == 12.0
    assert cost_model.finish_time([1.0, 2.0, 3.0], [[0, 1, 2]], costs) == 12.0
    assert cost_model.finish_time([1.0, 2.0, 30.0], [[0, 1], [2]], costs) == 35.0
    assert costs.alone == 9.0


@pytest.mark.parametrize("seed", range(20))
def test_no_other_buckets_are_faster(seed):
    rng = np.random.default_rng(seed)
    ready = np.sort(rng.uniform(0, 10, 7)).tolist()
    costs = TransferTimes(rng.uniform(0.1, 3), rng.uniform(0.1, 3, 7).tolist())
    planned = cost_model.finish_time(
        ready, cost_model.plan_buckets(ready, costs), costs
    )
    best = np.inf
    for starts in itertools.product([False, True], repeat=6):
        buckets = [[0]]
        for i, starts_bucket in enumerate(starts, start=1):
            if starts_bucket:
                buckets.append([])
            buckets[-1].append(i)
        best = min(best, cost_model.finish_time(ready, buckets, costs))
    assert planned == pytest.approx(best)


def test_costs_are_those_of_the_model():
    links = LinkSpeeds(1e-3, 1e-4, 8e-9, start=5e-3)
    sizes = [[RequestSize("sum", 4e6)], [RequestSize("sum", 1e6)]]
    costs = cost_model.transfer_times(
        Ring(), sizes, [RequestSize("sum", 5e6)], 4, links
    )
    whole = predict_seconds(Ring(), [RequestSize("sum", 5e6)], 4, links)
    assert costs.alone == pytest.approx(whole - 5e-3)
    assert costs.startup == pytest.approx(1e-3 + 6e-4)

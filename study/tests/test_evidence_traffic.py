"""Bytes on the links of a ring in the report of `study/evidence.py`."""

import dataclasses

import pytest
from evidence_rows import row
from registered import comparisons, plan, registry, traffic
from registered.specs import Spec
from selection import exhaustive

from tf_dgc.collectives import Ring
from tf_dgc.collectives.cost_model import request_cost
from tf_dgc.optimizers import autotune


def create_optimizer(spec):
    """Return the optimizer of a run, built, without warm-up."""
    arguments = {"warmup_epochs": 1e-9} if spec.method == "dgc" else {}
    spec = dataclasses.replace(spec, settings={"method": arguments})
    task = registry.make_task(spec, None)
    optimizer = registry.make_optimizer(spec, traffic._TaskSize(task.recipe, 1000))
    optimizer.build(task.model().trainable_variables)
    return optimizer


@pytest.mark.parametrize(
    ("task", "method", "workers"),
    [
        exhaustive("ptb", "dgc", 4),
        ("ptb", "dgc", 8),
        *(("cifar10", method, 4) for method in ("dgc", "qsgd", "power_sgd", "float16")),
        *(("mnist", "dgc", n) for n in (4, 8)),
    ],
)
def test_ring_bytes_match_the_cost_model(task, method, workers):
    spec = Spec(task, method, {}, workers, 0, 5000)
    optimizer = create_optimizer(spec)
    requests = autotune.request_sizes(optimizer.compressor, optimizer.tensors, workers)
    num_bytes = sum(request.num_bytes for request in requests)
    expected = sum(request_cost(Ring(), r, workers).sent for r in requests)
    assert traffic.ring_bytes(spec, num_bytes, 1) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("task", "batch"), [("mnist", 32), ("ptb", 20)])
def test_first_warm_up_steps_may_be_dense(task, batch):
    """With 8 workers, gathering a quarter of the entries would send more."""
    tensors = create_optimizer(Spec(task, "dgc", {}, 4, 0, 100)).tensors
    whole = 4 * sum(tensor.size for tensor in tensors)
    for workers, share in ((4, 0), (8, 1 / 4)):
        dense = round(share * traffic.EXAMPLES[task] / (batch * workers))
        spec = Spec(task, "dgc", {}, workers, 0, 5000)
        ring_bytes = traffic.ring_bytes(spec, whole * 5000, 5000)
        small = (
            sum(4 * t.size for t in tensors if t.uncompressed) if task == "ptb" else 0
        )
        summed = 5000 * small + dense * (whole - small)
        gathered = whole * 5000 - summed
        expected = 2 * (workers - 1) / workers * summed + (workers - 1) * gathered
        assert ring_bytes == pytest.approx(expected, rel=1e-3)


def test_ring_bytes_of_sums_and_gathers():
    dense, gathered = (Spec("mnist", m, {}, 8, 0, 10) for m in ("dense", "qsgd"))
    assert traffic.ring_bytes(dense, 800, 10) == 1400
    assert traffic.ring_bytes(gathered, 800, 10) == 5600
    specs = plan.Group("mnist", plan.PAIR, (0,), workers=8).specs()
    (comparison,) = comparisons.from_rows([row(spec) for spec in specs])
    num_bytes = comparison.bytes_per_step_at_end("dgc")
    assert comparison.ring_bytes("dgc", num_bytes, 1) == 7 * num_bytes
    assert comparison.ring_bytes("float16", None) is None


def test_every_task_has_steps_and_examples():
    assert plan.STEPS.keys() == traffic.EXAMPLES.keys() == registry.TASKS.keys()

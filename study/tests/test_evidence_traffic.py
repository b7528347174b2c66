"""What `study/evidence.py` says of bytes on links, beside those handed over."""

import dataclasses

import pytest
from evidence_rows import row
from registered import comparison, plan, registry, traffic
from registered.specs import Spec
from selection import exhaustive

from tf_dgc.collectives import Ring
from tf_dgc.collectives.cost_model import request_cost
from tf_dgc.optimizers import autotune


def built(spec):
    """Return the optimizer of a run, without warm-up."""
    own = {"warmup_epochs": 1e-9} if spec.method == "dgc" else {}
    bare = dataclasses.replace(spec, settings={"method": own})
    task = registry.make_task(bare, None)
    optimizer = registry.make_optimizer(bare, traffic._Length(task.recipe, 1000))
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
def test_bytes_on_a_ring(task, method, workers):
    """They are what the package expects of a step."""
    spec = Spec(task, method, {}, workers, 0, 5000)
    optimizer = built(spec)
    asked = autotune.request_sizes(optimizer.compressor, optimizer.tensors, workers)
    handed = sum(each.num_bytes for each in asked)
    expected = sum(request_cost(Ring(), each, workers).sent for each in asked)
    assert traffic.on_a_ring(spec, handed, 1) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("task", "batch"), [("mnist", 32), ("ptb", 20)])
def test_the_beginning_of_a_warm_up_may_be_summed(task, batch):
    """With 8 workers, a quarter of the entries would be more, if it were gathered."""
    tensors = built(Spec(task, "dgc", {}, 4, 0, 100)).tensors
    whole = 4 * sum(tensor.size for tensor in tensors)
    for workers, share in ((4, 0), (8, 1 / 4)):
        dense = round(share * traffic.EXAMPLES[task] / (batch * workers))
        spec = Spec(task, "dgc", {}, workers, 0, 5000)
        found = traffic.on_a_ring(spec, whole * 5000, 5000)
        small = (
            sum(4 * t.size for t in tensors if t.uncompressed) if task == "ptb" else 0
        )
        summed = 5000 * small + dense * (whole - small)
        gathered = whole * 5000 - summed
        expected = 2 * (workers - 1) / workers * summed + (workers - 1) * gathered
        assert found == pytest.approx(expected, rel=1e-3)


def test_what_is_compared():
    dense, gathered = (Spec("mnist", m, {}, 8, 0, 10) for m in ("dense", "qsgd"))
    assert traffic.on_a_ring(dense, 800, 10) == 1400
    assert traffic.on_a_ring(gathered, 800, 10) == 5600
    specs = plan.Group("mnist", plan.PAIR, (0,), workers=8).specs()
    (found,) = comparison.comparisons([row(spec) for spec in specs])
    handed = found.sent_at_end("dgc")
    assert found.on_a_ring("dgc", handed, 1) == 7 * handed
    assert found.on_a_ring("float16", None) is None


def test_all_tasks_are_known():
    assert plan.STEPS.keys() == traffic.EXAMPLES.keys() == registry.TASKS.keys()

"""Several workers as threads, against NumPy and a mirrored run."""

import math

import keras
import numpy as np
import pytest
from harness import Trainer, initial_weights, make_gradients
from selection import exhaustive, slow
from serving import ServerGroup, TracedTrainer, leave_at_end, run_together

import tf_dgc
from tf_dgc.server import client, messages

STEPS = 3
TOP_K = {"compressor": tf_dgc.compressors.TopK(0.9), "min_compress_size": 100}


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=3.0)


def train(monkeypatch, mode, inner, gradients, weights, servers=1, **settings):
    """Return the servers, their weights, and the weights of each worker."""
    number = len(gradients[0])
    with ServerGroup(number, servers=servers) as served:
        optimizers = [
            served.optimizer(monkeypatch, i, inner(), mode, **settings)
            for i in range(number)
        ]
        workers = [TracedTrainer(optimizer, weights) for optimizer in optimizers]
        with leave_at_end(*workers):

            def run(i):
                for step in gradients:
                    workers[i].step(step[i])

            run_together(*(lambda i=i: run(i) for i in range(number)))
        return served, served.weights(), [w.weights() for w in workers]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, staleness, servers",
    [
        exhaustive("sync", None, 1),
        ("sync", None, 2),
        exhaustive("ssp", 0, 1),
        slow("ssp", 0, 3),
    ],
)
def test_sync_equals_mirrored_workers(
    strategies, monkeypatch, mode, staleness, servers
):
    """Bit-equal in float64 in each step, with momentum correction and residuals."""
    gradients, weights = make_gradients(2, STEPS), initial_weights()
    corrections = tf_dgc.Corrections(momentum=True, scale_before_accumulation=False)
    mirrored = Trainer(
        strategies[2],
        lambda: tf_dgc.CompressedOptimizer(sgd(), corrections=corrections, **TOP_K),
        weights,
    )
    for step in gradients:  # Keras divides them by the number of workers
        mirrored.step([[g / 2 for g in worker] for worker in step])
    settings = {
        "corrections": tf_dgc.Corrections(momentum=True),
        "staleness": staleness,
        "servers": servers,
        **TOP_K,
    }
    served, server_weights, worker_weights = train(
        monkeypatch, mode, sgd, gradients, weights, **settings
    )
    for worker in (server_weights, *worker_weights):
        for actual, expected in zip(worker, mirrored.weights(), strict=True):
            np.testing.assert_array_equal(actual, expected)
    assert [model.clock for model in served.models] == [STEPS] * servers


def test_adam_on_the_server_is_adam(monkeypatch):
    """One worker without compression, in parts of two kilobytes."""
    for module in (client, messages):
        monkeypatch.setattr(module, "MAX_WORDS", 500)
    gradients, weights = make_gradients(1, STEPS, "float32"), initial_weights("float32")
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.01])

    def adam():
        return keras.optimizers.AdamW(rate, weight_decay=0.01)

    variables = [keras.Variable(w) for w in weights]
    reference = adam()
    reference.build(variables)
    for step in gradients:
        reference.apply(step[0], variables)
    served, server_weights, (worker_weights,) = train(
        monkeypatch, "async", adam, gradients, weights, compressor="none"
    )
    for actual, pulled, expected in zip(
        server_weights, worker_weights, variables, strict=True
    ):
        np.testing.assert_array_equal(actual, pulled)
        np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5, atol=1e-7)
    assert served.model.clock == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode, staleness", [("async", None), ("ssp", 2)])
def test_no_gradient_is_lost_whatever_the_order(monkeypatch, mode, staleness, servers):
    """Weight changes and residuals add up to all gradients, in float64."""
    gradients, weights = make_gradients(3, 6), initial_weights()
    with ServerGroup(3, servers=servers) as served:
        settings = {
            "staleness": staleness,
            "corrections": tf_dgc.Corrections(momentum=False),
            **TOP_K,
        }
        rate = keras.optimizers.SGD(1.0)
        workers = [
            TracedTrainer(
                served.optimizer(monkeypatch, i, rate, mode, **settings), weights
            )
            for i in range(3)
        ]

        def run(i):
            for step in gradients:
                workers[i].step(step[i])

        with leave_at_end(*workers):
            run_together(*(lambda i=i: run(i) for i in range(3)))
            workers[0].optimizer.pull_weights()
            pulled = workers[0].weights()
        assert [model.clock for model in served.models] == [18] * servers
        for server in served.servers:
            lead = server.service.clock.max_lead
            assert lead <= (math.inf if staleness is None else staleness)
        for i, (before, after) in enumerate(
            zip(weights, served.weights(), strict=True)
        ):
            np.testing.assert_array_equal(pulled[i], after)
            total = sum(step[w][i] for step in gradients for w in range(3)) / 3
            residual = sum(
                worker.optimizer.residual[i].numpy().reshape(before.shape)
                for worker in workers
            )
            np.testing.assert_allclose(before - after, total - residual, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sparsity, servers",
    [(0.9, 1), (0.01, 1), pytest.param(0.9, 2, marks=pytest.mark.slow)],
    ids=["sparse", "dense", "two servers"],
)
def test_late_push_returns_to_the_residual(monkeypatch, sparsity, servers):
    """It is sent later, including dense and uncompressed tensors."""
    (gradients,), weights = make_gradients(2, 1), initial_weights()
    method = tf_dgc.compressors.TopK(sparsity)
    settings = {"compressor": method, "min_compress_size": 100, "quorum": 1}
    settings["corrections"] = tf_dgc.Corrections(momentum=False)
    with ServerGroup(2, servers=servers) as served:
        rate = keras.optimizers.SGD(1.0)
        one, late = workers = [
            TracedTrainer(
                served.optimizer(monkeypatch, i, rate, "backup", **settings), weights
            )
            for i in range(2)
        ]
        with leave_at_end(*workers):
            for worker in workers:
                worker.optimizer.join()
            one.step(gradients[0])
            late.step(gradients[1])
            assert served.model.clock == 1
            residuals = [r.numpy() for r in late.optimizer.residual]
            for residual, gradient in zip(residuals, gradients[1], strict=True):
                np.testing.assert_array_equal(
                    residual, gradient.reshape(residual.shape) / 2
                )
            late.step([np.zeros_like(g) for g in gradients[1]])
            assert served.model.clock == 2
        for i, after in enumerate(served.weights()):
            total = (gradients[0][i] + gradients[1][i]) / 2
            residual = sum(w.optimizer.residual[i].numpy() for w in workers)
            change = weights[i] - after
            np.testing.assert_allclose(change, total - residual.reshape(change.shape))
            assert weights[i].ndim > 1 or not residual.any()


def test_worker_with_another_model_raises(monkeypatch):
    with ServerGroup(2) as served:
        one, other = (
            TracedTrainer(served.optimizer(monkeypatch, i, sgd(), "async"), weights)
            for i, weights in enumerate([[np.zeros([4, 3])], [np.zeros([4, 2])]])
        )
        with leave_at_end(one, other):
            one.optimizer.join()
            with pytest.raises(RuntimeError, match=r"shape 1 is 2, not 3"):
                other.optimizer.join()
            one.step([np.ones([4, 3])])
        assert served.model.clock == 1


def test_another_secret_raises(monkeypatch):
    with ServerGroup(1) as served:
        worker = TracedTrainer(
            served.optimizer(monkeypatch, 0, sgd(), "async"), [np.zeros([4, 3])]
        )
        monkeypatch.setenv(messages.SECRET_VARIABLE, "another")
        with pytest.raises(RuntimeError, match="its secret differs"):
            worker.optimizer.join()
        monkeypatch.undo()
        worker.optimizer.leave()

"""Several servers: how they share variables, initial weights and errors."""

import time

import keras
import numpy as np
import pytest
from served_loop import Fake
from serving import ServerGroup, TracedTrainer, leave_at_end, run_together, some_weights

import tf_dgc
from tf_dgc.server.worker import join_servers, split_into_shards

SHAPES = [(40, 30), (5,), (20, 30), (30, 10)]


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
def test_shards_are_balanced_and_none_is_empty(num_servers):
    sizes = np.random.default_rng(0).integers(0, 1000, 40).tolist()
    shards = split_into_shards(sizes, num_servers)
    assert sorted(i for shard in shards for i in shard) == list(range(40))
    assert all(shard == sorted(shard) for shard in shards)
    loads = [sum(sizes[i] for i in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(sizes)
    assert split_into_shards([1, 1, 100, 1], 2) == [[2], [0, 1, 3]]
    assert split_into_shards([0] * num_servers, num_servers) == [
        [i] for i in range(num_servers)
    ]


@pytest.mark.slow
def test_connections_cause_no_warning(monkeypatch, retracing_warnings):
    """Each has functions of its own, traced once."""
    with ServerGroup(1, servers=6) as served:
        optimizer = served.optimizer(monkeypatch, 0, keras.optimizers.SGD(0.1))
        trainer = TracedTrainer(optimizer, [np.zeros([2])] * 6)
        trainer.step([np.ones([2])] * 6)
    assert not retracing_warnings


def test_more_servers_than_variables_raises(monkeypatch):
    with ServerGroup(1, servers=3) as served:
        optimizer = served.optimizer(monkeypatch, 0, keras.optimizers.SGD(0.1))
        with pytest.raises(
            ValueError, match="3 tasks of type `ps` in TF_CONFIG, and 2"
        ):
            optimizer.build([keras.Variable(np.zeros([2])) for _ in range(2)])


@pytest.mark.slow
def test_worker_refused_by_the_first_server_raises(monkeypatch):
    with ServerGroup(2, servers=2) as served:
        one, other = (
            TracedTrainer(
                served.optimizer(monkeypatch, i, keras.optimizers.SGD(0.1), "async"),
                [np.zeros([4, n]), np.zeros([2, 2])],
            )
            for i, n in enumerate([3, 2])
        )
        with leave_at_end(one, other):
            one.optimizer.join()
            with pytest.raises(RuntimeError, match=r"The server refuses worker 1"):
                other.optimizer.join()


@pytest.mark.slow
def test_initial_weights_of_all_shards_are_of_one_worker(monkeypatch):
    """Also if the workers join at the same time with different weights."""
    with ServerGroup(2, servers=3) as served:
        initial_weights = [some_weights(SHAPES, "float32", seed) for seed in range(2)]
        workers = [
            TracedTrainer(
                served.optimizer(monkeypatch, i, keras.optimizers.SGD(0.1)), weights
            )
            for i, weights in enumerate(initial_weights)
        ]
        with leave_at_end(*workers):
            run_together(*(worker.optimizer.join for worker in workers))
        names = [[v.name for v in model.variables] for model in served.models]
        assert names == [["w0"], ["w2"], ["w1", "w3"]]
        first = (
            initial_weights[0]
            if (served.weights()[0] == initial_weights[0][0]).all()
            else initial_weights[1]
        )
        for weights in (served.weights(), *(worker.weights() for worker in workers)):
            for actual, expected in zip(weights, first, strict=True):
                np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
def test_all_servers_skip_a_gradient_that_is_not_finite(monkeypatch):
    with ServerGroup(1, servers=2) as served:
        weights = some_weights(SHAPES, "float32")
        worker = TracedTrainer(
            served.optimizer(monkeypatch, 0, keras.optimizers.SGD(0.1)), weights
        )
        gradients = [np.ones_like(w) for w in weights]
        gradients[1][2] = np.nan
        with leave_at_end(worker):
            worker.step(gradients)
        assert worker.optimizer.stats.nonfinite == 1
        for actual, expected in zip(served.weights(), weights, strict=True):
            np.testing.assert_array_equal(actual, expected)
        assert not any(r.numpy().any() for r in worker.optimizer.residual)


@pytest.mark.slow
def test_worker_pushes_to_all_servers_before_it_waits(monkeypatch):
    with ServerGroup(2, servers=2) as served:
        weights = some_weights(SHAPES, "float32")
        workers = [
            TracedTrainer(
                served.optimizer(monkeypatch, i, keras.optimizers.SGD(0.1)), weights
            )
            for i in range(2)
        ]

        def has_pushed(server):
            return server.service.clock.completed[0] == 1

        def wait():
            deadline = time.monotonic() + 60
            while not all(map(has_pushed, served.servers)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            workers[1].step(weights)

        with leave_at_end(*workers):
            run_together(*(worker.optimizer.join for worker in workers))
            run_together(lambda: workers[0].step(weights), wait)
        assert [model.clock for model in served.models] == [1, 1]


def test_random_methods_use_each_servers_seed(monkeypatch):
    """A server and its workers draw from the server's part of the seed."""
    weights = some_weights(SHAPES, "float32")
    gradients = [np.random.default_rng(5).normal(size=s).astype("f") for s in SHAPES]
    with ServerGroup(1, servers=2) as served:
        settings = {"compressor": tf_dgc.compressors.RandomK(0.5)}
        rate = keras.optimizers.SGD(1.0)
        worker = TracedTrainer(
            served.optimizer(monkeypatch, 0, rate, **settings), weights
        )
        with leave_at_end(worker):
            worker.step(gradients)
        for i, after in enumerate(worker.weights()):
            residual = worker.optimizer.residual[i].numpy().reshape(after.shape)
            change = weights[i] - after
            np.testing.assert_allclose(change, gradients[i] - residual, atol=1e-5)
        assert worker.optimizer.residual[0].numpy().any()


def test_worker_of_another_cluster_is_refused():
    fake = Fake()
    assert fake.join(0, handed={**fake.handed, "shard": [1, 2]}) == (
        "The server refuses worker 0 because of its model spec: it is for server 1 of "
        "2, and according to its TF_CONFIG this is server 0 of 1. All workers must run "
        "the same version of tf_dgc, with the same model and settings."
    )


class FakeServer:
    """Stands in for a server, and records calls."""

    def __init__(self, name, calls, clock=0, needs_weights=(True,), starts=(True,)):
        self.name, self._calls, self._clock = name, calls, clock
        self._needs_weights, self._starts = iter(needs_weights), iter(starts)

    def join(self):
        self._calls.append(f"enter {self.name}")
        return next(self._needs_weights), self._clock

    def initialize(self):
        self._calls.append(f"give {self.name}")

    def start(self):
        self._calls.append(f"start {self.name}")
        return next(self._starts)

    def leave(self):
        self._calls.append(f"leave {self.name}")


def test_initial_weights_go_to_the_first_server_last():
    calls = []
    join_servers([FakeServer(name, calls) for name in "abc"])
    assert calls == [
        *("enter a", "enter b", "give b", "enter c", "give c", "give a"),
        *("start a", "start b", "start c"),
    ]


def test_others_wait_until_the_first_server_has_weights():
    calls = []
    join_servers([FakeServer(name, calls, needs_weights=[False]) for name in "ab"])
    assert calls == ["enter a", "start a", "enter b", "start b"]


def test_another_worker_sends_the_weights_if_the_first_is_gone():
    calls = []
    first = FakeServer("a", calls, needs_weights=[False, True], starts=[False, True])
    join_servers([first, FakeServer("b", calls, needs_weights=[False])])
    assert calls == [
        *("enter a", "start a"),
        *("enter a", "enter b", "give a", "start a", "start b"),
    ]


@pytest.mark.parametrize("missing", ["a", "b"])
def test_missing_checkpoint_of_one_server_raises(missing):
    calls = []
    servers = [
        FakeServer(name, calls, *((0, [True]) if name == missing else (7, [False])))
        for name in "ab"
    ]
    with pytest.raises(RuntimeError, match=f"tf_dgc: {missing} starts anew, but"):
        join_servers(servers)
    assert calls[-2:] == ["leave a", "leave b"]

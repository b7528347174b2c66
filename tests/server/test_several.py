"""Several servers: who keeps what, whose first weights they are, what is refused."""

import time

import keras
import numpy as np
import pytest
from served_loop import Fake
from serving import Served, Trained, leaving, run_together, some_weights

import tf_dgc
from tf_dgc.server.worker import join_servers, split_into_shards

SHAPES = [(40, 30), (5,), (20, 30), (30, 10)]


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_shards_are_balanced_and_none_is_empty(number):
    sizes = np.random.default_rng(0).integers(0, 1000, 40).tolist()
    found = split_into_shards(sizes, number)
    assert sorted(i for some in found for i in some) == list(range(40))
    assert all(some == sorted(some) for some in found)
    loads = [sum(sizes[i] for i in some) for some in found]
    assert max(loads) - min(loads) <= max(sizes)
    assert split_into_shards([1, 1, 100, 1], 2) == [[2], [0, 1, 3]]
    assert split_into_shards([0] * number, number) == [[i] for i in range(number)]


def test_more_servers_than_variables(monkeypatch):
    with Served(1, servers=3) as served:
        optimizer = served.optimizer(monkeypatch, 0, keras.optimizers.SGD(0.1))
        with pytest.raises(
            ValueError, match="3 tasks of type `ps` in TF_CONFIG, and 2"
        ):
            optimizer.build([keras.Variable(np.zeros([2])) for _ in range(2)])


def test_a_worker_that_the_first_one_refuses(monkeypatch):
    """It has nobody else to leave, and is told why."""
    with Served(2, servers=2) as served:
        one, other = (
            Trained(
                served.optimizer(monkeypatch, i, keras.optimizers.SGD(0.1), "async"),
                [np.zeros([4, n]), np.zeros([2, 2])],
            )
            for i, n in enumerate([3, 2])
        )
        with leaving(one, other):
            one.optimizer.join()
            with pytest.raises(RuntimeError, match=r"The server refuses worker 1"):
                other.optimizer.join()


def test_each_server_has_its_variables_and_the_first_weights_are_of_one_worker(
    monkeypatch,
):
    """Also where the workers join at the same time, with other weights each."""
    with Served(2, servers=3) as served:
        given = [some_weights(SHAPES, "float32", seed) for seed in range(2)]
        workers = [
            Trained(
                served.optimizer(monkeypatch, i, keras.optimizers.SGD(0.1)), weights
            )
            for i, weights in enumerate(given)
        ]
        with leaving(*workers):
            run_together(*(worker.optimizer.join for worker in workers))
        kept = [[v.name for v in model.variables] for model in served.models]
        assert kept == [["w0"], ["w2"], ["w1", "w3"]]
        first = given[0] if (served.weights()[0] == given[0][0]).all() else given[1]
        for weights in (served.weights(), *(worker.weights() for worker in workers)):
            for mine, theirs in zip(weights, first, strict=True):
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_what_is_not_finite_is_left_out_by_all_servers(monkeypatch):
    with Served(1, servers=2) as served:
        weights = some_weights(SHAPES, "float32")
        worker = Trained(
            served.optimizer(monkeypatch, 0, keras.optimizers.SGD(0.1)), weights
        )
        gradients = [np.ones_like(w) for w in weights]
        gradients[1][2] = np.nan
        with leaving(worker):
            worker.step(gradients)
        assert worker.optimizer.stats.nonfinite == 1
        for mine, theirs in zip(served.weights(), weights, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert not any(r.numpy().any() for r in worker.optimizer.residual)


@pytest.mark.slow
def test_a_worker_pushes_to_all_servers_before_it_waits_for_one(monkeypatch):
    with Served(2, servers=2) as served:
        weights = some_weights(SHAPES, "float32")
        workers = [
            Trained(
                served.optimizer(monkeypatch, i, keras.optimizers.SGD(0.1)), weights
            )
            for i in range(2)
        ]

        def has_come(server):
            return server.service.clock.completed[0] == 1

        def wait():
            deadline = time.monotonic() + 60
            while not all(map(has_come, served.servers)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            workers[1].step(weights)

        with leaving(*workers):
            run_together(*(worker.optimizer.join for worker in workers))
            run_together(lambda: workers[0].step(weights), wait)
        assert [model.clock for model in served.models] == [1, 1]


def test_methods_that_draw_at_random(monkeypatch):
    """A server draws by its own part of the seed, and so do workers for it."""
    weights = some_weights(SHAPES, "float32")
    gradients = [np.random.default_rng(5).normal(size=s).astype("f") for s in SHAPES]
    with Served(1, servers=2) as served:
        settings = {"compressor": tf_dgc.compressors.RandomK(0.5)}
        rate = keras.optimizers.SGD(1.0)
        worker = Trained(served.optimizer(monkeypatch, 0, rate, **settings), weights)
        with leaving(worker):
            worker.step(gradients)
        for i, after in enumerate(worker.weights()):
            left = worker.optimizer.residual[i].numpy().reshape(after.shape)
            moved = weights[i] - after
            np.testing.assert_allclose(moved, gradients[i] - left, atol=1e-5)
        assert worker.optimizer.residual[0].numpy().any()


def test_a_worker_of_another_cluster_is_refused():
    fake = Fake()
    assert fake.join(0, handed={**fake.handed, "shard": [1, 2]}) == (
        "The server refuses worker 0 because of its model spec: it is for server 1 of "
        "2, and according to its TF_CONFIG this is server 0 of 1. All workers must run "
        "the same version of tf_dgc, with the same model and settings."
    )


class Link:
    """Stands for a server; says what it is asked."""

    def __init__(self, name, said, clock=0, asks=(True,), starts=(True,)):
        self.name, self._said, self._clock = name, said, clock
        self._asks, self._starts = iter(asks), iter(starts)

    def join(self):
        self._said.append(f"enter {self.name}")
        return next(self._asks), self._clock

    def initialize(self):
        self._said.append(f"give {self.name}")

    def start(self):
        self._said.append(f"start {self.name}")
        return next(self._starts)

    def leave(self):
        self._said.append(f"leave {self.name}")


def test_who_gives_weights_gives_them_to_the_first_server_last():
    said = []
    join_servers([Link(name, said) for name in "abc"])
    assert said == [
        *("enter a", "enter b", "give b", "enter c", "give c", "give a"),
        *("start a", "start b", "start c"),
    ]


def test_others_wait_until_the_first_server_has_weights():
    said = []
    join_servers([Link(name, said, asks=[False]) for name in "ab"])
    assert said == ["enter a", "start a", "enter b", "start b"]


def test_who_was_to_give_them_is_gone_after_it_gave_some():
    said = []
    first = Link("a", said, asks=[False, True], starts=[False, True])
    join_servers([first, Link("b", said, asks=[False])])
    assert said == [
        *("enter a", "start a"),
        *("enter a", "enter b", "give a", "start a", "start b"),
    ]


@pytest.mark.parametrize("missing", ["a", "b"])
def test_one_without_its_checkpoint(missing):
    said = []
    links = [
        Link(name, said, *((0, [True]) if name == missing else (7, [False])))
        for name in "ab"
    ]
    with pytest.raises(RuntimeError, match=f"tf_dgc: {missing} starts anew, but"):
        join_servers(links)
    assert said[-2:] == ["leave a", "leave b"]

"""`collective="auto"`: its measurements and decisions."""

import functools
import types

import keras
import numpy as np
import overlaps
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients

import tf_dgc
from tf_dgc import collectives, compressors
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import Auto, LinkSpeeds, Rank, link_benchmark
from tf_dgc.collectives.algorithm import run_together
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import SendRecv
from tf_dgc.optimizers import autotune
from tf_dgc.steps.base import plan_step
from tf_dgc.testing import answer_all

LARGE = [
    TensorSpec("a", (1000, 1000), tf.float32, False),
    TensorSpec("b", (9,), tf.float32, True),
]
FAST = LinkSpeeds(1e-4, 1e-5, 1e-10, 1e-8, 1e-8, 1e-10)
SLOW = LinkSpeeds(1e-4, 1e-5, 1e-7, 1e-9, 1e-9, 1e-9)
FASTEST = LinkSpeeds(1e-6, 1e-6, 1e-12, 1e-6, 1e-6, 1e-12)
FAR = LinkSpeeds(1e-4, 5e-2, 1e-9, 1e-9, 1e-9, 1e-9)


START = 2e-3


class Network:
    """Simulated workers, each with a clock; the clocks run at different speeds."""

    def __init__(self, number, launch, latency, per_byte):
        self.costs = launch, latency, per_byte
        self.now = [0.0] * number

    def clock(self, worker):
        return lambda: self.now[worker] * (1 + worker / 100)

    def answer(self, requests):
        launch, latency, per_byte = self.costs
        seconds = START
        for message in requests[0]:
            value = message[0]
            hops = 1 if isinstance(message, SendRecv) else len(requests) - 1
            num_bytes = value.dtype.size * int(tf.size(value))
            seconds += launch + hops * (latency + num_bytes * per_byte)
        self.now = [now + seconds for now in self.now]
        return answer_all(requests)


@pytest.mark.parametrize("number", [2, 5])
@pytest.mark.parametrize(
    "costs", [(1e-3, 1e-4, 8e-8), (2e-4, 3e-2, 8e-7), (0, 1e-3, 0)]
)
def test_all_workers_get_the_same_speeds(number, costs):
    """They are close to the true ones of the slowest worker."""
    network = Network(number, *costs)
    steps = [
        autotune.probe_links(
            Rank(w, number), lambda w=w: [1e-9 * w, 2e-9, 3e-9], network.clock(w)
        )
        for w in range(number)
    ]
    first, *others = run_together(steps, network.answer)
    assert all(other == first for other in others)
    slowest = 1 + (number - 1) / 100
    launch, latency = costs[:2]
    if number == 2:  # both are paid in every message
        launch = latency = (launch + latency) / 2
    assert first.launch == pytest.approx(launch * slowest, rel=0.01, abs=1e-5)
    assert first.latency == pytest.approx(latency * slowest, rel=0.01, abs=1e-5)
    assert first.per_byte == pytest.approx(costs[2] * slowest, rel=0.02, abs=2e-10)
    assert first.per_byte > 0
    assert first.start == pytest.approx(START * slowest, abs=1e-5)
    assert first[3:6] == pytest.approx([1e-9 * (number - 1), 2e-9, 3e-9])
    if costs[1] < 1e-2:
        assert network.now[0] < 1


def test_local_speeds_are_plausible():
    merging, decoding, rounding = autotune.local_speeds()
    assert 1e-12 < rounding < 1e-6
    assert 1e-11 < decoding < 1e-4
    assert 1e-11 < merging < 1e-4


def decide(
    links, number=8, compressor=None, algorithm=None, merges=True, feedback=True
):
    return autotune.decide_algorithm(
        algorithm or Auto(),
        compressor or compressors.TopK(0.99),
        LARGE,
        feedback,
        merges,
        number,
        links,
    )


def test_fast_links_need_no_compression():
    tuned = decide(FAST)
    assert tuned.name.startswith("float16, ")
    assert isinstance(tuned.compressor, compressors.Float16)
    assert decide(FAST, algorithm=Auto(dense=False)).compressor.name == "top_k"
    assert decide(FAST, feedback=False, merges=False).compressor.name == "top_k"
    assert decide(FAST, compressor=compressors.TwoBit()).compressor.name == "two_bit"


def test_slow_links_make_algorithms_merge_entries():
    assert isinstance(decide(SLOW, 16).algorithm, collectives.OkTopK)
    assert decide(SLOW, 2).compressor.name == "top_k"
    plain = decide(SLOW, 16, merges=False).algorithm
    assert not plain.drops_entries


def test_regions_beyond_int32_are_not_chosen():
    """A schedule may need regions that are twice as large."""
    top_k = compressors.TopK(tf_dgc.schedules.WarmupSparsity(100))
    huge = [LARGE[0]._replace(shape=(1_200_000_000,))]
    tuned = autotune.decide_algorithm(
        Auto(dense=False), top_k, huge, True, True, 16, SLOW
    )
    assert isinstance(tuned.algorithm, collectives.GTopK)


def test_high_latency_makes_rounds_few():
    small = compressors.TopK(0.999)
    tuned = decide(FAR, 8, small, merges=False)
    assert isinstance(tuned.algorithm, collectives.Butterfly)


def test_the_simplest_of_the_fastest_algorithms_is_chosen():
    for links in (FAST, SLOW, FAR):
        for number in (2, 3, 8, 64):
            tuned = decide(links, number)
            enough = 1.05 * min(tuned.seconds.values())
            fastest = [name for name, s in tuned.seconds.items() if s <= enough]
            assert tuned.name == fastest[0]
            assert len(tuned.seconds) == 6 + 4


def test_a_butterfly_that_is_barely_faster_is_not_chosen():
    links = LinkSpeeds(1e-4, 1e-3, 8e-8)
    tuned = decide(links, 4, compressors.Float16())
    assert tuned.seconds["butterfly"] < tuned.seconds["ring"]
    assert tuned.name == "ring"


def test_a_method_with_unknown_sizes_uses_the_ring():
    methods = [method() for method in compressors.METHODS.values()]
    unknown = next(m for m in methods if m.bytes((1000, 1000), tf.float32) is None)
    tuned = decide(FAR, compressor=unknown)
    assert tuned.name == "ring"
    assert tuned.compressor is unknown


def test_request_sizes():
    top_k = autotune.request_sizes(compressors.TopK(0.99), LARGE, 4)
    assert top_k == [("entries", plan_step(LARGE, 0.99, 4).num_bytes)]
    schedule = tf_dgc.schedules.WarmupSparsity(100, 0.99)
    assert autotune.request_sizes(compressors.TopK(schedule), LARGE, 4) == top_k
    ((kind, num_bytes),) = autotune.request_sizes(compressors.TopK(0.5), LARGE, 64)
    assert (kind, num_bytes) == ("sum", 4 * (1 + 1_000_009))
    ((kind, _),) = autotune.request_sizes(compressors.TwoBit(), LARGE, 4)
    assert kind == "gather"
    halves = autotune.request_sizes(compressors.Float16(), LARGE, 4)
    assert halves == [("sum", 36), ("sum", 2_000_000)]
    assert autotune.request_sizes(compressors.Float16(), LARGE[:1], 4) == halves[1:]
    factors = autotune.request_sizes(compressors.PowerSGD(2), LARGE[:1], 4)
    assert factors == [("sum", 8000), ("sum", 8000)]


def test_sums_of_one_dtype_are_one_request():
    """There are as many requests as collectives after `rounds.merge`."""
    factors = autotune.request_sizes(compressors.PowerSGD(2), LARGE, 4)
    assert factors == [("sum", 36 + 8000), ("sum", 8000)]
    assert autotune.request_sizes(compressors.NoCompression(), LARGE, 4) == [
        ("sum", 4_000_036)
    ]
    coded = [LARGE[0], LARGE[1]._replace(uncompressed_dtype="bfloat16")]
    assert autotune.request_sizes(compressors.PowerSGD(2), coded, 4)[0] == ("sum", 36)
    positions, _ = autotune.request_sizes(compressors.ScaleCom(0.999), LARGE, 4)
    assert positions == ("sum", 36)


def test_a_single_process_measures_nothing(strategies, monkeypatch):
    def measure(*_):
        raise AssertionError

    monkeypatch.setattr(autotune, "probe_links", measure)
    weights = initial_weights("float32")
    gradients = make_gradients(2, 1, "float32")[0]
    pair = []
    for exchange in ("ring", "auto"):
        trainer = Trainer(
            strategies[2],
            lambda e=exchange: tf_dgc.DGCOptimizer("sgd", 0.9, collective=e),
            weights,
        )
        trainer.step(gradients)
        pair.append(trainer.weights())
    for weight, expected in zip(*pair, strict=True):
        np.testing.assert_array_equal(weight, expected)


def test_machines_are_found_before_buckets_are_chosen(strategies):
    """Replicas of one process are on the same host."""
    algorithm = collectives.Hierarchical()
    with strategies[3].scope():
        tuned = autotune.choose_algorithm(
            algorithm,
            compressors.Float16(),
            LARGE,
            False,
            False,
            True,
            strategies[3],
            Communicator(strategies[3], algorithm),
        )
    assert tuned.algorithm.groups == [[0, 1, 2]]


def test_several_workers_use_the_chosen_algorithm(strategies, monkeypatch):
    """Replicas stand for processes; links are measured once."""
    several = types.SimpleNamespace(is_multi_worker=lambda strategy: True)
    monkeypatch.setattr(autotune, "consensus", several)
    entries = {}
    for links in (FAST, SLOW):
        probes = []

        def run(strategy, steps, links=links, probes=probes):
            probes.append(steps)
            return links

        monkeypatch.setattr(link_benchmark, "run_probe", run)
        trainer = Trainer(
            strategies[3],
            lambda: tf_dgc.DGCOptimizer(
                keras.optimizers.SGD(0.1, momentum=0.5),
                0.9,
                collective="auto",
                min_compress_size=1,
            ),
            [np.zeros((300, 300), "float32"), np.zeros(7, "float32")],
        )
        rng = np.random.default_rng(0)
        for _ in range(2):
            gradients = [
                [rng.normal(size=s).astype("float32") for s in [(300, 300), (7,)]]
                for _ in range(3)
            ]
            trainer.step(gradients)
        assert len(probes) == 1
        for copies in trainer.replica_weights():
            for copy in copies[1:]:
                np.testing.assert_array_equal(copy, copies[0])
        stats = trainer.optimizer.stats
        entries[stats.collective.split(",")[0]] = stats.entries_per_step
        assert trainer.optimizer.get_config()["collective"] == "auto"
    name, *_ = [name for name in entries if name != "float16"]
    assert entries["float16"] == 90_007
    assert entries[name] == 9_007


@pytest.mark.parametrize("inner", ["Adam", "Nadam"])
def test_an_adam_without_compression_is_stock(strategies, monkeypatch, inner):
    """Up to rounding to float16; its state is transferred to a compressed run."""
    several = types.SimpleNamespace(is_multi_worker=lambda strategy: True)
    monkeypatch.setattr(autotune, "consensus", several)
    weights = initial_weights("float32")
    make_inner = functools.partial(getattr(keras.optimizers, inner), 0.125)
    trainers = {"alone": Trainer(strategies[2], make_inner, weights)}
    for name, links in (("float16", FASTEST), ("top_k", SLOW)):
        monkeypatch.setattr(link_benchmark, "run_probe", lambda *_, links=links: links)
        trainers[name] = Trainer(
            strategies[2],
            lambda: tf_dgc.DGCOptimizer(make_inner(), 0.97, collective="auto"),
            weights,
        )
        assert trainers[name].optimizer.state.tuned.compressor.name == name
    alone, dense, sparse = trainers.values()
    first, *others = make_gradients(2, 4, "float32")
    for gradients in (first, *others):
        alone.step(gradients)
        dense.step(gradients)
    assert not any(np.any(v.numpy()) for v in dense.optimizer.second_moment)
    for weight, stock in zip(dense.weights(), alone.weights(), strict=True):
        np.testing.assert_allclose(weight, stock, rtol=1e-3, atol=1e-2)
    sparse.load(dense.save())
    sparse.step(first)
    moment = sparse.optimizer.second_moment[0].numpy()
    assert np.all(moment > 0.98 * dense.optimizer.inner_optimizer._velocities[0])


def make_tuned_trainer(strategy, links, overlap, monkeypatch, **settings):
    """Return a trainer that is built with certain measured link speeds."""
    several = types.SimpleNamespace(is_multi_worker=lambda strategy: True)
    monkeypatch.setattr(autotune, "consensus", several)
    monkeypatch.setattr(link_benchmark, "run_probe", lambda strategy, steps: links)
    return Trainer(
        strategy,
        lambda: tf_dgc.CompressedOptimizer(
            keras.optimizers.SGD(0.5, momentum=0.5, **settings),
            "none",
            collective=overlaps.collective(overlap, "auto"),
        ),
        [np.zeros(shape, "float32") for shape in [(300, 300)] * 3 + [(7,)]],
    )


def test_overlap_is_used_if_it_is_faster(strategies, monkeypatch):
    """On slow links; not on fast ones, nor with `overlap=False`."""
    overlapped, never, unhelpful = (
        make_tuned_trainer(strategies[2], links, overlap, monkeypatch)
        for links, overlap in ((SLOW, None), (SLOW, False), (FAST, None))
    )
    name = {t: t.optimizer.stats.collective for t in (overlapped, never, unhelpful)}
    assert name[overlapped] == f"{name[never]}, 4 buckets"
    assert "buckets" not in name[unhelpful]
    assert overlapped.optimizer.collective == "auto"
    clipped = make_tuned_trainer(
        strategies[2], SLOW, None, monkeypatch, global_clipnorm=1.0
    )
    assert clipped.optimizer.stats.collective == name[never]

    steps = []
    run = Communicator.run
    monkeypatch.setattr(
        Communicator,
        "run",
        lambda self, step, *check: steps.append(self) or run(self, step, *check),
    )
    rng = np.random.default_rng(0)
    shapes = [v.shape for v in overlapped.variables]
    gradients = [[rng.normal(size=s).astype("float32") for s in shapes] for _ in "ab"]
    for trainer, expected in ((overlapped, 4), (never, 1)):
        steps.clear()
        trainer.step(gradients)
        assert len(steps) == 2 * expected  # one per replica and bucket
    for weight, expected in zip(overlapped.weights(), never.weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize("number", [2, 3])
def test_probe_runs_on_the_collectives_of_a_strategy(
    strategies, number, retracing_warnings
):
    """Replicas of one process stand for several; the last of three has no partner."""
    for _ in range(3):
        with strategies[number].scope():
            rank, *_ = link_benchmark.local_ranks(strategies[number])
            steps = autotune.probe_links(rank, lambda: [0.0, 0.0, 0.0])
            links = link_benchmark.run_probe(strategies[number], steps)
        assert 0 <= links.launch + links.latency < 1
        assert 0 <= links.per_byte < 1e-5
    assert not retracing_warnings


def test_config_round_trip(strategies):
    for exchange, text in (
        ("auto", "auto"),
        (Auto(dense=False), "Auto(dense=False, overlap=True)"),
    ):
        optimizer = tf_dgc.DGCOptimizer("sgd", collective=exchange)
        again = tf_dgc.DGCOptimizer.from_config(optimizer.get_config())
        assert str(again.collective) == text
        assert again.stats.collective == "auto"


@pytest.mark.parametrize(
    ("settings", "merges"),
    [
        ({}, True),
        ({"uncompressed_dtype": "bfloat16"}, False),
        ({"value_dtype": "bfloat16"}, False),
        ({"sparsity": 0.0}, False),
    ],
)
def test_settings_that_prevent_merging(settings, merges):
    optimizer = tf_dgc.DGCOptimizer("sgd", collective="auto", **settings)
    assert optimizer.settings.allows_merging is merges

"""Steps in buckets: they equal whole steps, and buckets do not wait for later ones."""

import keras
import numpy as np
import overlaps
import pytest
import tensorflow as tf
from harness import Trainer, damage_replies
from selection import rows

import tf_dgc
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import LinkSpeeds, Overlapped, Ring
from tf_dgc.collectives.overlapped import Overlap, OverlapMode
from tf_dgc.compressors import Float16, NoCompression, TopK
from tf_dgc.optimizers import autotune
from tf_dgc.optimizers.autotune import TunedExchange
from tf_dgc.steps import implementations, native

SHAPES = [(40, 50), (50,), (50, 30), (30,), (30, 20)]
LONG = 1e6  # seconds of a backward pass, so that each tensor is a bucket


def make_trainer(strategy, method, overlap, inner=None, traced=None, **settings):
    def make():
        sgd = inner() if inner else keras.optimizers.SGD(0.25, momentum=0.5)
        algorithm = settings.pop("collective", "ring")
        arguments = {
            "min_compress_size": 100,
            "collective": overlaps.collective(overlap, algorithm),
            **settings,
        }
        if method == "dgc":
            return tf_dgc.DGCOptimizer(sgd, **{"sparsity": 0.9, **arguments})
        return tf_dgc.CompressedOptimizer(sgd, method, **arguments)

    rng = np.random.default_rng(1)
    weights = [rng.normal(size=s).astype("float32") for s in SHAPES]
    return Trainer(strategy, make, weights, traced=traced)


def make_gradients(number, seed=0):
    """Return whole numbers, whose sums are exact."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(-8, 9, size=s).astype("float32") for s in SHAPES]
        for _ in range(number)
    ]


def assert_same(one, other, exact=True):
    state, expected = one.state(), other.state()
    for (path, values), others in zip(state.items(), expected.values(), strict=True):
        if path.endswith("counters"):
            continue  # buckets have more headers
        for a, b in zip(values, others, strict=True):
            if exact:
                np.testing.assert_array_equal(a, b, path)
            else:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=path)


def assert_overlaps(optimizer):
    assert optimizer.stats.collective.endswith(" buckets")


def assert_same_after(pair, number, steps):
    """Compare two trainers after the same steps; the second one overlaps."""
    for step in range(steps):
        for trainer in pair:
            trainer.step(make_gradients(number, step))
    assert_overlaps(pair[1].optimizer)
    assert_same(*pair)


METHODS = ["dgc", "float16", "power_sgd", "qsgd", "none", "tern_grad", "diana"]
PAIRS = [(m, n) for m in METHODS for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("method", "number"), rows(PAIRS, [("dgc", 3), ("power_sgd", 2), ("qsgd", 2)])
)
def test_buckets_give_the_same_bits(strategies, method, number):
    """With three workers, the ring adds up fractions in another order."""
    pair = [make_trainer(strategies[number], method, o) for o in (False, LONG)]
    for step in range(3):
        for trainer in pair:
            trainer.step(make_gradients(number, step))
    assert_same(*pair, exact=number < 3 or method in {"dgc", "none", "qsgd"})
    name = pair[1].optimizer.stats.collective
    assert name == ("ring" if number == 1 else "ring, 5 buckets")
    sent = [t.optimizer.stats.entries for t in pair]
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize("path", ["operations", "composed"])
def test_buckets_of_other_step_implementations(strategies, monkeypatch, path):
    monkeypatch.setattr(native, "is_available", lambda variables: False)
    if path == "composed":
        monkeypatch.setattr(
            implementations, "IMPLEMENTATIONS", implementations.IMPLEMENTATIONS[-1:]
        )
    pair = [make_trainer(strategies[2], "dgc", o) for o in (False, LONG)]
    assert_same_after(pair, 2, steps=2)


@pytest.mark.parametrize(
    "settings",
    rows(
        [
            {"collective": "gtopk"},
            {"collective": "butterfly"},
            {"collective": tf_dgc.collectives.Hierarchical([[0, 1], [2, 3]])},
            {"uncompressed_dtype": "bfloat16"},
            {"value_dtype": "mxint8", "diagnostics": tf_dgc.Diagnostics(check_every=1)},
        ],
        [],
    ),
)
def test_buckets_with_settings(strategies, settings):
    pair = [make_trainer(strategies[4], "dgc", o, **settings) for o in (False, LONG)]
    assert_same_after(pair, 4, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["adam", "sgd"])
def test_buckets_of_traced_steps_on_a_schedule(strategies, inner):
    """The first steps are dense, which is decided at run time; Keras updates."""
    schedule = tf_dgc.schedules.PiecewiseConstantSparsity([1], [0.0, 0.9])
    settings = {"sparsity": schedule, "corrections": tf_dgc.Corrections(adam=False)}
    make = {
        "adam": lambda: keras.optimizers.Adam(0.01),
        "sgd": lambda: keras.optimizers.SGD(0.25, 0.5, clipvalue=3.0, use_ema=True),
    }[inner]
    pair = [
        make_trainer(strategies[2], "dgc", o, make, traced=True, **settings)
        for o in (False, LONG)
    ]
    assert_same_after(pair, 2, steps=3)


@pytest.mark.parametrize(
    ("method", "traced"),
    rows(
        [(m, t) for m in METHODS for t in (False, True)],
        [("dgc", True), ("power_sgd", False), ("diana", False)],
    ),
)
def test_nonfinite_gradients_skip_the_step(strategies, method, traced):
    """Also in the last bucket, after all others were exchanged."""
    trainer = make_trainer(strategies[2], method, LONG, traced=traced)
    plain = make_trainer(strategies[2], method, LONG, traced=False)
    for step in range(2):
        trainer.step(make_gradients(2, step))
        plain.step(make_gradients(2, step))
    gradients = make_gradients(2, 7)
    gradients[1][0][3, 4] = np.nan
    trainer.step(gradients)
    assert_same(trainer, plain)
    stats = trainer.optimizer.stats
    assert (stats.steps, stats.nonfinite) == (3, 1)
    assert int(trainer.optimizer.iterations) == 2
    trainer.step(make_gradients(2, 3))
    plain.step(make_gradients(2, 3))
    assert_same(trainer, plain)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
def test_buckets_in_fit(strategies, scaled):
    """With several steps per execution, and in the branch of a loss scale."""
    x = np.random.default_rng(0).normal(size=(96, 20)).astype("float32")
    weights = []
    for overlap in (False, LONG):
        keras.utils.set_random_seed(0)
        with strategies[2].scope():
            layers = [keras.layers.Dense(n) for n in (40, 30, 1)]
            model = keras.Sequential([keras.Input((20,)), *layers])
            optimizer = tf_dgc.DGCOptimizer(
                keras.optimizers.SGD(0.1, 0.9),
                0.9,
                collective=overlaps.collective(overlap),
            )
            if scaled:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 8.0)
            model.compile(optimizer, "mse", steps_per_execution=1 if scaled else 3)
        model.fit(x, x[:, :1], batch_size=16, shuffle=False, verbose=0)
        if overlap and not scaled:
            assert_overlaps(optimizer)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("inner", [lambda: keras.optimizers.Ftrl(0.1), None])
def test_keras_skips_nonfinite_steps_too(strategies, inner):
    trainer = make_trainer(strategies[2], "float16", LONG, inner, traced=True)
    trainer.step(make_gradients(2))
    before = trainer.state()
    gradients = make_gradients(2)
    gradients[0][4][3, 4] = np.nan
    trainer.step(gradients)
    for path, copies in trainer.state().items():
        for now, then in zip(copies, before[path], strict=True):
            assert path.endswith("counters") or np.array_equal(now, then), path


def test_a_damaged_buffer_changes_no_weight(strategies, monkeypatch):
    trainer = make_trainer(strategies[2], "qsgd", LONG)
    before = trainer.weights()
    damage_replies(monkeypatch)
    with pytest.raises(tf.errors.InvalidArgumentError, match="The buffer of worker 0"):
        trainer.step(make_gradients(2))
    for now, then in zip(trainer.weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_missing_gradients_and_another_order(strategies):
    pair = [make_trainer(strategies[2], "dgc", o) for o in (False, LONG)]
    gradients = make_gradients(2)
    for worker in gradients:
        worker[2] = None
    for trainer in pair:
        trainer.variables.reverse()
        trainer.step([worker[::-1] for worker in gradients])
    assert_same(*pair)


def ancestors(operation):
    """Return the operations that an operation of a graph depends on, and itself."""
    visited, pending = set(), [operation]
    while pending:
        op = pending.pop()
        if op not in visited:
            visited.add(op)
            pending += [t.op for t in op.inputs] + list(op.control_inputs)
    return visited


@pytest.mark.parametrize(
    ("method", "all_workers_native"),
    rows(
        [(m, b) for m in METHODS for b in (True, False)],
        [("dgc", True), ("float16", True), ("qsgd", False)],
    ),
)
def test_dependencies_of_buckets(strategies, monkeypatch, method, all_workers_native):
    """A bucket's collectives depend on its gradients and on earlier buckets only.

    The native operations do not depend on another bucket's collectives.
    """
    if not all_workers_native:
        monkeypatch.setattr(native, "is_available", lambda variables: False)
        monkeypatch.setattr(
            implementations, "IMPLEMENTATIONS", implementations.IMPLEMENTATIONS[-1:]
        )
    trainer = make_trainer(strategies[2], method, LONG, traced=True)
    gradients = trainer.per_replica(make_gradients(2))
    graph = trainer._run.get_concrete_function(gradients).graph
    bucket_of = {t.op: i // 2 for i, t in enumerate(graph.inputs[: 2 * len(SHAPES)])}

    def waits_for(operation):
        return {bucket_of[op] for op in ancestors(operation) if op in bucket_of}

    last = len(SHAPES) - 1
    operations = graph.get_operations()
    collectives = [o for o in operations if o.type.startswith("Collective")]
    earliest = [min(waits_for(o)) for o in collectives]
    assert earliest[:2] == [last, last]
    assert sorted(earliest, reverse=True) == earliest
    assert set(earliest) == set(range(len(SHAPES)))
    encoders = [o for o in operations if o.type in {"TfDgcEncode", "TfDgcCompress"}]
    for operation in encoders:
        waited = [o for o in ancestors(operation) if o in collectives]
        assert waited or len(waits_for(operation)) == 1
        assert all(waits_for(operation) <= waits_for(o) or waited for o in waited)
    firsts = [o for o in encoders if not ancestors(o) & set(collectives)]
    assert len(firsts) == (2 * len(SHAPES) if encoders else 0)


LAYERS = [TensorSpec(f"{i}", (1000, 1000), tf.float32, False) for i in range(8)]
SLOW = LinkSpeeds(1e-3, 1e-4, 8e-8, rounding=1e-10)
FAST = LinkSpeeds(1e-3, 1e-4, 1e-11, rounding=1e-10)


def split(
    links,
    overlap_setting,
    compressor=None,
    tensors=LAYERS,
    number=4,
    num_state_variables=0,
):
    tuned = TunedExchange("ring", compressor or NoCompression(), Ring(), {}, links)
    modes = {
        False: Overlap(),
        None: Overlap(OverlapMode.IF_FASTER),
        True: Overlap(OverlapMode.ALWAYS),
    }
    overlap = modes.get(overlap_setting, Overlap(OverlapMode.ALWAYS, overlap_setting))
    return autotune.split_into_buckets(
        tuned, overlap, tensors, num_state_variables, number
    )


def test_number_of_buckets():
    assert split(SLOW, False).buckets == ()
    assert split(SLOW, True, number=1).buckets == ()
    assert split(None, None).buckets == ()
    tuned = split(SLOW, True)
    assert [i for bucket in tuned.buckets for i in bucket] == list(range(8))[::-1]
    assert tuned.name == f"ring, {len(tuned.buckets)} buckets"
    assert 2 < len(tuned.buckets) <= 8
    assert split(None, True).buckets
    assert split(SLOW, 1e-4).buckets == ()  # a short backward pass
    assert len(split(FAST, 0.1).buckets) == 8
    assert len(split(FAST, True).buckets) == 2


def test_buckets_are_used_if_faster():
    assert split(SLOW, None).buckets
    assert split(FAST, None).buckets == ()
    assert split(SLOW, None, Float16()).buckets
    assert split(SLOW, None, TopK(0.999), num_state_variables=2).buckets
    slow_memory = SLOW._replace(rounding=1e-8)
    assert split(slow_memory, None, TopK(0.999), num_state_variables=2).buckets == ()


def test_stats_name_the_algorithm_that_auto_chose(strategies, monkeypatch):
    tuned = TunedExchange(
        "butterfly", Float16(), tf_dgc.collectives.Butterfly(), {}, SLOW
    )
    monkeypatch.setattr(autotune, "choose_algorithm", lambda *_: tuned)
    monkeypatch.setattr(autotune, "_WORTH_IT", 10.0)
    one, other = (
        make_trainer(strategies[2], "none", overlap, collective="auto")
        for overlap in (False, LONG)
    )
    assert one.optimizer.stats.collective == "butterfly"
    assert other.optimizer.stats.collective == "butterfly, 5 buckets"


@pytest.mark.parametrize(
    "seconds", ["yes", True, 0, 0.0, -1.0, float("nan"), float("inf")]
)
def test_bad_overlap_settings_are_refused(seconds):
    with pytest.raises(ValueError, match="`backward_seconds` must be the seconds"):
        Overlapped(backward_seconds=seconds)
    with pytest.raises(ValueError, match="`algorithm` must be an algorithm between"):
        Overlapped(Overlapped())
    with pytest.raises(ValueError, match="`overlap` must be True or False"):
        tf_dgc.collectives.Auto(overlap=None)
    with pytest.raises(
        ValueError, match=r"nothing can overlap.*without `Overlapped`: Ring"
    ):
        tf_dgc.LocalOptimizer("sgd", 2, collective=Overlapped())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: tf_dgc.DGCOptimizer(
                keras.optimizers.SGD(0.1, global_clipnorm=1.0), collective=Overlapped()
            ),
            "Use `clipnorm`",
        ),
        (
            lambda: tf_dgc.CompressedOptimizer(
                "sgd", "global_top_k", collective=Overlapped()
            ),
            "sees all of them as one",
        ),
        (
            lambda: tf_dgc.DGCOptimizer(
                "adam", collective=Overlapped(backward_seconds=0.1)
            ),
            r"Corrections\(adam=False\)",
        ),
        (
            lambda: tf_dgc.DGCOptimizer(
                "sgd",
                collective=Overlapped(),
                diagnostics=tf_dgc.Diagnostics(track_staleness=True),
            ),
            r"track_staleness=True\)` counts",
        ),
    ],
)
def test_settings_that_exclude_overlap_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_global_clipnorm_turns_overlap_off(strategies):
    pair = [make_trainer(strategies[2], "none", o) for o in (False, LONG)]
    for trainer in pair:
        trainer.optimizer.global_clipnorm = 1.0
        trainer.step(make_gradients(2))
    assert_same(*pair)
    sent = [t.optimizer.stats.bytes for t in pair]
    assert sent[0] == sent[1]


def test_config_round_trip():
    gtopk = tf_dgc.collectives.GTopK()
    for collective in (
        "ring",
        Overlapped(),
        Overlapped("auto"),
        Overlapped(gtopk, 0.25),
        tf_dgc.collectives.Auto(overlap=False),
    ):
        optimizer = tf_dgc.DGCOptimizer("sgd", collective=collective)
        again = tf_dgc.DGCOptimizer.from_config(optimizer.get_config())
        assert repr(again.collective) == repr(collective)

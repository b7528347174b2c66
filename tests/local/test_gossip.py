"""Gossip against its papers' algorithms in NumPy, and where workers differ."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from contract import round_trip
from gossip_reference import DPSGD, Choco
from harness import Trainer, initial_weights, make_gradients, record_collectives
from selection import rows

import tf_dgc
from tf_dgc.collectives import Gossip

O = keras.optimizers  # noqa: E741
SHAPES = [(12, 10), (5,)]
RATE = 0.125
PATH = [[0.75, 0.25, 0], [0.25, 0.5, 0.25], [0, 0.25, 0.75]]
LOPSIDED = [[0.5, 0.3, 0.2], [0.3, 0.4, 0.3], [0.2, 0.3, 0.5]]
FORGETFUL = tf_dgc.compressors.ChunkedTopK(decay=0.5)
STEPS = 5


def gossip(graph="ring", step_size=None, period=1, **settings):
    exchange = Gossip(graph, step_size)
    return tf_dgc.LocalOptimizer(O.SGD(RATE), period, collective=exchange, **settings)


def make_trainer(strategy, dtype="float64", traced=None, **settings):
    weights = initial_weights(dtype, SHAPES)
    return Trainer(strategy, lambda: gossip(**settings), weights, traced=traced)


def flat(tensors):
    return np.concatenate([np.ravel(t) for t in tensors])


def each(trainer):
    """Return the flat weights of each worker."""
    return [flat(w) for w in zip(*trainer.replica_weights(), strict=True)]


def moves(gradients):
    """Return how far each worker moves by its own gradient."""
    return [-RATE * len(gradients) * flat(g) for g in gradients]


def assert_same(trainer, reference, rtol=1e-12):
    for mine, theirs in zip(each(trainer), reference.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=1e-13)


# --- against the papers ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "num_workers"),
    rows(
        [
            *itertools.product(["ring", "exponential", "torus"], [1, 2, 3, 4, 5, 8]),
            ("path", 3),
        ],
        [("torus", 4), ("ring", 5), ("path", 3)],
    ),
)
def test_d_psgd(strategies, graph, num_workers):
    graph = PATH if graph == "path" else graph
    trainer = make_trainer(strategies[num_workers], graph=graph)
    run = DPSGD(Gossip(graph).weights(num_workers), flat(trainer.weights()))
    for gradients in make_gradients(num_workers, STEPS, shapes=SHAPES):
        trainer.step(gradients)
        run.round(moves(gradients))
        assert_same(trainer, run)
    assert trainer.optimizer.stats.steps == STEPS


def largest(values, number):
    """Return what top-k of every tenth entry sends of the flat weights."""
    del number
    sent = values.copy()
    size = np.prod(SHAPES[0])
    kept = np.argsort(np.abs(values[:size]))[-12:]
    sent[:size] = 0
    sent[kept] = values[kept]
    return sent


@pytest.mark.parametrize(
    ("graph", "num_workers"),
    rows(
        [("ring", 4), ("torus", 2), (PATH, 3), ("torus", 8), ("ring", 5)],
        [(PATH, 3)],
    ),
)
def test_choco_sgd(strategies, graph, num_workers):
    method = tf_dgc.compressors.TopK(sparsity=0.9)
    settings = {"graph": graph, "step_size": 0.25, "compressor": method}
    trainer = make_trainer(strategies[num_workers], min_compress_size=100, **settings)
    (matrix,) = Gossip(graph).weights(num_workers)
    run = Choco(matrix, flat(trainer.weights()), 0.25, largest)
    for gradients in make_gradients(num_workers, STEPS, shapes=SHAPES):
        trainer.step(gradients)
        run.round(moves(gradients))
        assert_same(trainer, run)
    public = [flat(w) for w in trainer.local(trainer.optimizer.own_replica)]
    for worker, copy in enumerate(public):
        np.testing.assert_allclose(copy, run.copies[worker][worker], atol=1e-13)


@pytest.mark.parametrize("traced", rows([False, True], [False]))
@pytest.mark.parametrize("method", ["none", "uniform_8bit"])
def test_the_mean_is_conserved_and_workers_differ(strategies, method, traced):
    settings = {"step_size": 0.5, "compressor": method, "min_compress_size": 0}
    trainer = make_trainer(strategies[4], "float32", traced, period=2, **settings)
    mean = np.mean(each(trainer), axis=0)
    for gradients in make_gradients(4, 6, "float32", SHAPES):
        trainer.step(gradients)
        mean = mean + np.mean(moves(gradients), axis=0)
        np.testing.assert_allclose(np.mean(each(trainer), axis=0), mean, atol=2e-6)
        assert len({w.tobytes() for w in each(trainer)}) == 4
    trainer.optimizer.consensus()
    assert len({w.tobytes() for w in each(trainer)}) == 1
    np.testing.assert_allclose(each(trainer)[0], mean, atol=2e-6)


@pytest.mark.slow
def test_choco_without_moves_comes_to_a_consensus(strategies):
    method = tf_dgc.compressors.TopK(0.5)
    settings = {"step_size": 0.5, "compressor": method, "min_compress_size": 0}
    trainer = make_trainer(strategies[2], **settings)
    first, *_ = make_gradients(2, 1, shapes=SHAPES)
    trainer.step(first)
    still = [[np.zeros(s) for s in SHAPES] for _ in range(2)]

    def distance():
        return np.linalg.norm(np.std(each(trainer), axis=0))

    before = distance()
    for _ in range(12):
        trainer.step(still)
    assert distance() < 0.1 * before


# --- what is sent ---------------------------------------------------------------------


def test_bytes_are_those_that_go_to_neighbours(strategies, monkeypatch):
    sent = record_collectives(monkeypatch)
    trainer = make_trainer(strategies[4], period=2)
    for gradients in make_gradients(4, 4, shapes=SHAPES):
        trainer.step(gradients)
    assert not sent  # nothing is of all workers
    stats = trainer.optimizer.stats
    assert stats.collective == "gossip"
    assert stats.steps == 2
    assert stats.entries_per_step == 2 * 125
    assert 2 * 8 * 125 <= stats.bytes_per_step <= 2 * 8 * 130


# --- workers that broke ---------------------------------------------------------------


@pytest.mark.parametrize("method", ["none", tf_dgc.compressors.TopK(sparsity=0.9)])
def test_a_worker_that_is_not_finite_takes_what_others_know(strategies, method):
    settings = {"graph": LOPSIDED, "step_size": 0.5, "min_compress_size": 100}
    trainer = make_trainer(strategies[3], compressor=method, **settings)
    first = flat(trainer.weights())
    if method == "none":
        run = DPSGD([(np.eye(3) + LOPSIDED) / 2], first)
    else:
        run = Choco(np.array(LOPSIDED), first, 0.5, largest)
    *before, now, after = make_gradients(3, 4, shapes=SHAPES)
    for gradients in before:
        trainer.step(gradients)
        run.round(moves(gradients))
    weights = trainer.variables[0]
    copies = trainer.strategy.experimental_local_results(weights.value)
    copies[2].assign(np.full((12, 10), np.inf))
    trainer.step(now)
    run.round(moves(now), broken=2)
    assert_same(trainer, run)
    assert trainer.optimizer.resets == 1
    trainer.step(after)
    run.round(moves(after))
    assert_same(trainer, run)


@pytest.mark.parametrize("method", ["none", "uniform_8bit"])
def test_the_mean_of_workers_that_all_broke_is_nan(strategies, method):
    settings = {"step_size": 0.5, "compressor": method, "min_compress_size": 0}
    trainer = make_trainer(strategies[2], **settings)
    for gradients in make_gradients(2, 2, shapes=SHAPES):
        trainer.step(gradients)
    weights = trainer.variables[0]
    for copy in trainer.strategy.experimental_local_results(weights.value):
        copy.assign(np.full((12, 10), np.inf))
    with trainer.optimizer.consensus_weights("test"):
        assert np.all(np.isnan(each(trainer)))
    trainer.optimizer.consensus()
    assert np.all(np.isnan(each(trainer)))


# --- who looks ------------------------------------------------------------------------


@pytest.mark.slow
def test_who_looks_sees_the_mean_or_is_told(strategies, tmp_path):
    strategy = strategies[3]
    x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(gossip(PATH), "mse", run_eagerly=True)
    model.fit(x, x[:, :1], batch_size=12, epochs=1, verbose=0)

    def copies():
        local = strategy.experimental_local_results
        return [[c.numpy() for c in local(v.value)] for v in model.trainable_variables]

    before = copies()
    kernel, bias = (np.mean(c, axis=0) for c in before)
    assert not np.array_equal(before[0][0], before[0][1])
    loss = model.evaluate(x, x[:, :1], verbose=0)
    np.testing.assert_allclose(
        loss, np.mean((x @ kernel + bias - x[:, :1]) ** 2), rtol=1e-5
    )
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(np.stack(copies()[0]), np.stack(before[0]))
    plain = keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_allclose(plain.get_weights()[0], kernel, rtol=1e-6)
    for look in (lambda: model.predict(x, verbose=0), model.get_weights):
        with pytest.raises(ValueError, match=r"Call `optimizer.consensus\(\)`"):
            look()
    with strategy.scope():
        again = keras.models.load_model(tmp_path / "model.keras")
    for some, others in zip(again.trainable_variables, before, strict=True):
        local = strategy.experimental_local_results(some.value)
        np.testing.assert_array_equal([c.numpy() for c in local], others)
    alone = keras.models.load_model(tmp_path / "model.keras")  # on one worker
    np.testing.assert_allclose(alone.get_weights()[0], kernel, rtol=1e-6)
    model.optimizer.consensus()
    model.predict(x, verbose=0)


@pytest.mark.slow
def test_the_best_weights_are_the_mean_that_was_measured(strategies):
    x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        mixing = tf_dgc.collectives.Gossip(np.array([[0.9, 0.1], [0.1, 0.9]]))
        optimizer = tf_dgc.LocalOptimizer("sgd", 2, collective=mixing)
        model.compile(optimizer, "mse", run_eagerly=True)
    worst = keras.callbacks.EarlyStopping(
        mode="max", patience=1, restore_best_weights=True
    )
    data = {"validation_data": (x, x[:, :1]), "validation_batch_size": 24}
    history = model.fit(
        *(x, x[:, :1]), batch_size=12, epochs=3, callbacks=[worst], verbose=0, **data
    ).history["val_loss"]
    assert len(history) == 2
    found = model.evaluate(x, x[:, :1], batch_size=24, verbose=0)
    np.testing.assert_allclose(found, max(history), rtol=1e-6)


def test_drift_is_measured(strategies):
    trainer = make_trainer(
        strategies[3],
        graph=PATH,
        diagnostics=tf_dgc.Diagnostics(track_consensus_distance=True),
    )
    for gradients in make_gradients(3, 2, shapes=SHAPES):
        trainer.step(gradients)
    mean = np.mean(each(trainer), axis=0)
    expected = max(np.linalg.norm(w - mean) for w in each(trainer))
    np.testing.assert_allclose(trainer.optimizer.consensus_distance, expected, rtol=0.1)


# --- settings -------------------------------------------------------------------------


def test_config_round_trip():
    optimizer = gossip("torus", 0.5, compressor="top_k")
    again = round_trip(optimizer)
    assert again.get_config() == optimizer.get_config()
    assert repr(again) == repr(optimizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outer": "sgd"}, "Pass `outer=None`"),
        ({"compressor": "top_k"}, "needs a `step_size`"),
        *(
            ({"step_size": 0.5, "compressor": method}, f"{name}.*, which {why}")
            for method, name, why in [
                ("scale_com", "ScaleCom", "reads the residual"),
                ("signum", "Signum", "keeps a state that neighbors"),
                ("adacomp", "AdaComp", "reads the residual"),
                ("sign_sgd", "SignSGD", "is not the sum of what each"),
                ("qsgd", "QSGD", "has errors larger"),
                (FORGETFUL, "ChunkedTopK", "decays the residual"),
            ]
        ),
        (
            {"step_size": 0.5, "compressor": "top_k", "error_feedback": False},
            "TopK.*, which is used without error feedback",
        ),
        ({"graph": np.eye(2) / 2 + 0.25}, "a row and a column for each worker"),
    ],
)
def test_what_is_refused(strategies, settings, message):
    with strategies[3].scope(), pytest.raises(ValueError, match=message):
        gossip(**settings)


def test_a_state_of_all_tensors_is_refused(strategies):
    settings = {"step_size": 0.5, "compressor": "lgc"}
    with strategies[3].scope(), pytest.raises(ValueError, match=r"LGC.*, which "):
        gossip(**settings)


def test_others_do_not_take_it():
    with pytest.raises(ValueError, match=r"Use `tf_dgc.LocalOptimizer\(inner, 1"):
        tf_dgc.DGCOptimizer("sgd", collective=Gossip())


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2])
def test_goes_on_bit_for_bit(strategies, num_workers):
    settings = {"step_size": 0.5, "compressor": "top_k", "min_compress_size": 0}
    steps = make_gradients(num_workers, 6, "float32", SHAPES)
    whole, again = (
        make_trainer(strategies[num_workers], "float32", period=2, **settings)
        for _ in range(2)
    )
    for gradients in steps[:3]:
        whole.step(gradients)
    again.load(whole.save())
    for gradients in steps[3:]:
        whole.step(gradients)
        again.step(gradients)
    pairs = zip(whole.state().items(), again.state().values(), strict=True)
    for (path, copies), others in pairs:
        tf.nest.map_structure(
            lambda a, b, path=path: np.testing.assert_array_equal(a, b, path),
            copies,
            others,
        )


@pytest.mark.slow
def test_another_number_of_workers_goes_on_from_the_mean(strategies):
    settings = {"step_size": 0.5, "compressor": "top_k", "min_compress_size": 0}
    three, two = (make_trainer(strategies[n], **settings) for n in (3, 2))
    for gradients in make_gradients(3, 3, shapes=SHAPES):
        three.step(gradients)
    two.load(three.save())
    mean = np.mean(each(three), axis=0)
    np.testing.assert_allclose(each(two), [mean, mean], rtol=1e-12)
    for gradients in make_gradients(2, 2, shapes=SHAPES):
        two.step(gradients)
        mean = mean + np.mean(moves(gradients), axis=0)
    np.testing.assert_allclose(np.mean(each(two), axis=0), mean, rtol=1e-10)


def test_one_worker_goes_on_whatever_the_matrix(strategies):
    three, one = (make_trainer(strategies[n], graph=PATH) for n in (3, 1))
    for gradients in make_gradients(3, 2, shapes=SHAPES):
        three.step(gradients)
    one.load(three.save())
    mean = np.mean(each(three), axis=0)
    np.testing.assert_allclose(each(one), [mean], rtol=1e-12)
    (gradients,) = make_gradients(1, 1, shapes=SHAPES)
    one.step(gradients)
    np.testing.assert_allclose(each(one), [mean + moves(gradients)[0]], rtol=1e-12)


def test_another_graph_goes_on_from_a_consensus_only(strategies):
    settings = {"step_size": 0.5, "compressor": "top_k", "min_compress_size": 0}
    path, other, again = (
        make_trainer(strategies[3], "float32", graph=graph, **settings)
        for graph in (PATH, LOPSIDED, PATH)
    )
    for gradients in make_gradients(3, 2, "float32", SHAPES):
        path.step(gradients)
    saved = path.save()
    again.load(saved)
    np.testing.assert_array_equal(each(again), each(path))
    with pytest.raises(
        ValueError, match=r"(?s)call `optimizer.consensus\(\)`.*Received"
    ):
        other.load(saved)
    path.optimizer.consensus()
    other.load(path.save())
    np.testing.assert_array_equal(each(other), each(path))

"""Gossip against NumPy references of the papers, and models whose workers differ."""

import itertools

import keras
import numpy as np
import pytest
from gossip_checks import (
    PATH,
    RATE,
    SHAPES,
    disagreement,
    flat,
    local_updates,
    worker_weights,
)
from gossip_reference import DPSGD, Choco
from harness import Trainer, initial_weights, make_gradients, record_collectives
from local_checks import check_config_round_trip, check_equal_states
from selection import rows

import tf_dgc
from tf_dgc.collectives import Gossip

O = keras.optimizers  # noqa: E741
LOPSIDED = [[0.5, 0.3, 0.2], [0.3, 0.4, 0.3], [0.2, 0.3, 0.5]]
FORGETFUL = tf_dgc.compressors.ChunkedTopK(decay=0.5)
STEPS = 5


def make_optimizer(graph="ring", step_size=None, period=1, **settings):
    algorithm = Gossip(graph, step_size)
    return tf_dgc.LocalOptimizer(O.SGD(RATE), period, collective=algorithm, **settings)


def make_trainer(strategy, dtype="float64", traced=None, **settings):
    weights = initial_weights(dtype, SHAPES)
    return Trainer(strategy, lambda: make_optimizer(**settings), weights, traced=traced)


def check_weights(trainer, reference, rtol=1e-12):
    for actual, expected in zip(
        worker_weights(trainer), reference.weights, strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=1e-13)


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
        run.round(local_updates(gradients))
        check_weights(trainer, run)
    assert trainer.optimizer.stats.steps == STEPS


def largest(values, number):
    """Return flat weights with all but the top 12 of the first tensor set to 0."""
    del number
    sent = values.copy()
    size = np.prod(SHAPES[0])
    indices = np.argsort(np.abs(values[:size]))[-12:]
    sent[:size] = 0
    sent[indices] = values[indices]
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
        run.round(local_updates(gradients))
        check_weights(trainer, run)
    replicas = [flat(w) for w in trainer.local(trainer.optimizer.own_replica)]
    for worker, copy in enumerate(replicas):
        np.testing.assert_allclose(copy, run.copies[worker][worker], atol=1e-13)


@pytest.mark.parametrize("traced", rows([False, True], [False]))
@pytest.mark.parametrize("method", ["none", "uniform_8bit"])
def test_mean_is_conserved_and_workers_differ(strategies, method, traced):
    settings = {"step_size": 0.5, "compressor": method, "min_compress_size": 0}
    trainer = make_trainer(strategies[4], "float32", traced, period=2, **settings)
    mean = np.mean(worker_weights(trainer), axis=0)
    for gradients in make_gradients(4, 6, "float32", SHAPES):
        trainer.step(gradients)
        mean = mean + np.mean(local_updates(gradients), axis=0)
        np.testing.assert_allclose(
            np.mean(worker_weights(trainer), axis=0), mean, atol=2e-6
        )
        assert len({w.tobytes() for w in worker_weights(trainer)}) == 4
    trainer.optimizer.consensus()
    assert len({w.tobytes() for w in worker_weights(trainer)}) == 1
    np.testing.assert_allclose(worker_weights(trainer)[0], mean, atol=2e-6)


@pytest.mark.slow
def test_choco_reaches_a_consensus_with_zero_gradients(strategies):
    method = tf_dgc.compressors.TopK(0.5)
    settings = {"step_size": 0.5, "compressor": method, "min_compress_size": 0}
    trainer = make_trainer(strategies[2], **settings)
    first, *_ = make_gradients(2, 1, shapes=SHAPES)
    trainer.step(first)
    zeros = [[np.zeros(s) for s in SHAPES] for _ in range(2)]
    before = disagreement(trainer)
    for _ in range(12):
        trainer.step(zeros)
    assert disagreement(trainer) < 0.1 * before


# --- communication --------------------------------------------------------------------


def test_bytes_are_those_sent_to_neighbors(strategies, monkeypatch):
    sent = record_collectives(monkeypatch)
    trainer = make_trainer(strategies[4], period=2)
    for gradients in make_gradients(4, 4, shapes=SHAPES):
        trainer.step(gradients)
    assert not sent  # no collective of all workers
    stats = trainer.optimizer.stats
    assert stats.collective == "gossip"
    assert stats.steps == 2
    assert stats.entries_per_step == 2 * 125
    assert 2 * 8 * 125 <= stats.bytes_per_step <= 2 * 8 * 130


# --- nonfinite workers ----------------------------------------------------------------


@pytest.mark.parametrize("method", ["none", tf_dgc.compressors.TopK(sparsity=0.9)])
def test_nonfinite_worker_restarts_from_its_replica(strategies, method):
    settings = {"graph": LOPSIDED, "step_size": 0.5, "min_compress_size": 100}
    trainer = make_trainer(strategies[3], compressor=method, **settings)
    first = flat(trainer.weights())
    if method == "none":
        run = DPSGD([(np.eye(3) + LOPSIDED) / 2], first)
    else:
        run = Choco(np.array(LOPSIDED), first, 0.5, largest)
    *before, during, after = make_gradients(3, 4, shapes=SHAPES)
    for gradients in before:
        trainer.step(gradients)
        run.round(local_updates(gradients))
    weights = trainer.variables[0]
    copies = trainer.strategy.experimental_local_results(weights.value)
    copies[2].assign(np.full((12, 10), np.inf))
    trainer.step(during)
    run.round(local_updates(during), broken=2)
    check_weights(trainer, run)
    assert trainer.optimizer.resets == 1
    trainer.step(after)
    run.round(local_updates(after))
    check_weights(trainer, run)


@pytest.mark.parametrize("method", ["none", "uniform_8bit"])
def test_mean_of_nonfinite_workers_is_nan(strategies, method):
    settings = {"step_size": 0.5, "compressor": method, "min_compress_size": 0}
    trainer = make_trainer(strategies[2], **settings)
    for gradients in make_gradients(2, 2, shapes=SHAPES):
        trainer.step(gradients)
    weights = trainer.variables[0]
    for copy in trainer.strategy.experimental_local_results(weights.value):
        copy.assign(np.full((12, 10), np.inf))
    with trainer.optimizer.consensus_weights("test"):
        assert np.all(np.isnan(worker_weights(trainer)))
    trainer.optimizer.consensus()
    assert np.all(np.isnan(worker_weights(trainer)))


# --- evaluation and saving ------------------------------------------------------------


@pytest.mark.slow
def test_access_to_weights_gives_the_mean_or_raises(strategies, tmp_path):
    strategy = strategies[3]
    x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(make_optimizer(PATH), "mse", run_eagerly=True)
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
    for access in (lambda: model.predict(x, verbose=0), model.get_weights):
        with pytest.raises(ValueError, match=r"Call `optimizer.consensus\(\)`"):
            access()
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    for variable, expected in zip(loaded.trainable_variables, before, strict=True):
        local = strategy.experimental_local_results(variable.value)
        np.testing.assert_array_equal([c.numpy() for c in local], expected)
    single = keras.models.load_model(tmp_path / "model.keras")  # on one worker
    np.testing.assert_allclose(single.get_weights()[0], kernel, rtol=1e-6)
    model.optimizer.consensus()
    model.predict(x, verbose=0)


@pytest.mark.slow
def test_early_stopping_restores_the_evaluated_mean(strategies):
    x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    with strategies[2].scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        algorithm = tf_dgc.collectives.Gossip(np.array([[0.9, 0.1], [0.1, 0.9]]))
        optimizer = tf_dgc.LocalOptimizer("sgd", 2, collective=algorithm)
        model.compile(optimizer, "mse", run_eagerly=True)
    early_stopping = keras.callbacks.EarlyStopping(
        mode="max", patience=1, restore_best_weights=True
    )
    history = model.fit(
        x,
        x[:, :1],
        batch_size=12,
        epochs=3,
        validation_data=(x, x[:, :1]),
        validation_batch_size=24,
        callbacks=[early_stopping],
        verbose=0,
    ).history["val_loss"]
    assert len(history) == 2
    loss = model.evaluate(x, x[:, :1], batch_size=24, verbose=0)
    np.testing.assert_allclose(loss, max(history), rtol=1e-6)


def test_consensus_distance(strategies):
    trainer = make_trainer(
        strategies[3],
        graph=PATH,
        diagnostics=tf_dgc.Diagnostics(track_consensus_distance=True),
    )
    for gradients in make_gradients(3, 2, shapes=SHAPES):
        trainer.step(gradients)
    mean = np.mean(worker_weights(trainer), axis=0)
    expected = max(np.linalg.norm(w - mean) for w in worker_weights(trainer))
    np.testing.assert_allclose(trainer.optimizer.consensus_distance, expected, rtol=0.1)


# --- settings -------------------------------------------------------------------------


def test_config_round_trip():
    check_config_round_trip(make_optimizer("torus", 0.5, compressor="top_k"))


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
def test_invalid_settings_raise(strategies, settings, message):
    with strategies[3].scope(), pytest.raises(ValueError, match=message):
        make_optimizer(**settings)


def test_state_of_the_entire_model_raises(strategies):
    settings = {"step_size": 0.5, "compressor": "lgc"}
    with strategies[3].scope(), pytest.raises(ValueError, match=r"LGC.*, which "):
        make_optimizer(**settings)


def test_other_optimizers_refuse_gossip():
    with pytest.raises(ValueError, match=r"Use `tf_dgc.LocalOptimizer\(inner, 1"):
        tf_dgc.DGCOptimizer("sgd", collective=Gossip())


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2])
def test_resumes_bit_for_bit(strategies, num_workers):
    settings = {"step_size": 0.5, "compressor": "top_k", "min_compress_size": 0}
    steps = make_gradients(num_workers, 6, "float32", SHAPES)
    trainer, resumed = (
        make_trainer(strategies[num_workers], "float32", period=2, **settings)
        for _ in range(2)
    )
    for gradients in steps[:3]:
        trainer.step(gradients)
    resumed.load(trainer.save())
    for gradients in steps[3:]:
        trainer.step(gradients)
        resumed.step(gradients)
    check_equal_states(trainer, resumed)


@pytest.mark.slow
def test_another_number_of_workers_resumes_from_the_mean(strategies):
    settings = {"step_size": 0.5, "compressor": "top_k", "min_compress_size": 0}
    three, two = (make_trainer(strategies[n], **settings) for n in (3, 2))
    for gradients in make_gradients(3, 3, shapes=SHAPES):
        three.step(gradients)
    two.load(three.save())
    mean = np.mean(worker_weights(three), axis=0)
    np.testing.assert_allclose(worker_weights(two), [mean, mean], rtol=1e-12)
    for gradients in make_gradients(2, 2, shapes=SHAPES):
        two.step(gradients)
        mean = mean + np.mean(local_updates(gradients), axis=0)
    np.testing.assert_allclose(np.mean(worker_weights(two), axis=0), mean, rtol=1e-10)


def test_one_worker_resumes_with_any_matrix(strategies):
    three, one = (make_trainer(strategies[n], graph=PATH) for n in (3, 1))
    for gradients in make_gradients(3, 2, shapes=SHAPES):
        three.step(gradients)
    one.load(three.save())
    mean = np.mean(worker_weights(three), axis=0)
    np.testing.assert_allclose(worker_weights(one), [mean], rtol=1e-12)
    (gradients,) = make_gradients(1, 1, shapes=SHAPES)
    one.step(gradients)
    np.testing.assert_allclose(
        worker_weights(one), [mean + local_updates(gradients)[0]], rtol=1e-12
    )


def test_another_graph_resumes_only_from_a_consensus(strategies):
    settings = {"step_size": 0.5, "compressor": "top_k", "min_compress_size": 0}
    trainer, other_graph, same_graph = (
        make_trainer(strategies[3], "float32", graph=graph, **settings)
        for graph in (PATH, LOPSIDED, PATH)
    )
    for gradients in make_gradients(3, 2, "float32", SHAPES):
        trainer.step(gradients)
    saved = trainer.save()
    same_graph.load(saved)
    np.testing.assert_array_equal(worker_weights(same_graph), worker_weights(trainer))
    with pytest.raises(
        ValueError, match=r"(?s)call `optimizer.consensus\(\)`.*Received"
    ):
        other_graph.load(saved)
    trainer.optimizer.consensus()
    other_graph.load(trainer.save())
    np.testing.assert_array_equal(worker_weights(other_graph), worker_weights(trainer))

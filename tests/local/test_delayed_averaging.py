"""Delayed averaging: rounds against NumPy, and means computed in the background."""

import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from delayed_reference import DelayedRun
from harness import Trainer, initial_weights, make_gradients
from local_checks import (
    check_config_round_trip,
    check_loads_the_mean,
    check_resumes,
    fit,
    make_model,
)
from local_reference import AdamW, Momentum
from selection import rows

import tf_dgc
from tf_dgc.local.streaming import split_fragments
from tf_dgc.multiworker.worker_variables import ReplicaCopies
from tf_dgc.schedules import PiecewiseConstantPeriod

O = keras.optimizers  # noqa: E741
SHAPES = [(12, 10), (5,), (6, 7)]
RATE = 0.125  # exact in float32
TWO_FRAGMENTS = [[0], [1, 2]]
SLOW = pytest.mark.slow


def make_optimizer(period=3, inner=None, delay=1, **settings):
    inner = inner or O.SGD(RATE)
    return tf_dgc.LocalOptimizer(inner, period, delay=delay, **settings)


def make_trainer(strategy, create=make_optimizer, dtype="float64", **settings):
    return Trainer(strategy, create, initial_weights(dtype, SHAPES), **settings)


def make_steps(num_workers, steps, dtype="float64"):
    return make_gradients(num_workers, steps, dtype, SHAPES)


def largest(values):
    """Return what top-k sends: the largest entry of a tensor, or a whole bias."""
    if values.ndim < 2:
        return values
    flat = np.zeros(values.size)
    index = np.argmax(np.abs(values))
    flat[index] = values.reshape(-1)[index]
    return flat.reshape(values.shape)


def make_exact_adam():
    """Return an AdamW whose settings are exact in float32."""
    betas = {"beta_1": 0.75, "beta_2": 0.875, "epsilon": 2**-20}
    return O.AdamW(RATE, weight_decay=0.25, **betas)


ADAM = AdamW(RATE, 0.25, 0.75, 0.875, 2**-20)
NESTEROV = Momentum(0.5, 0.75, nesterov=True)
ONE_FRAGMENT = [[0, 1, 2]]
CASES = {
    "soon": (lambda: make_optimizer(3), DelayedRun(Momentum(RATE), 3, 1, ONE_FRAGMENT)),
    "a round later": (
        lambda: make_optimizer(2, O.SGD(RATE, momentum=0.5), delay=2),
        DelayedRun(Momentum(RATE, 0.5), 2, 2, ONE_FRAGMENT),
    ),
    "every step": (
        lambda: make_optimizer(1, delay=1),
        DelayedRun(Momentum(RATE), 1, 1, ONE_FRAGMENT),
    ),
    "diloco": (
        lambda: make_optimizer(
            3,
            make_exact_adam(),
            delay=3,
            outer=O.SGD(0.5, momentum=0.75, nesterov=True),
        ),
        DelayedRun(ADAM, 3, 3, ONE_FRAGMENT, NESTEROV),
    ),
    "fragments": (
        lambda: make_optimizer(
            4, delay=1, fragments=2, outer=O.SGD(0.5, momentum=0.75, nesterov=True)
        ),
        DelayedRun(Momentum(RATE), 4, 1, TWO_FRAGMENTS, NESTEROV),
    ),
    "delayed fragments": (
        lambda: make_optimizer(4, delay=2, fragments=2, outer=make_exact_adam()),
        DelayedRun(Momentum(RATE), 4, 2, TWO_FRAGMENTS, ADAM),
    ),
    "schedule": (
        lambda: make_optimizer(PiecewiseConstantPeriod([2], [1, 4]), delay=3),
        DelayedRun(Momentum(RATE), {1, 2, 6, 10}, 3, ONE_FRAGMENT),
    ),
    "compressed": (
        lambda: make_optimizer(2, delay=2, compressor="top_k", min_compress_size=0),
        DelayedRun(Momentum(RATE), 2, 2, ONE_FRAGMENT, compress=largest),
    ),
}


@pytest.mark.parametrize(
    ("name", "num_workers"),
    rows(
        itertools.product(CASES, [1, 2, 4]),
        [("delayed fragments", 2), ("compressed", 2), ("diloco", 1)],
    ),
)
def test_rounds_equal_the_reference(strategies, name, num_workers):
    create, reference = CASES[name]
    trainer = make_trainer(strategies[num_workers], create)
    run = reference.start(initial_weights(shapes=SHAPES), num_workers)
    for gradients in make_steps(num_workers, 9):
        trainer.step(gradients)
        run.step(gradients)
        compare(trainer, run)
    trainer.optimizer.background.finish()
    assert trainer.optimizer.stats.steps == run.rounds


def compare(trainer, run):
    for i, copies in enumerate(trainer.replica_weights()):
        for copy, weights in zip(copies, run.weights, strict=True):
            np.testing.assert_allclose(copy, weights[i], rtol=1e-11, atol=1e-12)
    for anchor, expected in zip(trainer.optimizer.anchor, run.anchor, strict=True):
        np.testing.assert_allclose(anchor.numpy(), expected, rtol=1e-11, atol=1e-12)


def test_fragments_are_balanced():
    assert split_fragments([3, 9, 1, 5, 4], 2) == [[0, 1], [2, 3, 4]]
    assert split_fragments([7, 7, 7], 3) == [[0], [1], [2]]
    assert split_fragments([0, 0], 2) == [[0], [1]]


# --- pending means --------------------------------------------------------------------


@pytest.mark.slow
def test_leading_worker_alternates_in_each_fragment(strategies):
    """Alternating by the number of a round would give each fragment one leader only."""
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.LocalOptimizer(
            keras.optimizers.SGD(1.0), 2, delay=1, fragments=2, min_compress_size=0,
            compressor=tf_dgc.compressors.ScaleCom(0.5),
        ),
        [np.zeros((4, 10), "float32") for _ in range(2)],
    )  # fmt: skip
    halves = np.zeros((2, 4, 10), "float32")
    halves[0, :2] = halves[1, 2:] = 1.0  # each worker has one half
    for _ in range(10):
        trainer.step([[half, half] for half in halves])
    trainer.optimizer.background.finish()
    for anchor in trainer.optimizer.anchor:
        assert (anchor.numpy() != 0).all()


@pytest.mark.parametrize("num_workers", rows([1, 2], [2]))
def test_consensus_waits_for_a_pending_mean(strategies, num_workers):
    create, reference = CASES["delayed fragments"]
    trainer = make_trainer(strategies[num_workers], create)
    run = reference.start(initial_weights(shapes=SHAPES), num_workers)
    for gradients in make_steps(num_workers, 3):
        trainer.step(gradients)
        run.step(gradients)
    trainer.optimizer.consensus()
    trainer.optimizer.consensus()  # nothing is left to average
    run.consensus()
    compare(trainer, run)
    for copies in trainer.replica_weights():
        assert len({copy.tobytes() for copy in copies}) == 1
    trainer.step(make_steps(num_workers, 1)[0])
    assert trainer.optimizer.stats.steps == run.rounds


def make_compressed_adam():
    return make_optimizer(
        2,
        O.Adam(RATE),
        delay=2,
        outer=O.SGD(0.5, momentum=0.5),
        compressor="top_k",
        min_compress_size=0,
    )


@pytest.mark.parametrize("num_workers", rows([1, 2], [2]))
def test_resumes_bit_for_bit_with_a_pending_mean(strategies, num_workers):
    steps = make_steps(num_workers, 6, "float32")
    trainer, resumed = (
        make_trainer(strategies[num_workers], make_compressed_adam, "float32")
        for _ in range(2)
    )
    for gradients in steps[:3]:
        trainer.step(gradients)
        resumed.step(gradients[::-1])  # has another pending mean
    check_resumes(trainer, resumed, steps[3:])


@pytest.mark.slow
def test_another_number_of_workers_resumes_from_the_mean(strategies):
    two = make_trainer(strategies[2], lambda: make_optimizer(2, delay=2))
    for gradients in make_steps(2, 3):
        two.step(gradients)
    one = make_trainer(strategies[1], lambda: make_optimizer(2, delay=2))
    check_loads_the_mean(one, two, rtol=1e-12)
    for trainer in (one, two):
        trainer.optimizer.consensus()
    for actual, expected in zip(one.weights(), two.weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_set_weights_discard_a_pending_mean(strategies):
    trainer = make_trainer(strategies[2], lambda: make_optimizer(2, delay=2))
    discarded, steps = make_steps(2, 3), make_steps(2, 5)
    for gradients in discarded:
        trainer.step(gradients)
    trainer.optimizer.restart_round()
    for variable, value in zip(
        trainer.variables, initial_weights(shapes=SHAPES), strict=True
    ):
        for copy in ReplicaCopies(trainer.strategy, variable.value).local:
            copy.assign(value)
    run = DelayedRun(Momentum(RATE), 2, 2, ONE_FRAGMENT)
    run = run.start(initial_weights(shapes=SHAPES), 2)
    for gradients in steps:
        trainer.step(gradients)
        run.step(gradients)
        compare(trainer, run)


def test_worker_with_nonfinite_weights_restarts_from_the_anchor(strategies):
    trainer = make_trainer(
        strategies[2], lambda: make_optimizer(2, O.SGD(16.0), delay=1)
    )
    steps = make_steps(2, 5)
    for step in steps[:2]:
        step[1][1][:] = 8e307  # overflows where it is applied
    for gradients in steps:
        trainer.step(gradients)
    trainer.optimizer.background.finish()
    for copies in trainer.replica_weights():
        assert all(np.all(np.isfinite(copy)) for copy in copies)
    assert trainer.optimizer.resets == 1
    assert trainer.optimizer.stats.nonfinite == 1
    trainer.optimizer.consensus()
    for copies in trainer.replica_weights():
        assert len({copy.tobytes() for copy in copies}) == 1


@pytest.mark.parametrize("traced", rows([True, False], [False]))
def test_error_in_the_background_ends_the_next_step(strategies, traced):
    trainer = make_trainer(
        strategies[2], lambda: make_optimizer(2, delay=2), traced=traced
    )
    gradients, *_ = make_steps(2, 1)
    background = trainer.optimizer.background

    def fail(*_):
        raise ValueError("it is 'broken'")

    background.work = fail
    trainer.step(gradients)
    trainer.step(gradients)
    message = "in the background ended with ValueError: it is `broken`"
    with pytest.raises(RuntimeError, match=message):
        background.finish()
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        trainer.step(gradients)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        trainer.optimizer.consensus()


@pytest.mark.slow
def test_each_worker_has_its_own_loss_scale(strategies):
    def make_scaled_optimizer():
        return O.LossScaleOptimizer(make_optimizer(2, delay=1), initial_scale=16.0)

    tf_dgc.prepare(strategies[2])
    trainer = make_trainer(strategies[2], make_scaled_optimizer, "float32", traced=True)
    for step, gradients in enumerate(make_steps(2, 5, "float32")):
        if step == 1:
            gradients[1][0][0, 0] = np.inf
        trainer.step(gradients)
    inner = trainer.optimizer.inner_optimizer
    inner.background.finish()
    assert inner.stats.steps == 2
    assert inner.skipped == 1
    (one,), (other,) = trainer.local([trainer.optimizer.dynamic_scale])
    assert (float(one), float(other)) == (16.0, 8.0)


def test_xla_raises(strategies):
    trainer = make_trainer(strategies[1], lambda: make_optimizer(2))
    gradients = [tf.constant(g) for g in make_steps(1, 1)[0][0]]

    @tf.function(jit_compile=True)
    def step():
        trainer.optimizer.apply(gradients, trainer.variables)

    with pytest.raises(ValueError, match="Pass `jit_compile=False`"):
        step()


@pytest.mark.slow
def test_differing_anchors_raise(strategies):
    tf_dgc.prepare(strategies[2])
    trainer = make_trainer(
        strategies[2],
        lambda: make_optimizer(1, diagnostics=tf_dgc.Diagnostics(check_every=1)),
    )
    gradients, *_ = make_steps(2, 1)
    trainer.step(gradients)
    trainer.optimizer.background.finish()
    second_copy = ReplicaCopies(
        trainer.strategy, trainer.optimizer.anchor[1].value
    ).local[1]
    trainer.step(gradients)
    trainer.optimizer.background.finish()
    second_copy.assign(second_copy + 1)
    with pytest.raises((RuntimeError, tf.errors.OpError), match="w1_anchor"):
        for _ in range(3):
            trainer.step(gradients)
            trainer.optimizer.background.finish()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_model_is_trained_and_saved(strategies, num_workers, tmp_path):
    def state(model):
        model.optimizer.background.finish()
        local_values = strategies[num_workers].experimental_local_results
        variables = [*model.variables, *model.optimizer.variables]
        return [[c.numpy() for c in local_values(v.value)] for v in variables]

    with strategies[num_workers].scope():
        optimizer = make_optimizer(
            4,
            O.Adam(RATE),
            delay=2,
            fragments=2,
            diagnostics=tf_dgc.Diagnostics(track_consensus_distance=True),
        )
        model = make_model(optimizer, steps_per_execution=2)
        fit(model)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        for m in (model, loaded):
            fit(m)
    assert model.optimizer.stats.steps == 5
    assert num_workers == 1 or model.optimizer.consensus_distance > 0
    for copies, expected_copies in zip(state(loaded), state(model), strict=True):
        for copy, expected in zip(copies, expected_copies, strict=True):
            np.testing.assert_array_equal(copy, expected)


# --- settings -------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"period": 6, "fragments": 3, "delay": 2}])
def test_config_round_trip(settings):
    optimizer = make_optimizer(**settings)
    check_config_round_trip(optimizer)
    assert "delay=" in repr(optimizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delay": -1}, "`delay` must be a whole number of steps"),
        ({"delay": 1.5}, "`delay` must be a whole number of steps"),
        ({"delay": 4}, "at most `period / fragments`, here 3"),
        ({"fragments": 0}, "`fragments` must be a whole number of fragments"),
        ({"fragments": 2}, "that `fragments` divides"),
        ({"fragments": 3, "delay": 2}, "at most `period / fragments`, here 1"),
        ({"fragments": 3, "delay": 0}, "so pass a `delay`"),
        ({"period": lambda step: 4, "fragments": 2}, "that `fragments` divides"),
        (
            {"fragments": 3, "compressor": "global_top_k"},
            "cannot be exchanged in fragments",
        ),
        (
            {"collective": tf_dgc.collectives.Gossip("ring")},
            "there is no mean to delay",
        ),
        (
            {"fragments": 3, "outer": keras.optimizers.SGD(1.0, use_ema=True)},
            "Use `fragments=1`, or no `use_ema`",
        ),
        (
            {"fragments": 3, "outer": O.serialize(O.SGD(1.0, use_ema=True))},
            "Use `fragments=1`, or no `use_ema`",
        ),
        (
            {"fragments": 3, "outer": O.SGD(1.0, global_clipnorm=1.0)},
            "norm of all tensors",
        ),
        ({"fragments": 3, "outer": "nadam"}, "once for each fragment"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(**settings)


def test_more_fragments_than_variables_raise(strategies):
    with pytest.raises(ValueError, match="Each of `fragments` needs a variable"):
        make_trainer(strategies[1], lambda: make_optimizer(4, fragments=4))


def test_state_with_other_fragments_raises(strategies):
    saved, other = (
        make_trainer(strategies[1], lambda n=n: make_optimizer(4, delay=1, fragments=n))
        for n in (2, 1)
    )
    store = {}
    saved.optimizer.save_own_variables(store)
    with pytest.raises(ValueError, match="saved LocalOptimizer has `fragments=2`"):
        other.optimizer.load_own_variables(store)


def test_restored_checkpoint_discards_a_pending_mean(strategies, tmp_path):
    trainer, fresh = (
        make_trainer(strategies[1], lambda: make_optimizer(2, delay=2))
        for _ in range(2)
    )
    stock_work = trainer.optimizer.background.work

    def pause():
        time.sleep(0.3)

    def slow_work(*args):
        with tf.control_dependencies([tf.py_function(pause, [], [])]):
            stock_work(*args)

    trainer.optimizer.background.work = slow_work
    steps = make_steps(1, 5)
    trainer.step(steps[0])
    checkpoint = tf.train.Checkpoint(o=trainer.optimizer, v=trainer.variables)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    trainer.step(steps[1])
    fresh_checkpoint = tf.train.Checkpoint(o=fresh.optimizer, v=fresh.variables)
    for restored_checkpoint in (checkpoint, fresh_checkpoint):
        restored_checkpoint.read(path).assert_existing_objects_matched()
    for gradients in steps[1:]:
        trainer.step(gradients)
        fresh.step(gradients)
    for variable, expected in zip(trainer.variables, fresh.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected.numpy())

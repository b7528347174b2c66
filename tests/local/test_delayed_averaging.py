"""Delayed averaging: rounds against plain NumPy, and means in the background."""

import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from contract import round_trip
from delayed_reference import DelayedRun
from harness import Trainer, initial_weights, make_gradients
from local_reference import AdamW, Momentum
from selection import rows

import tf_dgc
from tf_dgc.local.streaming import split_fragments
from tf_dgc.multiworker.worker_variables import ReplicaCopies
from tf_dgc.schedules import PiecewiseConstantPeriod

O = keras.optimizers  # noqa: E741
SHAPES = [(12, 10), (5,), (6, 7)]
RATE = 0.125  # exact in float32
PARTS = [[0], [1, 2]]
SLOW = pytest.mark.slow


def local(period=3, inner=None, delay=1, **settings):
    inner = inner or O.SGD(RATE)
    return tf_dgc.LocalOptimizer(inner, period, delay=delay, **settings)


def make_trainer(strategy, make=local, dtype="float64", **settings):
    return Trainer(strategy, make, initial_weights(dtype, SHAPES), **settings)


def make_steps(num_workers, steps, dtype="float64"):
    return make_gradients(num_workers, steps, dtype, SHAPES)


def largest(values):
    """Return the largest entry of a tensor, as top-k does of so few; of a bias all."""
    if values.ndim < 2:
        return values
    flat = np.zeros(values.size)
    at = np.argmax(np.abs(values))
    flat[at] = values.reshape(-1)[at]
    return flat.reshape(values.shape)


def adam():
    """Return an AdamW whose settings are exact in float32."""
    betas = {"beta_1": 0.75, "beta_2": 0.875, "epsilon": 2**-20}
    return O.AdamW(RATE, weight_decay=0.25, **betas)


ADAM = AdamW(RATE, 0.25, 0.75, 0.875, 2**-20)
NESTEROV = Momentum(0.5, 0.75, nesterov=True)
WHOLE = [[0, 1, 2]]
CASES = {
    "soon": (lambda: local(3), DelayedRun(Momentum(RATE), 3, 1, WHOLE)),
    "a round later": (
        lambda: local(2, O.SGD(RATE, momentum=0.5), delay=2),
        DelayedRun(Momentum(RATE, 0.5), 2, 2, WHOLE),
    ),
    "every step": (
        lambda: local(1, delay=1),
        DelayedRun(Momentum(RATE), 1, 1, WHOLE),
    ),
    "diloco": (
        lambda: local(
            3,
            adam(),
            delay=3,
            outer=O.SGD(0.5, momentum=0.75, nesterov=True),
        ),
        DelayedRun(ADAM, 3, 3, WHOLE, NESTEROV),
    ),
    "parts": (
        lambda: local(
            4, delay=1, fragments=2, outer=O.SGD(0.5, momentum=0.75, nesterov=True)
        ),
        DelayedRun(Momentum(RATE), 4, 1, PARTS, NESTEROV),
    ),
    "parts in turn": (
        lambda: local(4, delay=2, fragments=2, outer=adam()),
        DelayedRun(Momentum(RATE), 4, 2, PARTS, ADAM),
    ),
    "schedule": (
        lambda: local(PiecewiseConstantPeriod([2], [1, 4]), delay=3),
        DelayedRun(Momentum(RATE), {1, 2, 6, 10}, 3, WHOLE),
    ),
    "compressed": (
        lambda: local(2, delay=2, compressor="top_k", min_compress_size=0),
        DelayedRun(Momentum(RATE), 2, 2, WHOLE, compress=largest),
    ),
}


@pytest.mark.parametrize(
    ("name", "num_workers"),
    rows(
        itertools.product(CASES, [1, 2, 4]),
        [("parts in turn", 2), ("compressed", 2), ("diloco", 1)],
    ),
)
def test_rounds_are_those_of_the_reference(strategies, name, num_workers):
    make, reference = CASES[name]
    trainer = make_trainer(strategies[num_workers], make)
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


def test_parts_are_about_equally_large():
    assert split_fragments([3, 9, 1, 5, 4], 2) == [[0, 1], [2, 3, 4]]
    assert split_fragments([7, 7, 7], 3) == [[0], [1], [2]]
    assert split_fragments([0, 0], 2) == [[0], [1]]


# --- what is under way ----------------------------------------------------------------


def test_who_leads_takes_turns_in_each_part(strategies):
    """Rounds of a part are every second one: by their number one worker would lead."""
    trainer = Trainer(
        strategies[2],
        lambda: tf_dgc.LocalOptimizer(
            keras.optimizers.SGD(1.0), 2, delay=1, fragments=2, min_compress_size=0,
            compressor=tf_dgc.compressors.ScaleCom(0.5),
        ),
        [np.zeros((4, 10), "float32") for _ in range(2)],
    )  # fmt: skip
    halves = np.zeros((2, 4, 10), "float32")
    halves[0, :2] = halves[1, 2:] = 1.0  # what each worker alone has
    for _ in range(10):
        trainer.step([[half, half] for half in halves])
    trainer.optimizer.background.finish()
    for anchor in trainer.optimizer.anchor:
        assert (anchor.numpy() != 0).all()


@pytest.mark.parametrize("num_workers", rows([1, 2], [2]))
def test_a_consensus_waits_for_what_is_under_way(strategies, num_workers):
    make, reference = CASES["parts in turn"]
    trainer = make_trainer(strategies[num_workers], make)
    run = reference.start(initial_weights(shapes=SHAPES), num_workers)
    for gradients in make_steps(num_workers, 3):
        trainer.step(gradients)
        run.step(gradients)
    trainer.optimizer.consensus()
    trainer.optimizer.consensus()  # for which nothing is left
    run.consensus()
    compare(trainer, run)
    for copies in trainer.replica_weights():
        assert len({copy.tobytes() for copy in copies}) == 1
    trainer.step(make_steps(num_workers, 1)[0])
    assert trainer.optimizer.stats.steps == run.rounds


def quick():
    return local(
        2,
        O.Adam(RATE),
        delay=2,
        outer=O.SGD(0.5, momentum=0.5),
        compressor="top_k",
        min_compress_size=0,
    )


def save(trainer):
    outer = {}
    trainer.optimizer.outer_optimizer.save_own_variables(outer)
    return *trainer.save(), outer


def load(trainer, saved):
    *mine, outer = saved
    trainer.optimizer.outer_optimizer.load_own_variables(outer)
    trainer.load(mine)


@pytest.mark.parametrize("num_workers", rows([1, 2], [2]))
def test_goes_on_bit_for_bit_with_something_under_way(strategies, num_workers):
    steps = make_steps(num_workers, 6, "float32")
    whole, again = (
        make_trainer(strategies[num_workers], quick, "float32") for _ in range(2)
    )
    for gradients in steps[:3]:
        whole.step(gradients)
        again.step(gradients[::-1])  # it has something else under way
    load(again, save(whole))
    for gradients in steps[3:]:
        whole.step(gradients)
        again.step(gradients)
    for trainer in (whole, again):
        trainer.optimizer.background.finish()
    pairs = zip(whole.state().items(), again.state().values(), strict=True)
    for (path, copies), others in pairs:
        for copy, other in zip(copies, others, strict=True):
            np.testing.assert_array_equal(copy, other, path)


@pytest.mark.slow
def test_another_number_of_workers_goes_on_from_the_mean(strategies):
    two = make_trainer(strategies[2], lambda: local(2, delay=2))
    for gradients in make_steps(2, 3):
        two.step(gradients)
    one = make_trainer(strategies[1], lambda: local(2, delay=2))
    load(one, save(two))
    means = [np.mean(copies, axis=0) for copies in two.replica_weights()]
    for mine, mean in zip(one.weights(), means, strict=True):
        np.testing.assert_allclose(mine, mean, rtol=1e-12)
    for trainer in (one, two):  # by the mean of all moves, they come to the same
        trainer.optimizer.consensus()
    for mine, theirs in zip(one.weights(), two.weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)


def test_weights_that_are_set_replace_what_is_under_way(strategies):
    trainer = make_trainer(strategies[2], lambda: local(2, delay=2))
    before, more = make_steps(2, 3), make_steps(2, 5)
    for gradients in before:
        trainer.step(gradients)
    trainer.optimizer.restart_round()
    for variable, value in zip(
        trainer.variables, initial_weights(shapes=SHAPES), strict=True
    ):
        for copy in ReplicaCopies(trainer.strategy, variable.value).local:
            copy.assign(value)
    run = DelayedRun(Momentum(RATE), 2, 2, WHOLE)
    run = run.start(initial_weights(shapes=SHAPES), 2)
    for gradients in more:
        trainer.step(gradients)
        run.step(gradients)
        compare(trainer, run)


def test_a_worker_whose_weights_are_lost_takes_the_anchor(strategies):
    trainer = make_trainer(strategies[2], lambda: local(2, O.SGD(16.0), delay=1))
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
def test_what_ends_it_ends_the_next_step(strategies, traced):
    trainer = make_trainer(strategies[2], lambda: local(2, delay=2), traced=traced)
    gradients, *_ = make_steps(2, 1)
    lane = trainer.optimizer.background

    def fail(*_):
        raise ValueError("it is 'broken'")

    lane.work = fail
    trainer.step(gradients)
    trainer.step(gradients)
    message = "in the background ended with ValueError: it is `broken`"
    with pytest.raises(RuntimeError, match=message):
        lane.finish()
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        trainer.step(gradients)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        trainer.optimizer.consensus()


@pytest.mark.slow
def test_every_worker_has_a_loss_scale_of_its_own(strategies):
    def scaled():
        optimizer = local(2, delay=1)
        return O.LossScaleOptimizer(optimizer, initial_scale=16.0)

    tf_dgc.prepare(strategies[2])
    trainer = make_trainer(strategies[2], scaled, "float32", traced=True)
    for step, gradients in enumerate(make_steps(2, 5, "float32")):
        if step == 1:
            gradients[1][0][0, 0] = np.inf
        trainer.step(gradients)
    mine = trainer.optimizer.inner_optimizer
    mine.background.finish()
    assert mine.stats.steps == 2
    assert mine.skipped == 1
    (one,), (other,) = trainer.local([trainer.optimizer.dynamic_scale])
    assert (float(one), float(other)) == (16.0, 8.0)


def test_xla_is_refused(strategies):
    trainer = make_trainer(strategies[1], lambda: local(2))
    gradients = [tf.constant(g) for g in make_steps(1, 1)[0][0]]

    @tf.function(jit_compile=True)
    def step():
        trainer.optimizer.apply(gradients, trainer.variables)

    with pytest.raises(ValueError, match="Pass `jit_compile=False`"):
        step()


@pytest.mark.slow
def test_anchors_that_differ_are_found(strategies):
    tf_dgc.prepare(strategies[2])
    trainer = make_trainer(
        strategies[2], lambda: local(1, diagnostics=tf_dgc.Diagnostics(check_every=1))
    )
    gradients, *_ = make_steps(2, 1)
    trainer.step(gradients)
    trainer.optimizer.background.finish()
    one = ReplicaCopies(trainer.strategy, trainer.optimizer.anchor[1].value).local[1]
    trainer.step(gradients)
    trainer.optimizer.background.finish()
    one.assign(one + 1)
    with pytest.raises((RuntimeError, tf.errors.OpError), match="w1_anchor"):
        for _ in range(3):
            trainer.step(gradients)
            trainer.optimizer.background.finish()


@pytest.mark.parametrize(
    "num_workers",
    [1, pytest.param(2, marks=SLOW)],
)
def test_a_model_is_trained_and_saved(strategies, num_workers, tmp_path):
    def fit(model, epochs):
        x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
        model.fit(x, x[:, :1], batch_size=8, epochs=epochs, shuffle=False, verbose=0)

    def state(model):
        model.optimizer.background.finish()
        local = strategies[num_workers].experimental_local_results
        variables = [*model.variables, *model.optimizer.variables]
        return {v.path: [c.numpy() for c in local(v.value)] for v in variables}

    with strategies[num_workers].scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        model.add(keras.layers.Dense(1))
        optimizer = local(
            4,
            O.Adam(RATE),
            delay=2,
            fragments=2,
            diagnostics=tf_dgc.Diagnostics(track_consensus_distance=True),
        )
        model.compile(optimizer, "mse", steps_per_execution=2)
        fit(model, 1)
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        for m in (model, again):
            fit(m, 1)
    assert model.optimizer.stats.steps == 5
    assert num_workers == 1 or model.optimizer.consensus_distance > 0
    pairs = zip(state(model).values(), state(again).values(), strict=True)
    for copies, others in pairs:
        for copy, other in zip(copies, others, strict=True):
            np.testing.assert_array_equal(copy, other)


# --- settings -------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"period": 6, "fragments": 3, "delay": 2}])
def test_config_round_trip(settings):
    optimizer = local(**settings)
    again = round_trip(optimizer)
    assert again.get_config() == optimizer.get_config()
    assert repr(again) == repr(optimizer)
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
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        local(**settings)


def test_more_parts_than_variables_are_refused(strategies):
    with pytest.raises(ValueError, match="Each of `fragments` needs a variable"):
        make_trainer(strategies[1], lambda: local(4, fragments=4))


def test_a_state_of_other_parts_is_refused(strategies):
    saved, other = (
        make_trainer(strategies[1], lambda n=n: local(4, delay=1, fragments=n))
        for n in (2, 1)
    )
    store = {}
    saved.optimizer.save_own_variables(store)
    with pytest.raises(ValueError, match="saved LocalOptimizer has `fragments=2`"):
        other.optimizer.load_own_variables(store)


def test_nothing_under_way_comes_behind_what_a_checkpoint_restores(
    strategies, tmp_path
):
    trainer, fresh = (
        make_trainer(strategies[1], lambda: local(2, delay=2)) for _ in range(2)
    )
    stock = trainer.optimizer.background.work

    def pause():
        time.sleep(0.3)

    def slow(*args):
        with tf.control_dependencies([tf.py_function(pause, [], [])]):
            stock(*args)

    trainer.optimizer.background.work = slow
    steps = make_steps(1, 5)
    trainer.step(steps[0])
    kept = tf.train.Checkpoint(o=trainer.optimizer, v=trainer.variables)
    path = kept.write(str(tmp_path / "kept"))
    trainer.step(steps[1])
    other = tf.train.Checkpoint(o=fresh.optimizer, v=fresh.variables)
    for checkpoint in (kept, other):
        checkpoint.read(path).assert_existing_objects_matched()
    for gradients in steps[1:]:
        trainer.step(gradients)
        fresh.step(gradients)
    for one, another in zip(trainer.variables, fresh.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), another.numpy())

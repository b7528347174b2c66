"""Local steps: rounds against plain NumPy, and who is contacted when."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from contract import round_trip
from harness import Trainer, initial_weights, make_gradients, record_collectives
from local_reference import LocalRun, Momentum
from selection import rows

import tf_dgc
from tf_dgc import native_library
from tf_dgc.optimizers import state, update
from tf_dgc.schedules import PiecewiseConstantPeriod
from tf_dgc.steps import native

O = keras.optimizers  # noqa: E741
SHAPES = [(12, 10), (5,)]
RATE = 0.125  # exact in float32


def local(period=3, inner=None, **settings):
    return tf_dgc.LocalOptimizer(inner or O.SGD(RATE), period, **settings)


def make_trainer(strategy, make=local, dtype="float64", **settings):
    return Trainer(strategy, make, initial_weights(dtype, SHAPES), **settings)


def make_steps(num_workers, steps, dtype="float64"):
    return make_gradients(num_workers, steps, dtype, SHAPES)


# --- what rounds come to --------------------------------------------------------------


@pytest.mark.parametrize("num_workers", rows([1, 2, 4], [2]))
@pytest.mark.parametrize("inner", [{}, {"weight_decay": 0.01}])
def test_of_one_step_they_are_the_dense_run(strategies, num_workers, inner):
    strategy = tf_dgc.prepare(strategies[num_workers])
    dense = make_trainer(strategy, lambda: O.SGD(RATE, **inner))
    mine = make_trainer(strategy, lambda: local(1, O.SGD(RATE, **inner)))
    for gradients in make_steps(num_workers, 3):
        dense.step(gradients)
        mine.step(gradients)
        for copies, expected in zip(
            mine.replica_weights(), dense.weights(), strict=True
        ):
            for copy in copies:
                np.testing.assert_allclose(copy, expected, rtol=1e-14, atol=1e-15)


CASES = {
    "average": (lambda: local(3), LocalRun(Momentum(RATE), 3)),
    "momentum": (
        lambda: local(2, O.SGD(RATE, momentum=0.5)),
        LocalRun(Momentum(RATE, 0.5), 2),
    ),
    "schedule": (
        lambda: local(PiecewiseConstantPeriod([2, 4], [1, 2, 3])),
        LocalRun(Momentum(RATE), lambda step: 1 if step < 2 else 2 if step < 4 else 3),
    ),
    "nesterov outside": (
        lambda: local(3, outer=O.SGD(0.5, momentum=0.75, nesterov=True)),
        LocalRun(Momentum(RATE), 3, Momentum(0.5, 0.75, nesterov=True)),
    ),
    "accumulated": (
        lambda: local(4, O.SGD(RATE, gradient_accumulation_steps=2)),
        LocalRun(Momentum(RATE, every=2), 4),
    ),
}


@pytest.mark.parametrize(
    ("name", "num_workers"),
    rows(
        itertools.product(CASES, [1, 3, 5, 8]),
        [
            *((name, 3) for name in CASES if name != "momentum"),
            ("momentum", 5),
        ],
    ),
)
def test_rounds_are_those_of_the_reference(strategies, name, num_workers):
    make, reference = CASES[name]
    trainer = make_trainer(strategies[num_workers], make)
    run = reference.start(initial_weights(shapes=SHAPES), num_workers)
    for gradients in make_steps(num_workers, 7):
        trainer.step(gradients)
        run.step(gradients)
        compare(trainer, run)
    assert trainer.optimizer.stats.steps == run.rounds


def compare(trainer, run, rtol=1e-12):
    for i, copies in enumerate(trainer.replica_weights()):
        for copy, weights in zip(copies, run.weights, strict=True):
            np.testing.assert_allclose(copy, weights[i], rtol=rtol, atol=1e-13)
    if run.taken == 0:
        for copies in trainer.replica_weights():
            assert len({copy.tobytes() for copy in copies}) == 1


@pytest.mark.parametrize("traced", rows([False, True], [False]))
def test_between_exchanges_nothing_is_sent(strategies, monkeypatch, traced):
    sent = record_collectives(monkeypatch)
    trainer = make_trainer(strategies[2], lambda: local(3), traced=traced)
    for step, gradients in enumerate(make_steps(2, 6)):
        sent.clear()
        trainer.step(gradients)
        assert bool(sent) == (step % 3 == 2)
    stats = trainer.optimizer.stats
    assert stats.steps == 2
    assert sum(sent) == 2 * stats.bytes_per_step


def test_compressed_with_error_feedback(strategies):
    """What is not sent in one round is sent in the next ones."""
    trainer = make_trainer(
        strategies[2], lambda: local(2, compressor="top_k", min_compress_size=0)
    )
    start = trainer.weights()
    moved = [np.zeros_like(w) for w in start]
    for gradients in make_steps(2, 6):
        trainer.step(gradients)
        for total, *each in zip(moved, *gradients, strict=True):
            total += RATE * sum(each)
    for i, residual in enumerate(trainer.optimizer.residual):
        arrived = start[i] - trainer.weights()[i]
        kept = residual.gather().sum(axis=0)
        np.testing.assert_allclose(arrived + kept, moved[i], rtol=1e-12, atol=1e-13)
    assert trainer.optimizer.stats.entries_per_step == 1 + 5


def test_weights_assigned_at_a_consensus_are_the_next_anchor(strategies):
    trainer = make_trainer(
        strategies[2], lambda: local(2, compressor="top_k", min_compress_size=0)
    )
    *before, first, second = make_steps(2, 4)
    for gradients in before:
        trainer.step(gradients)
    for variable in trainer.variables:
        variable.assign(tf.ones_like(variable.value))
    for gradients in (first, second):
        trainer.step(gradients)
    assert np.count_nonzero(trainer.weights()[0] == 1) >= 120 - 3


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_consensus_at_will(strategies, num_workers):
    trainer = make_trainer(strategies[num_workers], lambda: local(3))
    run = LocalRun(Momentum(RATE), lambda step: {0: 2}.get(step, 3))
    run = run.start(initial_weights(shapes=SHAPES), num_workers)
    trainer.optimizer.consensus()
    steps = make_steps(num_workers, 5)
    for step, gradients in enumerate(steps):
        trainer.step(gradients)
        run.step(gradients)
        if step == 1:
            trainer.optimizer.consensus()
            trainer.optimizer.consensus()
        compare(trainer, run)
    assert trainer.optimizer.stats.steps == run.rounds == 2


# --- steps that are left out ----------------------------------------------------------


def test_a_step_that_is_not_finite_is_left_out_by_its_worker_alone(strategies):
    trainer = make_trainer(strategies[3], lambda: local(2, O.SGD(RATE, momentum=0.5)))
    run = LocalRun(Momentum(RATE, 0.5), 2).start(initial_weights(shapes=SHAPES), 3)
    for step, gradients in enumerate(make_steps(3, 5)):
        if step in {1, 2}:
            gradients[step][0][3, 4] = np.nan
        trainer.step(gradients)
        run.step(gradients)
        compare(trainer, run)
    local_steps = trainer.local([trainer.optimizer.iterations])
    assert [int(n) for (n,) in local_steps] == [5, 4, 4]
    assert trainer.optimizer.skipped == 1
    assert trainer.optimizer.stats.nonfinite == 0


def test_weights_that_are_not_finite_are_left_out_of_an_exchange(strategies):
    trainer = make_trainer(strategies[2], lambda: local(2, O.SGD(16.0)))
    gradients = make_steps(2, 2)
    for step in gradients:
        step[1][1][:] = 8e307  # overflows where it is applied
    for step in gradients:
        trainer.step(step)
    assert all(np.all(np.isfinite(w)) for w in trainer.weights())
    assert trainer.optimizer.stats.nonfinite == 1


@pytest.mark.slow
def test_every_worker_has_a_loss_scale_of_its_own(strategies, monkeypatch):
    def scaled():
        return O.LossScaleOptimizer(
            local(2), initial_scale=16.0, dynamic_growth_steps=3
        )

    tf_dgc.prepare(strategies[2])
    trainer = make_trainer(strategies[2], scaled, "float32", traced=True)
    trainer.step(make_steps(2, 1, "float32")[0])
    sent = record_collectives(monkeypatch)
    scales, rounds = [], []
    for step, gradients in enumerate(make_steps(2, 4, "float32")):
        if step == 1:
            gradients[1][0][0, 0] = np.inf
        trainer.step(gradients)
        (one,), (other,) = trainer.local([trainer.optimizer.dynamic_scale])
        scales.append((float(one), float(other)))
        rounds.append(trainer.optimizer.inner_optimizer.stats.steps)
    assert scales == [(16, 16), (32, 8), (32, 8), (32, 8)]
    assert rounds == [1, 1, 2, 2]
    assert not sent  # none but those that were traced before


@pytest.mark.parametrize("traced", rows([False, True], [False]))
def test_a_worker_whose_inner_state_is_not_finite_begins_it_anew(strategies, traced):
    def make():
        return local(2, O.Adagrad(RATE, initial_accumulator_value=0.25))

    trainer = make_trainer(strategies[2], make, "float32", traced=traced)
    steps = make_steps(2, 6, "float32")
    steps[1][1][0][0, 0] = 1e25  # whose square overflows: it would not move any more
    for gradients in steps[:2]:
        trainer.step(gradients)
    rule = trainer.optimizer.inner_optimizer
    one, other = trainer.local(rule._accumulators)
    assert np.all(one[0] > 0.25)
    assert all(np.all(a == 0.25) for a in other)
    assert trainer.optimizer.resets == 1
    for gradients in steps[2:]:
        trainer.step(gradients)
    assert trainer.optimizer.resets == 1
    assert all(np.all(np.isfinite(a)) for a in trainer.local(rule._accumulators)[1])
    local_steps = trainer.local([trainer.optimizer.iterations])
    assert [int(n) for (n,) in local_steps] == [6, 6]


# --- natively -------------------------------------------------------------------------


@pytest.mark.skipif(
    native_library.load_library().library is None, reason="no native operations"
)
@pytest.mark.parametrize("inner", [O.SGD(RATE, momentum=0.5), O.AdamW(RATE)])
def test_local_steps_are_native_and_have_keras_bits(strategies, monkeypatch, inner):
    seen, stock = [], native.apply_decoded

    def spy(decode, rule):
        seen.extend(set(rule.names))
        return stock(decode, rule)

    monkeypatch.setattr(native, "apply_decoded", spy)
    states = []
    for use_native in (True, False):
        if not use_native:
            monkeypatch.setattr(
                state, "all_workers_have_native_rules", lambda *_: False
            )
        trainer = make_trainer(strategies[2], lambda: local(2, inner), "float32")
        for gradients in make_steps(2, 3, "float32"):
            trainer.step(gradients)
        states.append(trainer.state())
        assert set(seen) == {update.keras_rules.rule_name(inner)}
        if use_native:
            number = len(seen)
        assert len(seen) == number  # none is added by the others
    for copies, others in zip(*(s.values() for s in states), strict=True):
        np.testing.assert_array_equal(copies, others)


# --- state ----------------------------------------------------------------------------


def adam(**settings):
    return local(
        3,
        O.Adam(RATE),
        outer=O.SGD(0.5, momentum=0.5),
        compressor="top_k",
        min_compress_size=0,
        **settings,
    )


def save(trainer):
    outer = {}
    trainer.optimizer.outer_optimizer.save_own_variables(outer)
    return *trainer.save(), outer


def load(trainer, saved):
    *mine, outer = saved
    trainer.optimizer.outer_optimizer.load_own_variables(outer)
    trainer.load(mine)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_goes_on_bit_for_bit_from_within_a_round(strategies, num_workers):
    steps = make_steps(num_workers, 8, "float32")
    whole, again = (
        make_trainer(strategies[num_workers], adam, "float32") for _ in range(2)
    )
    for gradients in steps[:4]:
        whole.step(gradients)
    load(again, save(whole))
    for gradients in steps[4:]:
        whole.step(gradients)
        again.step(gradients)
    pairs = zip(whole.state().items(), again.state().values(), strict=True)
    for (path, copies), others in pairs:
        for copy, other in zip(copies, others, strict=True):
            np.testing.assert_array_equal(copy, other, path)


def test_another_number_of_workers_goes_on_from_the_mean(strategies):
    two = make_trainer(strategies[2], adam, "float32")
    for gradients in make_steps(2, 4, "float32"):
        two.step(gradients)
    one = make_trainer(strategies[1], adam, "float32")
    load(one, save(two))
    for mine, copies in zip(one.weights(), two.replica_weights(), strict=True):
        np.testing.assert_allclose(mine, np.mean(copies, axis=0), rtol=1e-6)
    for gradients in make_steps(1, 3, "float32"):
        one.step(gradients)
    assert one.optimizer.stats.steps == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", rows([2, 1], [2]))
def test_a_model_is_saved_within_a_round(strategies, num_workers, tmp_path):
    def fit(model, epochs):
        x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
        model.fit(x, x[:, :1], batch_size=8, epochs=epochs, shuffle=False, verbose=0)

    with strategies[num_workers].scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        model.add(keras.layers.Dense(1))
        model.compile(adam(), "mse")
        fit(model, 1)
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == model.optimizer.get_config()
    for m in (model, again):
        fit(m, 1)
    local_values = strategies[num_workers].experimental_local_results
    for old, new in zip(model.variables, again.variables, strict=True):
        for a, b in zip(*map(local_values, (old.value, new.value)), strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy(), old.path)
    assert again.optimizer.stats.steps == 3


def test_a_checkpoint_of_one_worker_is_refused(strategies, tmp_path):
    two = make_trainer(strategies[2])
    two.step(make_steps(2, 1)[0])
    checkpoint = tf.train.Checkpoint(optimizer=two.optimizer)
    with pytest.raises(ValueError, match="would save the weights"):
        checkpoint.write(str(tmp_path / "two"))
    one = make_trainer(strategies[1])
    one.step(make_steps(1, 1)[0])
    tf.train.Checkpoint(optimizer=one.optimizer).write(str(tmp_path / "one"))


# --- settings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"outer": O.SGD(0.5), "compressor": "top_k", "seed": 3, "collective": "tree"},
        {
            "period": PiecewiseConstantPeriod([5], [1, 8]),
            "diagnostics": tf_dgc.Diagnostics(check_every=None),
        },
        {"inner": O.AdamW(0.01, clipnorm=1.0), "name": "mine"},
    ],
)
def test_config_round_trip(settings):
    optimizer = local(**settings)
    again = round_trip(optimizer)
    assert again.get_config() == optimizer.get_config()
    assert repr(again) == repr(optimizer)
    assert "outer=" in repr(optimizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"period": 0}, "`period` must be a whole number of local steps"),
        ({"period": 1.5}, "`period` must be a whole number of local steps"),
        ({"period": np.float32(2.5)}, "`period` must be a whole number of local steps"),
        ({"period": float("inf")}, "`period` must be a whole number of local steps"),
        ({"period": lambda step: 2.5}, r"Received: period\(0\)=2.5"),
        ({"outer": O.SGD(momentum=0.9), "compressor": "demo"}, "Pass as `outer` an"),
        ({"period": True}, "`period` must be a whole number of local steps"),
        ({"period": lambda step: 0 * step}, r"`period\(0\)` must be a whole number"),
        ({"inner": tf_dgc.DGCOptimizer("sgd")}, "`inner` is itself a DGCOptimizer"),
        ({"inner": local()}, "`inner` is itself a LocalOptimizer"),
        ({"outer": local()}, "`outer` is itself a LocalOptimizer"),
        ({"outer": 1.0}, "`outer` must be a Keras optimizer"),
        ({"inner": O.SGD(use_ema=True)}, "Let the outer optimizer average"),
        ({"outer": O.SGD(1.0, loss_scale_factor=8.0)}, "nothing to divide by"),
        ({"compressor": "sign_sgd"}, "sends only signs"),
        ({"compressor": "signum"}, "sends only signs"),
        ({"compressor": "demo"}, "sends only signs"),
        ({"period": lambda step: "often"}, r"`period\(0\)` must be a whole number"),
        ({"period": lambda step: [2, 3]}, r"`period\(0\)` must be a whole number"),
        ({"inner": "nadam"}, "must be able to step on one worker alone"),
        ({"compressor": "what"}, "`compressor` must be"),
        ({"collective": "gtopk"}, "merges entries on the way"),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        local(**settings)


@pytest.mark.parametrize("period", [np.int64(3), np.float32(3.0), np.uint8(3)])
def test_periods_may_be_numbers_of_numpy(period):
    assert local(period).get_config()["period"] == 3
    assert type(local(period).period) is int


def test_a_wrapper_does_not_take_it():
    with pytest.raises(ValueError, match="is itself a LocalOptimizer"):
        tf_dgc.DGCOptimizer(local())


def test_a_schedule_that_is_not_whole_is_refused(strategies):
    def schedule(step):
        return 1 + tf.cast(step, tf.float32) / 2

    trainer = make_trainer(strategies[1], lambda: local(schedule))
    steps = make_steps(1, 2)
    trainer.step(steps[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="a whole number, 1 or"):
        trainer.step(steps[1])


def test_a_schedule_below_1_is_refused_when_it_comes_to_it(strategies):
    trainer = make_trainer(strategies[1], lambda: local(lambda step: 1 - step // 2))
    steps = make_steps(1, 3)
    trainer.step(steps[0])
    trainer.step(steps[1])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="a whole number, 1 or more"
    ):
        trainer.step(steps[2])


def test_variables_that_replicas_share_are_refused(strategies):
    with strategies[2].scope():
        variable = keras.Variable(np.zeros(3), aggregation="mean")
        with pytest.raises(ValueError, match='must be of `aggregation="none"`'):
            local().build([variable])


def test_the_learning_rate_is_that_of_local_steps(strategies):
    trainer = make_trainer(strategies[1], lambda: local(1))
    trainer.optimizer.learning_rate = 0.5
    assert trainer.optimizer.inner_optimizer.learning_rate.numpy() == 0.5
    assert trainer.optimizer.outer_optimizer.learning_rate.numpy() == 1.0

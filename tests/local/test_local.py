"""Local steps: rounds against NumPy, communication, state and settings."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import Trainer, initial_weights, make_gradients, record_collectives
from local_checks import (
    check_config_round_trip,
    check_loads_the_mean,
    check_resumes,
    fit,
    make_model,
)
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


def make_optimizer(period=3, inner=None, **settings):
    return tf_dgc.LocalOptimizer(inner or O.SGD(RATE), period, **settings)


def make_trainer(strategy, create=make_optimizer, dtype="float64", **settings):
    return Trainer(strategy, create, initial_weights(dtype, SHAPES), **settings)


def make_steps(num_workers, steps, dtype="float64"):
    return make_gradients(num_workers, steps, dtype, SHAPES)


# --- results of rounds ----------------------------------------------------------------


@pytest.mark.parametrize("num_workers", rows([1, 2, 4], [2]))
@pytest.mark.parametrize("inner", [{}, {"weight_decay": 0.01}])
def test_rounds_of_one_step_equal_dense_training(strategies, num_workers, inner):
    strategy = tf_dgc.prepare(strategies[num_workers])
    dense = make_trainer(strategy, lambda: O.SGD(RATE, **inner))
    trainer = make_trainer(strategy, lambda: make_optimizer(1, O.SGD(RATE, **inner)))
    for gradients in make_steps(num_workers, 3):
        dense.step(gradients)
        trainer.step(gradients)
        for copies, expected in zip(
            trainer.replica_weights(), dense.weights(), strict=True
        ):
            for copy in copies:
                np.testing.assert_allclose(copy, expected, rtol=1e-14, atol=1e-15)


CASES = {
    "average": (lambda: make_optimizer(3), LocalRun(Momentum(RATE), 3)),
    "momentum": (
        lambda: make_optimizer(2, O.SGD(RATE, momentum=0.5)),
        LocalRun(Momentum(RATE, 0.5), 2),
    ),
    "schedule": (
        lambda: make_optimizer(PiecewiseConstantPeriod([2, 4], [1, 2, 3])),
        LocalRun(Momentum(RATE), lambda step: 1 if step < 2 else 2 if step < 4 else 3),
    ),
    "nesterov outside": (
        lambda: make_optimizer(3, outer=O.SGD(0.5, momentum=0.75, nesterov=True)),
        LocalRun(Momentum(RATE), 3, Momentum(0.5, 0.75, nesterov=True)),
    ),
    "accumulated": (
        lambda: make_optimizer(4, O.SGD(RATE, gradient_accumulation_steps=2)),
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
def test_rounds_equal_the_reference(strategies, name, num_workers):
    create, reference = CASES[name]
    trainer = make_trainer(strategies[num_workers], create)
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
def test_nothing_is_sent_within_a_round(strategies, monkeypatch, traced):
    sent = record_collectives(monkeypatch)
    trainer = make_trainer(strategies[2], lambda: make_optimizer(3), traced=traced)
    for step, gradients in enumerate(make_steps(2, 6)):
        sent.clear()
        trainer.step(gradients)
        assert bool(sent) == (step % 3 == 2)
    stats = trainer.optimizer.stats
    assert stats.steps == 2
    assert sum(sent) == 2 * stats.bytes_per_step


def test_compressed_with_error_feedback(strategies):
    """Entries that one round does not send are sent in the next ones."""
    trainer = make_trainer(
        strategies[2],
        lambda: make_optimizer(2, compressor="top_k", min_compress_size=0),
    )
    start = trainer.weights()
    total_change = [np.zeros_like(w) for w in start]
    for gradients in make_steps(2, 6):
        trainer.step(gradients)
        for total, *worker_gradients in zip(total_change, *gradients, strict=True):
            total += RATE * sum(worker_gradients)
    for i, residual in enumerate(trainer.optimizer.residual):
        change = start[i] - trainer.weights()[i]
        unsent = residual.gather().sum(axis=0)
        np.testing.assert_allclose(
            change + unsent, total_change[i], rtol=1e-12, atol=1e-13
        )
    assert trainer.optimizer.stats.entries_per_step == 1 + 5


def test_weights_assigned_at_a_consensus_are_the_next_anchor(strategies):
    trainer = make_trainer(
        strategies[2],
        lambda: make_optimizer(2, compressor="top_k", min_compress_size=0),
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
def test_consensus_within_a_round(strategies, num_workers):
    trainer = make_trainer(strategies[num_workers], lambda: make_optimizer(3))
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


# --- nonfinite values -----------------------------------------------------------------


def test_nonfinite_gradient_skips_only_its_workers_step(strategies):
    trainer = make_trainer(
        strategies[3], lambda: make_optimizer(2, O.SGD(RATE, momentum=0.5))
    )
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


def test_nonfinite_weights_are_left_out_of_the_mean(strategies):
    trainer = make_trainer(strategies[2], lambda: make_optimizer(2, O.SGD(16.0)))
    gradients = make_steps(2, 2)
    for step in gradients:
        step[1][1][:] = 8e307  # overflows where it is applied
    for step in gradients:
        trainer.step(step)
    assert all(np.all(np.isfinite(w)) for w in trainer.weights())
    assert trainer.optimizer.stats.nonfinite == 1


@pytest.mark.slow
def test_each_worker_has_its_own_loss_scale(strategies, monkeypatch):
    def make_scaled_optimizer():
        return O.LossScaleOptimizer(
            make_optimizer(2), initial_scale=16.0, dynamic_growth_steps=3
        )

    tf_dgc.prepare(strategies[2])
    trainer = make_trainer(strategies[2], make_scaled_optimizer, "float32", traced=True)
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
    assert not sent  # no collectives but those traced before


@pytest.mark.parametrize("traced", rows([False, True], [False]))
def test_nonfinite_inner_state_restarts_on_its_worker(strategies, traced):
    def make_adagrad():
        return make_optimizer(2, O.Adagrad(RATE, initial_accumulator_value=0.25))

    trainer = make_trainer(strategies[2], make_adagrad, "float32", traced=traced)
    steps = make_steps(2, 6, "float32")
    steps[1][1][0][0, 0] = 1e25  # its square overflows, which would stop this worker
    for gradients in steps[:2]:
        trainer.step(gradients)
    inner = trainer.optimizer.inner_optimizer
    one, other = trainer.local(inner._accumulators)
    assert np.all(one[0] > 0.25)
    assert all(np.all(a == 0.25) for a in other)
    assert trainer.optimizer.resets == 1
    for gradients in steps[2:]:
        trainer.step(gradients)
    assert trainer.optimizer.resets == 1
    assert all(np.all(np.isfinite(a)) for a in trainer.local(inner._accumulators)[1])
    local_steps = trainer.local([trainer.optimizer.iterations])
    assert [int(n) for (n,) in local_steps] == [6, 6]


# --- native operations ----------------------------------------------------------------


@pytest.mark.skipif(
    native_library.load_library().library is None, reason="no native operations"
)
@pytest.mark.parametrize("inner", [O.SGD(RATE, momentum=0.5), O.AdamW(RATE)])
def test_native_local_steps_are_bit_equal_to_keras(strategies, monkeypatch, inner):
    rule_names = []
    stock_apply = native.apply_decoded

    def spy(decode, rule):
        rule_names.extend(set(rule.names))
        return stock_apply(decode, rule)

    monkeypatch.setattr(native, "apply_decoded", spy)
    states = []
    for use_native in (True, False):
        if not use_native:
            monkeypatch.setattr(
                state, "all_workers_have_native_rules", lambda *_: False
            )
        trainer = make_trainer(
            strategies[2], lambda: make_optimizer(2, inner), "float32"
        )
        for gradients in make_steps(2, 3, "float32"):
            trainer.step(gradients)
        states.append(trainer.state())
        assert set(rule_names) == {update.keras_rules.rule_name(inner)}
        if use_native:
            num_native = len(rule_names)
        assert len(rule_names) == num_native  # Keras steps add none
    for copies, others in zip(*(s.values() for s in states), strict=True):
        np.testing.assert_array_equal(copies, others)


# --- state ----------------------------------------------------------------------------


def make_compressed_adam(**settings):
    return make_optimizer(
        3,
        O.Adam(RATE),
        outer=O.SGD(0.5, momentum=0.5),
        compressor="top_k",
        min_compress_size=0,
        **settings,
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_resumes_bit_for_bit_within_a_round(strategies, num_workers):
    steps = make_steps(num_workers, 8, "float32")
    trainer, resumed = (
        make_trainer(strategies[num_workers], make_compressed_adam, "float32")
        for _ in range(2)
    )
    for gradients in steps[:4]:
        trainer.step(gradients)
    check_resumes(trainer, resumed, steps[4:])


def test_another_number_of_workers_resumes_from_the_mean(strategies):
    two = make_trainer(strategies[2], make_compressed_adam, "float32")
    for gradients in make_steps(2, 4, "float32"):
        two.step(gradients)
    one = make_trainer(strategies[1], make_compressed_adam, "float32")
    check_loads_the_mean(one, two, rtol=1e-6)
    for gradients in make_steps(1, 3, "float32"):
        one.step(gradients)
    assert one.optimizer.stats.steps == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", rows([2, 1], [2]))
def test_model_is_saved_within_a_round(strategies, num_workers, tmp_path):
    with strategies[num_workers].scope():
        model = make_model(make_compressed_adam())
        fit(model)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for m in (model, loaded):
        fit(m)
    local_values = strategies[num_workers].experimental_local_results
    for expected, variable in zip(model.variables, loaded.variables, strict=True):
        pairs = zip(
            local_values(expected.value), local_values(variable.value), strict=True
        )
        for a, b in pairs:
            np.testing.assert_array_equal(a.numpy(), b.numpy(), expected.path)
    assert loaded.optimizer.stats.steps == 3


def test_checkpoint_of_two_workers_raises(strategies, tmp_path):
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
    optimizer = make_optimizer(**settings)
    check_config_round_trip(optimizer)
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
        ({"inner": make_optimizer()}, "`inner` is itself a LocalOptimizer"),
        ({"outer": make_optimizer()}, "`outer` is itself a LocalOptimizer"),
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
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(**settings)


@pytest.mark.parametrize("period", [np.int64(3), np.float32(3.0), np.uint8(3)])
def test_numpy_integer_as_period(period):
    assert make_optimizer(period).get_config()["period"] == 3
    assert type(make_optimizer(period).period) is int


def test_other_wrappers_refuse_a_local_optimizer():
    with pytest.raises(ValueError, match="is itself a LocalOptimizer"):
        tf_dgc.DGCOptimizer(make_optimizer())


def test_schedule_with_a_fraction_raises(strategies):
    def schedule(step):
        return 1 + tf.cast(step, tf.float32) / 2

    trainer = make_trainer(strategies[1], lambda: make_optimizer(schedule))
    steps = make_steps(1, 2)
    trainer.step(steps[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="a whole number, 1 or"):
        trainer.step(steps[1])


def test_schedule_below_1_raises_at_that_step(strategies):
    trainer = make_trainer(
        strategies[1], lambda: make_optimizer(lambda step: 1 - step // 2)
    )
    steps = make_steps(1, 3)
    trainer.step(steps[0])
    trainer.step(steps[1])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="a whole number, 1 or more"
    ):
        trainer.step(steps[2])


def test_mirrored_variables_raise(strategies):
    with strategies[2].scope():
        variable = keras.Variable(np.zeros(3), aggregation="mean")
        with pytest.raises(ValueError, match='must be of `aggregation="none"`'):
            make_optimizer().build([variable])


def test_learning_rate_is_that_of_the_inner_optimizer(strategies):
    trainer = make_trainer(strategies[1], lambda: make_optimizer(1))
    trainer.optimizer.learning_rate = 0.5
    assert trainer.optimizer.inner_optimizer.learning_rate.numpy() == 0.5
    assert trainer.optimizer.outer_optimizer.learning_rate.numpy() == 1.0

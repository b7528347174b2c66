"""State of an inner optimizer, which restarts on a worker that lost it."""

import keras
import numpy as np
import pytest
from harness import Trainer, initial_weights, make_gradients
from local_reference import AdamW

import tf_dgc
from tf_dgc.optimizers import state

O = keras.optimizers  # noqa: E741
SHAPES = [(12, 10), (5,)]
RATE = 0.125
HUGE = 1e25  # its square overflows in float32


def make_trainer(strategy, inner, **settings):
    def make_optimizer():
        return tf_dgc.LocalOptimizer(inner(), 2, **settings)

    return Trainer(strategy, make_optimizer, initial_weights("float32", SHAPES))


def lose_state(trainer, steps):
    """Make the state of the second worker overflow in the second step."""
    steps[1][1][0][0, 0] = HUGE
    for gradients in steps[:2]:
        trainer.step(gradients)
    assert trainer.optimizer.resets == 1


@pytest.mark.parametrize("use_native", [True, False])
def test_bias_correction_restarts(strategies, monkeypatch, use_native):
    """The schedule of the learning rate continues."""
    if not use_native:
        monkeypatch.setattr(state, "all_workers_have_native_rules", lambda *_: False)
    schedule = O.schedules.PiecewiseConstantDecay([0, 1], [1.0, 0.5, RATE])
    trainer = make_trainer(strategies[2], lambda: O.Adam(schedule))
    *steps, gradients = make_gradients(2, 3, "float32", SHAPES)
    lose_state(trainer, steps)
    before = trainer.weights()
    inner = trainer.optimizer.inner_optimizer
    trainer.step(gradients)
    reference = AdamW(RATE, 0.0)
    expected = reference.step(before, [2 * g for g in gradients[1]])
    for copies, value in zip(trainer.replica_weights(), expected, strict=True):
        np.testing.assert_allclose(copies[1], value, rtol=1e-5, atol=1e-5)
    assert [int(n) for (n,) in trainer.local([inner.iterations])] == [3, 3]
    assert [int(n) for (n,) in trainer.local([inner._tf_dgc_began])] == [0, 2]


class SGDWithCopies(O.SGD):
    """SGD that also stores the previous weights."""

    def build(self, variables):
        super().build(variables)
        self._previous = self.add_optimizer_variables(variables, "previous")
        for previous, v in zip(self._previous, variables, strict=True):
            previous.assign(v)

    def update_step(self, gradient, variable, learning_rate):
        previous = self._previous[self._get_variable_index(variable)]
        previous.assign(variable + 0 * keras.ops.square(gradient))
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("settings", [{}, {"delay": 2}])
def test_copies_of_weights_are_renewed(strategies, settings):
    trainer = make_trainer(strategies[2], lambda: SGDWithCopies(RATE), **settings)
    steps = make_gradients(2, 2, "float32", SHAPES)
    for gradients in steps:
        gradients[1][0][0, 0] = HUGE
    lose_state(trainer, steps)
    stored = trainer.local(trainer.optimizer.inner_optimizer._previous)[1]
    weights = [copies[1] for copies in trainer.replica_weights()]
    for previous, expected in zip(stored, weights, strict=True):
        np.testing.assert_array_equal(previous, expected)


class SGDWithOtherCopies(SGDWithCopies):
    def build(self, variables):
        super().build(variables)
        for previous in self._previous:
            previous.assign(np.arange(np.prod(previous.shape)).reshape(previous.shape))


def test_state_that_cannot_restart_raises(strategies):
    with pytest.raises(ValueError, match="must begin with one number per variable"):
        make_trainer(strategies[1], lambda: SGDWithOtherCopies(RATE))


class SGDWithInteger(O.SGD):
    """SGD with an integer, whose values on several workers have no mean."""

    def build(self, variables):
        super().build(variables)
        self._code = self.add_variable((), dtype="int32", name="code")

    def update_step(self, gradient, variable, learning_rate):
        sign = keras.ops.sign(keras.ops.sum(gradient))
        self._code.assign(self._code + keras.ops.cast(sign, "int32"))
        super().update_step(gradient, variable, learning_rate)


def test_integers_without_a_mean_raise(strategies):
    two, resumed, one = (
        make_trainer(strategies[n], lambda: SGDWithInteger(RATE)) for n in (2, 2, 1)
    )
    (gradients,) = make_gradients(2, 1, "float32", SHAPES)
    gradients[1] = [-g for g in gradients[0]]
    two.step(gradients)
    saved = two.save()
    resumed.load(saved)
    codes = [
        [int(c) for (c,) in trainer.local([trainer.optimizer.inner_optimizer._code])]
        for trainer in (two, resumed)
    ]
    assert codes[0] == codes[1]
    assert len({*codes[0]}) == 2
    with pytest.raises(ValueError, match=r"code.*has none. Load with as many"):
        one.load(saved)

"""The state of an inner optimizer, which a worker begins anew when it is lost."""

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
HUGE = 1e25  # whose square overflows in float32


def make_trainer(strategy, inner, **settings):
    def make():
        return tf_dgc.LocalOptimizer(inner(), 2, **settings)

    return Trainer(strategy, make, initial_weights("float32", SHAPES))


def lose(trainer, steps):
    """Let the second worker lose its state in the second step."""
    steps[1][1][0][0, 0] = HUGE
    for gradients in steps[:2]:
        trainer.step(gradients)
    assert trainer.optimizer.resets == 1


@pytest.mark.parametrize("use_native", [True, False])
def test_bias_corrections_begin_anew(strategies, monkeypatch, use_native):
    """From a schedule of the learning rate, which goes on."""
    if not use_native:
        monkeypatch.setattr(state, "all_workers_have_native_rules", lambda *_: False)
    schedule = O.schedules.PiecewiseConstantDecay([0, 1], [1.0, 0.5, RATE])
    trainer = make_trainer(strategies[2], lambda: O.Adam(schedule))
    *steps, gradients = make_gradients(2, 3, "float32", SHAPES)
    lose(trainer, steps)
    before = trainer.weights()
    rule = trainer.optimizer.inner_optimizer
    trainer.step(gradients)
    reference = AdamW(RATE, 0.0)
    expected = reference.step(before, [2 * g for g in gradients[1]])
    for copies, value in zip(trainer.replica_weights(), expected, strict=True):
        np.testing.assert_allclose(copies[1], value, rtol=1e-5, atol=1e-5)
    assert [int(n) for (n,) in trainer.local([rule.iterations])] == [3, 3]
    assert [int(n) for (n,) in trainer.local([rule._tf_dgc_began])] == [0, 2]


class Copying(O.SGD):
    """SGD that also keeps the weights it has had before."""

    def build(self, variables):
        super().build(variables)
        self._earlier = self.add_optimizer_variables(variables, "earlier")
        for kept_of, v in zip(self._earlier, variables, strict=True):
            kept_of.assign(v)

    def update_step(self, gradient, variable, learning_rate):
        kept_of = self._earlier[self._get_variable_index(variable)]
        kept_of.assign(variable + 0 * keras.ops.square(gradient))
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("settings", [{}, {"delay": 2}])
def test_copies_of_weights_are_taken_anew(strategies, settings):
    trainer = make_trainer(strategies[2], lambda: Copying(RATE), **settings)
    steps = make_gradients(2, 2, "float32", SHAPES)
    for gradients in steps:
        gradients[1][0][0, 0] = HUGE
    lose(trainer, steps)
    earlier = trainer.local(trainer.optimizer.inner_optimizer._earlier)[1]
    own = [copies[1] for copies in trainer.replica_weights()]
    for kept_of, mine in zip(earlier, own, strict=True):
        np.testing.assert_array_equal(kept_of, mine)


class Ordered(Copying):
    def build(self, variables):
        super().build(variables)
        for kept_of in self._earlier:
            kept_of.assign(np.arange(np.prod(kept_of.shape)).reshape(kept_of.shape))


def test_what_cannot_begin_anew_is_refused(strategies):
    with pytest.raises(ValueError, match="must begin with one number per variable"):
        make_trainer(strategies[1], lambda: Ordered(RATE))


class Turning(O.SGD):
    """SGD that remembers whole numbers, which have no mean."""

    def build(self, variables):
        super().build(variables)
        self._code = self.add_variable((), dtype="int32", name="code")

    def update_step(self, gradient, variable, learning_rate):
        sign = keras.ops.sign(keras.ops.sum(gradient))
        self._code.assign(self._code + keras.ops.cast(sign, "int32"))
        super().update_step(gradient, variable, learning_rate)


def test_whole_numbers_without_a_mean_are_refused(strategies):
    two, again, one = (
        make_trainer(strategies[n], lambda: Turning(RATE)) for n in (2, 2, 1)
    )
    (gradients,) = make_gradients(2, 1, "float32", SHAPES)
    gradients[1] = [-g for g in gradients[0]]
    two.step(gradients)
    saved = two.save()
    again.load(saved)
    codes = [
        [int(c) for (c,) in trainer.local([trainer.optimizer.inner_optimizer._code])]
        for trainer in (two, again)
    ]
    assert codes[0] == codes[1]
    assert len({*codes[0]}) == 2
    with pytest.raises(ValueError, match=r"code.*has none. Load with as many"):
        one.load(saved)

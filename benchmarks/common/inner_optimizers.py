"""Optimizers that `inner.py` trains by: every one of Keras's, and NovoGrad."""

import keras

import tf_dgc

optimizers = keras.optimizers


def _mixed(rate):
    """Return one Adam for what has one dimension, and another for all else."""
    small, large = optimizers.Adam(rate), optimizers.Adam(rate)
    return optimizers.MultiOptimizer(lambda v: small if len(v.shape) < 2 else large)


def _constant(rate):
    return getattr(rate, "initial_learning_rate", rate)


def _ftrl(rate):
    """Return Ftrl of a constant rate, whose accumulators begin at almost nothing.

    It has weights in a closed form of what it accumulated. By 0.1, the default, those
    that a network begins with count for nearly nothing there, and by a rate that goes
    to 0 all weights do: no network trains then.
    """
    return optimizers.Ftrl(_constant(rate), initial_accumulator_value=1e-10)


def _adafactor(rate):
    """Return Adafactor that takes a row and a column without gradients.

    By 1e-30, the default, the product of their two means is 0 in float32, and the
    weights are no numbers.
    """
    return optimizers.Adafactor(rate, epsilon_1=1e-15)


# How an optimizer is made with a learning rate, and which rate is usual.
INNER = {
    "SGD": (optimizers.SGD, 0.3),
    "SGD momentum": (lambda rate: optimizers.SGD(rate, 0.9), 0.1),
    "SGD Nesterov": (lambda rate: optimizers.SGD(rate, 0.9, nesterov=True), 0.1),
    "NovoGrad": (tf_dgc.NovoGrad, 0.02),
    "Adam": (optimizers.Adam, 2e-3),
    "AdamW": (optimizers.AdamW, 2e-3),
    "Adam AMSGrad": (lambda rate: optimizers.Adam(rate, amsgrad=True), 2e-3),
    "Nadam": (optimizers.Nadam, 2e-3),
    "Adamax": (optimizers.Adamax, 4e-3),
    "RMSprop": (optimizers.RMSprop, 1e-3),
    "Adagrad": (optimizers.Adagrad, 0.03),
    "Adadelta": (optimizers.Adadelta, 1.0),
    "Lamb": (optimizers.Lamb, 1e-2),
    "Lion": (optimizers.Lion, 3e-4),
    "Ftrl": (_ftrl, 0.03),
    "Adafactor": (_adafactor, 1e-2),
    "Muon": (optimizers.Muon, 1e-3),
    "MultiOptimizer": (_mixed, 2e-3),
}

if hasattr(optimizers, "ScheduleFreeAdamW"):  # of Keras 3.15

    class ScheduleFree(optimizers.ScheduleFreeAdamW):
        """ScheduleFreeAdamW that begins at the weights of its first step.

        Keras's begins at those that it is built for, and a `Trainer` draws them anew
        for each run.
        """

        def update_step(self, gradient, variable, learning_rate):
            """Update a variable."""
            begun = self._momentums[self._get_variable_index(variable)]
            first = keras.ops.equal(self.iterations, 0)
            self.assign(begun, keras.ops.where(first, variable, begun))
            super().update_step(gradient, variable, learning_rate)

    def _schedule_free(rate):
        """Return it with a constant rate, the first one of a schedule."""
        return ScheduleFree(_constant(rate))

    INNER["ScheduleFreeAdamW"] = (_schedule_free, 2.5e-3)

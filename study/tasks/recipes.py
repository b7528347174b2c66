"""The recipe of each task: tuned for the dense run, and used by all methods."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Hyperparameters of SGD with momentum, and of the warm-up.

    Attributes:
        batch_size: number of examples per worker and step.
        rate: learning rate at the start.
        momentum: coefficient of the momentum.
        nesterov: whether the momentum is Nesterov's.
        clipnorm: global norm to which a gradient is clipped, or None.
        weight_decay: Keras's decoupled weight decay, or None.
        stages: (share of the steps, factor of the rate) from which the factor applies;
            empty for a cosine decay to 0.
        warmup_epochs: length of the sparsity warm-up in epochs.
    """

    batch_size: int
    rate: float
    momentum: float = 0.9
    nesterov: bool = False
    clipnorm: float | None = None
    weight_decay: float | None = None
    stages: tuple[tuple[float, float], ...] = ()
    warmup_epochs: float = 1.0

    def sgd(self, steps):
        """Return the optimizer of a dense run with this number of steps."""
        import keras

        return keras.optimizers.SGD(
            self.schedule(steps),
            self.momentum,
            self.nesterov,
            global_clipnorm=self.clipnorm,
            weight_decay=self.weight_decay,
        )

    def schedule(self, steps):
        """Return the learning-rate schedule of a run with this number of steps."""
        from keras.optimizers import schedules

        if not self.stages:
            return schedules.CosineDecay(self.rate, steps)
        boundaries = [round(share * steps) for share, _ in self.stages]
        rates = [self.rate, *(self.rate * factor for _, factor in self.stages)]
        return schedules.PiecewiseConstantDecay(boundaries, rates)


RECIPES = {
    # He et al. (2016), section 4.2. Their L2 penalty of 1e-4, which a momentum of 0.9
    # multiplies by ten, is a weight decay of 1e-3 in Keras's decoupled form.
    "cifar10": Recipe(
        batch_size=32,
        rate=0.1,
        weight_decay=1e-3,
        stages=((0.5, 0.1), (0.75, 0.01)),
        warmup_epochs=4,
    ),
    # Zaremba et al. (2014): the rate is halved in each epoch from the fifth of 13 on.
    # Momentum and clipping as in Lin et al. (2018). They sum losses over 20 words, and
    # this takes the mean, which divides the threshold by 20.
    "ptb": Recipe(
        batch_size=20,
        rate=2.0,
        nesterov=True,
        clipnorm=0.25,
        stages=tuple((epoch / 13, 0.5 ** (epoch - 3)) for epoch in range(4, 13)),
    ),
    # The settings of `small.py`.
    "mnist": Recipe(batch_size=32, rate=0.1),
    "shakespeare": Recipe(batch_size=16, rate=1.5, clipnorm=1.0),
}

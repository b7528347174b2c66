"""`Diagnostics`: what an optimizer checks and measures during training."""

import dataclasses

import keras

from tf_dgc import arguments
from tf_dgc.arguments import show
from tf_dgc.optimizers.config import FrozenSettings


@keras.saving.register_keras_serializable(package="tf_dgc")
@dataclasses.dataclass(frozen=True)
class Diagnostics(FrozenSettings):
    """What an optimizer checks and measures during training.

    >>> diagnostics = tf_dgc.Diagnostics(track_staleness=True)
    >>> optimizer = tf_dgc.DGCOptimizer(sgd, diagnostics=diagnostics)

    Args:
        check_every: number of steps, or of rounds of local steps, between comparisons
            of the checksums of weights that must be equal on all workers. They are sent
            with the gradients. None: never.
        on_divergence: action of all workers if weights differ: "raise", before anything
            is updated, or "warn". Both name workers and variables.
        track_staleness: whether `DGCOptimizer` and `CompressedOptimizer` record when
            each entry was last sent, for `staleness`; takes 4 bytes per entry, which
            are not saved.
        track_consensus_distance: whether `LocalOptimizer` measures
            `consensus_distance` at the end of each round, with one more collective of
            4 kB.

    Raises:
        ValueError: for other values.
    """

    check_every: int | None = 1000
    on_divergence: str = "raise"
    track_staleness: bool = False
    track_consensus_distance: bool = False

    def __post_init__(self) -> None:
        if self.check_every is not None:
            rest = ", or None for no check whether workers differ"
            every = arguments.check_whole(
                "check_every", self.check_every, 1, " of steps", rest
            )
            object.__setattr__(self, "check_every", every)
        if self.on_divergence not in ("raise", "warn"):
            raise ValueError(
                '`on_divergence` must be "raise" or "warn". '
                f"Received: on_divergence={show(self.on_divergence)}"
            )
        for name in ("track_staleness", "track_consensus_distance"):
            value = arguments.check_bool(name, getattr(self, name))
            object.__setattr__(self, name, value)


def check_diagnostics(
    diagnostics: Diagnostics, class_name: str, unsupported: str
) -> None:
    """Raise `ValueError` for other classes, and for a diagnostic that is unsupported.

    `unsupported` names a field that an optimizer of `class_name` does not have.
    """
    if not isinstance(diagnostics, Diagnostics):
        raise ValueError(
            "`diagnostics` must be a `tf_dgc.Diagnostics`, for example "
            "`tf_dgc.Diagnostics(check_every=None)`. Received: "
            f"diagnostics={show(diagnostics)}"
        )
    if getattr(diagnostics, unsupported):
        raise ValueError(
            f"A `{class_name}` has no `{unsupported}`. Leave it out. Received: "
            f"diagnostics={diagnostics!r}"
        )

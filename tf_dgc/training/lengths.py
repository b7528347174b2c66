"""How many batches the workers of a loop have, and whether that is known."""

import math
import warnings

from tf_dgc._internals import trainer
from tf_dgc.training.iterators import DistributedBatches

_UNKNOWN, _INFINITE = -2, -1  # numbers of batches


def number_of_batches(loop: trainer.Loop, batches: DistributedBatches) -> int:
    """Return how many batches this worker has, or a negative number.

    Args:
        loop: loop of Keras that is about to begin an epoch.
        batches: its distributed data set.
    """
    number = _INFINITE if batches.is_infinite else loop.num_batches
    return _UNKNOWN if number is None else number


def are_alike(numbers: set[int]) -> bool:
    """Return whether no worker can have a batch when another one has none.

    Args:
        numbers: numbers of batches of all workers, without repetitions.
    """
    return len(numbers) == 1 and _UNKNOWN not in numbers


def check(numbers: set[int], number: int, loop: trainer.Loop) -> None:
    """Raise `ValueError` if workers are known to leave the loop at different steps.

    Args:
        numbers: numbers of batches of all workers, without repetitions.
        number: number of this worker's batches.
        loop: loop of Keras, in which each worker begins its data set anew, or leaves,
            after as many batches as it knows of, whatever the others have.
    """
    sets = "validation data sets" if loop.is_validation else "data sets"
    if _INFINITE in numbers and len(numbers) > 1:
        raise ValueError(
            f"The {sets} of all workers must be endless (`Dataset.repeat()`), or "
            "none of them. Received: on this worker "
            f"{'an endless' if number == _INFINITE else 'a finite'} one."
        )
    told = numbers - {_UNKNOWN}
    if len(numbers) > 1 and min(told) < loop.batches_left:
        raise ValueError(
            f"The {sets} of all workers must have the same number of batches, since "
            f"none can take a step without the others. Use `Dataset.repeat()` with "
            f"`{loop.limit}`, or on all workers data sets that do not tell their "
            "lengths, such as `Dataset.filter(lambda *_: True)` makes: then who has no "
            f"batch left goes on with empty ones. Received: {_describe(numbers)}, on "
            f"this worker {'an unknown number' if number == _UNKNOWN else number}, for "
            f"{_describe_steps(loop)}."
        )


def _describe(numbers: set[int]) -> str:
    """Return what data sets there are, for messages."""
    told = sorted(n for n in numbers if n != _UNKNOWN)
    found = f"data sets of {' and '.join(map(str, told))} batches" if told else ""
    if _UNKNOWN in numbers:
        found += " and " * bool(found) + "a data set that does not tell its length"
    return found


def _describe_steps(loop: trainer.Loop) -> str:
    if math.isinf(loop.batches_left):
        return f"all of them, without `{loop.limit}`"
    together = ", in all epochs" if loop.name == "fit" else ""
    return f"{loop.batches_left} batches by `{loop.limit}`{together}"


def warn_of_questions(numbers: set[int]) -> None:
    """Warn that workers meet in every step, though their optimizer needs nobody.

    Args:
        numbers: numbers of batches of all workers, without repetitions.
    """
    warnings.warn(
        "Workers ask each other in every step whether one has another batch, a round "
        "trip, although the steps of their optimizer need nobody. Use "
        "`Dataset.repeat()` with `steps_per_epoch`, or data sets of one known length "
        "on all workers (`tf.data.experimental.assert_cardinality`). Received: "
        + _describe(numbers),
        stacklevel=2,
    )

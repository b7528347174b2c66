"""How many batches the workers of a loop have, and whether that is known."""

import warnings
from typing import Any

from tf_dgc._internals import trainer

_UNKNOWN, _INFINITE = -2, -1  # numbers of batches


def number_of_batches(loop: trainer.Loop, iterator: Any) -> int:
    """Return how many batches this worker has, or a negative number.

    Args:
        loop: loop of Keras that is about to begin an epoch.
        iterator: iterator of its distributed data set.
    """
    number = _INFINITE if trainer.is_infinite(iterator) else loop.num_batches
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
        loop: loop of Keras, which leaves it after as many batches as it knows of.
    """
    if _INFINITE in numbers and len(numbers) > 1:
        raise ValueError(
            "The data sets of all workers must be endless (`Dataset.repeat()`), or "
            "none of them. Received: on this worker "
            f"{'an endless' if number == _INFINITE else 'a finite'} one."
        )
    if len(numbers) > 1 and _UNKNOWN not in numbers and not loop.is_limited:
        raise ValueError(
            "All workers must have the same number of batches, since none can take a "
            f"step without the others. Pass `{loop.limit}`, or data sets that do not "
            "tell their lengths, such as `Dataset.filter(lambda *_: True)` makes: then "
            "who has no batch left goes on with empty ones. Received: data sets of "
            f"{' and '.join(map(str, sorted(numbers)))} batches, on this worker "
            f"{number}."
        )


def warn_of_questions(numbers: set[int]) -> None:
    """Warn that workers meet in every step, though their optimizer needs nobody.

    Args:
        numbers: numbers of batches of all workers, without repetitions.
    """
    told = sorted(n for n in numbers if n != _UNKNOWN)
    found = f"data sets of {' and '.join(map(str, told))} batches" if told else ""
    if _UNKNOWN in numbers:
        found += " and " * bool(found) + "a data set that does not tell its length"
    warnings.warn(
        "Workers ask each other in every step whether one has another batch, a round "
        "trip, although the steps of their optimizer need nobody. Use "
        "`Dataset.repeat()` with `steps_per_epoch`, or data sets of one known length "
        "on all workers (`tf.data.experimental.assert_cardinality`). Received: "
        + found,
        stacklevel=2,
    )

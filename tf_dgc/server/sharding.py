"""Shards: which server keeps which variables."""

from collections.abc import Sequence


def shards(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Return the indices of each server's variables, ascending; the same everywhere.

    The largest variable first, each goes whole to the server that has least by then.
    So no server has more than the mean and one variable; one that is larger than the
    mean makes its server's load.

    Args:
        sizes: bytes of each variable, as many variables as servers or more.
        number: number of servers.
    """
    loads, found = [0] * number, [[] for _ in range(number)]  # type: ignore[var-annotated]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = loads.index(min(loads))
        loads[least] += max(1, sizes[index])
        found[least].append(index)
    return [sorted(indices) for indices in found]

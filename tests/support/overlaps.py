"""The `collective` argument with and without overlap with the backward pass."""

from tf_dgc.collectives import Auto, Overlapped


def collective(overlap, algorithm="ring"):
    """Return the argument `collective` of an optimizer.

    Args:
        overlap: False for never, None for the algorithm's default, True for always, or
            the seconds of a backward pass.
        algorithm: an algorithm, or its name.
    """
    if overlap is None:
        return algorithm
    if overlap is False:
        return Auto(overlap=False) if algorithm == "auto" else algorithm
    return Overlapped(algorithm, None if overlap is True else overlap)

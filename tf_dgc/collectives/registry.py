"""The collective algorithms by name."""

from tf_dgc.arguments import show
from tf_dgc.collectives.algorithm import CollectiveAlgorithm
from tf_dgc.collectives.auto import Auto
from tf_dgc.collectives.butterfly import Butterfly
from tf_dgc.collectives.gtopk import GTopK
from tf_dgc.collectives.hierarchical import Hierarchical
from tf_dgc.collectives.oktopk import OkTopK, TwoWay
from tf_dgc.collectives.ring import Ring
from tf_dgc.collectives.star import Star
from tf_dgc.collectives.tree import Tree

_ALGORITHMS: list[type[CollectiveAlgorithm]] = [
    Ring,
    Tree,
    Butterfly,
    Star,
    GTopK,
    OkTopK,
    TwoWay,
    Hierarchical,
    Auto,
]
_BY_NAME = {algorithm.name: algorithm for algorithm in _ALGORITHMS}


def names() -> list[str]:
    """Return the names of the algorithms that `get` accepts."""
    return list(_BY_NAME)


def get(identifier: CollectiveAlgorithm | str) -> CollectiveAlgorithm:
    """Return a collective algorithm.

    Args:
        identifier: a `CollectiveAlgorithm`, or the name of one for its defaults.

    Raises:
        ValueError: if `identifier` is anything else.
    """
    if isinstance(identifier, CollectiveAlgorithm):
        return identifier
    if isinstance(identifier, str) and identifier in _BY_NAME:
        return _BY_NAME[identifier]()
    raise ValueError(
        f"`collective` must be one of {', '.join(map(repr, _BY_NAME))}, or a "
        f"`tf_dgc.collectives.CollectiveAlgorithm`. Received: "
        f"collective={show(identifier)}"
    )

"""Exchanges: along which ways what workers sum and gather travels.

Knows neither methods nor strategies. May import `collectives` and what that may.
"""

from tf_dgc.arguments import show
from tf_dgc.exchanges import graphs, overlap
from tf_dgc.exchanges.auto import Auto
from tf_dgc.exchanges.base import Cost, Exchange, Place, Rounds
from tf_dgc.exchanges.butterfly import Butterfly
from tf_dgc.exchanges.by_owners import ByOwners
from tf_dgc.exchanges.gossip import Gossip
from tf_dgc.exchanges.gtopk import GTopK
from tf_dgc.exchanges.hierarchical import Hierarchical
from tf_dgc.exchanges.model import Asked, Links, predict
from tf_dgc.exchanges.oktopk import OkTopK
from tf_dgc.exchanges.ring import Ring
from tf_dgc.exchanges.star import Star
from tf_dgc.exchanges.tree import Tree
from tf_dgc.exchanges.twoway import TwoWay

__all__ = [
    "Asked",
    "Auto",
    "Butterfly",
    "ByOwners",
    "Cost",
    "Exchange",
    "GTopK",
    "Gossip",
    "Hierarchical",
    "Links",
    "OkTopK",
    "Place",
    "Ring",
    "Rounds",
    "Star",
    "Tree",
    "TwoWay",
    "get",
    "graphs",
    "names",
    "overlap",
    "predict",
]

_KINDS: tuple[type[Exchange], ...] = (
    *(Ring, Tree, Butterfly, Star, GTopK, OkTopK, TwoWay, Hierarchical, Auto),
)
_KNOWN = {kind.name: kind for kind in _KINDS}


def names() -> list[str]:
    """Return the names that `get` knows."""
    return list(_KNOWN)


def get(identifier: Exchange | str) -> Exchange:
    """Return an exchange.

    Args:
        identifier: exchange, or the name of a kind for its defaults.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(identifier, Exchange):
        return identifier
    if isinstance(identifier, str) and identifier in _KNOWN:
        return _KNOWN[identifier]()
    raise ValueError(
        f"`exchange` must be one of {', '.join(map(repr, _KNOWN))}, or a "
        f"`tf_dgc.exchanges.Exchange`. Received: exchange={show(identifier)}"
    )

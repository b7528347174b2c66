"""Collective algorithms: how sums and gathers travel between workers."""

from tf_dgc.collectives import cost_model, graphs
from tf_dgc.collectives.algorithm import AlgorithmSteps, CollectiveAlgorithm, Cost, Rank
from tf_dgc.collectives.auto import Auto
from tf_dgc.collectives.butterfly import Butterfly
from tf_dgc.collectives.cost_model import LinkSpeeds, RequestSize, predict_seconds
from tf_dgc.collectives.gossip import Gossip
from tf_dgc.collectives.gtopk import GTopK
from tf_dgc.collectives.hierarchical import Hierarchical
from tf_dgc.collectives.oktopk import OkTopK, OwnedRegionsAlgorithm, TwoWay
from tf_dgc.collectives.overlapped import Overlapped
from tf_dgc.collectives.registry import get, names
from tf_dgc.collectives.ring import Ring
from tf_dgc.collectives.star import Star
from tf_dgc.collectives.tree import Tree

__all__ = [
    "AlgorithmSteps",
    "Auto",
    "Butterfly",
    "CollectiveAlgorithm",
    "Cost",
    "GTopK",
    "Gossip",
    "Hierarchical",
    "LinkSpeeds",
    "OkTopK",
    "Overlapped",
    "OwnedRegionsAlgorithm",
    "Rank",
    "RequestSize",
    "Ring",
    "Star",
    "Tree",
    "TwoWay",
    "cost_model",
    "get",
    "graphs",
    "names",
    "predict_seconds",
]

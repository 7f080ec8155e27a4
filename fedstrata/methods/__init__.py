"""Methods of federated learning: one file per method or family, one registry, one way to combine them."""

from fedstrata.methods import fedavg, fedavgm, fedbn, fedprox, local  # each registers its methods
from fedstrata.methods.base import Clients, Facts, Message, Part, Phase, Server, Step
from fedstrata.methods.composition import Method
from fedstrata.methods.registry import methods

__all__ = [
    "Clients",
    "Facts",
    "Message",
    "Method",
    "Part",
    "Phase",
    "Server",
    "Step",
    "fedavg",
    "fedavgm",
    "fedbn",
    "fedprox",
    "local",
    "methods",
]

"""Methods of federated learning: one file per method or family, one registry, one way to combine them."""

from fedstrata.methods import (
    fedavg,
    fedavgm,
    fedbn,
    fedprox,
    lips,
    local,
    lws,
    player,
    ssfl,
)  # each registers its methods
from fedstrata.methods.base import Clients, Facts, Message, Part, Phase, Probe, Server, Step, Training
from fedstrata.methods.composition import Method
from fedstrata.methods.registry import methods

__all__ = [
    "Clients",
    "Facts",
    "Message",
    "Method",
    "Part",
    "Phase",
    "Probe",
    "Server",
    "Step",
    "Training",
    "fedavg",
    "fedavgm",
    "fedbn",
    "fedprox",
    "lips",
    "local",
    "lws",
    "methods",
    "player",
    "ssfl",
]

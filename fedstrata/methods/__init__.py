"""Methods of federated learning: one file per method or family, one registry, one way to combine them."""

from importlib import import_module
from pkgutil import iter_modules

from fedstrata.methods.contract.composition import Method
from fedstrata.methods.contract.part import FAMILIES, Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Phase, Probe, Proxy, Server, Step, Training

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")  # a method is registered by the file that defines it
methods.order(lambda part: FAMILIES.index(part.facts.family))

__all__ = [
    "Clients",
    "Facts",
    "Message",
    "Method",
    "Part",
    "Phase",
    "Probe",
    "Proxy",
    "Server",
    "Step",
    "Training",
    "methods",
]

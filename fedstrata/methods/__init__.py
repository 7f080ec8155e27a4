"""Methods of federated learning: a file for each method, called by its name.

What a method is made of lies in two folders: :mod:`fedstrata.methods.contract`, the hooks and how parts are put
together, and :mod:`fedstrata.methods.mechanisms`, what several methods share.
"""

from importlib import import_module
from pkgutil import iter_modules

from fedstrata.methods.contract.composition import Method
from fedstrata.methods.contract.declarations import FAMILIES, Decision, Facts, Matter, Needs, Touches
from fedstrata.methods.contract.exchange import Exchange
from fedstrata.methods.contract.part import Kept, Metrics, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import (
    Clients,
    Declared,
    LocalStep,
    Message,
    ModelAndMemory,
    Outline,
    Phase,
    Probe,
    Proxy,
    Server,
    Stretch,
    Training,
)

for _module in iter_modules(__path__):
    if not _module.ispkg:
        import_module(f"{__name__}.{_module.name}")  # a method is registered by the file that defines it
methods.order(lambda part: FAMILIES.index(part.facts.family))

__all__ = [
    "Clients",
    "Decision",
    "Declared",
    "Exchange",
    "Facts",
    "Kept",
    "LocalStep",
    "Matter",
    "Message",
    "Method",
    "Metrics",
    "ModelAndMemory",
    "Needs",
    "Outline",
    "Part",
    "Phase",
    "Probe",
    "Proxy",
    "Server",
    "Stretch",
    "Touches",
    "Training",
    "methods",
]

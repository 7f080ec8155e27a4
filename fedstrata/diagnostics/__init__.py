"""What happens to the layers, from round to round and from client to client.

Each diagnostic is a small class (:class:`~fedstrata.diagnostics.contract.Diagnostic`) over pure functions on tensors,
which stand beside it and serve other people's training loops too.
"""

from importlib import import_module
from pkgutil import iter_modules

from fedstrata.diagnostics.contract import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.diagnostics.inertia import layer_cosines, layer_updates
from fedstrata.diagnostics.naming import quantity_of

for _module in iter_modules(__path__):
    if not _module.ispkg:
        import_module(f"{__name__}.{_module.name}")  # a diagnostic is registered by the file that defines it

__all__ = [
    "Diagnostic",
    "Measured",
    "Need",
    "Quantity",
    "Seen",
    "diagnostics",
    "layer_cosines",
    "layer_updates",
    "quantity_of",
]

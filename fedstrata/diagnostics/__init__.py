"""What happens to the layers, from round to round and from client to client.

Each diagnostic is a small class (:class:`~fedstrata.diagnostics.contract.Diagnostic`) over pure functions on tensors,
which stand beside it and serve other people's training loops too.
"""

from importlib import import_module
from pkgutil import iter_modules

from fedstrata.diagnostics.contract import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.diagnostics.curvature import hutchinson
from fedstrata.diagnostics.distance import feature_distances, label_distances, transport_cost
from fedstrata.diagnostics.drift import disagreement
from fedstrata.diagnostics.inertia import (
    LayerNumbers,
    layer_changes,
    layer_cosines,
    layer_updates,
    measure_changes,
    read_changes,
)
from fedstrata.diagnostics.masks import between_clients
from fedstrata.diagnostics.naming import quantity_of
from fedstrata.diagnostics.norms import client_norms
from fedstrata.diagnostics.own_loops import Watch
from fedstrata.diagnostics.representations import linear_cka
from fedstrata.diagnostics.shrinking import applied_factor, regularisation_ratio
from fedstrata.diagnostics.weights import histogram, moments
from fedstrata.diagnostics.where_to_federate import cumulated_split, gradient_variance
from fedstrata.diagnostics.zeros import zeroed

for _module in iter_modules(__path__):
    if not _module.ispkg:
        import_module(f"{__name__}.{_module.name}")  # a diagnostic is registered by the file that defines it

__all__ = [
    "Diagnostic",
    "LayerNumbers",
    "Measured",
    "Need",
    "Quantity",
    "Seen",
    "Watch",
    "applied_factor",
    "between_clients",
    "client_norms",
    "cumulated_split",
    "diagnostics",
    "disagreement",
    "feature_distances",
    "gradient_variance",
    "histogram",
    "hutchinson",
    "label_distances",
    "layer_changes",
    "layer_cosines",
    "layer_updates",
    "linear_cka",
    "measure_changes",
    "moments",
    "quantity_of",
    "read_changes",
    "regularisation_ratio",
    "transport_cost",
    "zeroed",
]

"""What happens to the layers, from round to round and from client to client.

Each diagnostic is a small class (:class:`~fedstrata.diagnostics.contract.Diagnostic`) over pure functions on tensors,
which stand beside it and serve other people's training loops too.
"""

from fedstrata.diagnostics.contract import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.diagnostics.drift import Drift, disagreement
from fedstrata.diagnostics.inertia import layer_cosines, layer_updates

__all__ = [
    "Diagnostic",
    "Drift",
    "Measured",
    "Need",
    "Quantity",
    "Seen",
    "diagnostics",
    "disagreement",
    "layer_cosines",
    "layer_updates",
]

"""FedStrata: layer-wise and sparse federated learning."""

from fedstrata import _platform  # noqa: F401 - before torch
from fedstrata._version import __version__
from fedstrata.api import Result, resume, run
from fedstrata.data import Dataset, Split, from_arrays, from_clients
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.layers import LayerMap
from fedstrata.methods import Clients, Facts, Message, Method, Part, Phase, Server, Step, methods
from fedstrata.spec import parameter

__all__ = [
    "Clients", "Dataset", "Experiment", "Facts", "FedStrataError", "FedStrataWarning", "LayerMap", "Message", "Method", "Part", "Phase", "Result",
    "Server", "Split", "Step", "__version__", "from_arrays", "from_clients", "methods", "parameter", "resume", "run",
]  # fmt: skip

"""FedStrata: layer-wise and sparse federated learning.

Names that need PyTorch are imported when they are first used, so that ``import fedstrata`` and the command line start
at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedstrata import _platform, plugins  # noqa: F401 - before torch; registries find installed packages
from fedstrata._version import __version__
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.spec import parameter

if TYPE_CHECKING:
    from fedstrata.api import Result, extend, load, resume, run
    from fedstrata.callbacks import Callback, RoundView, StopRun
    from fedstrata.comparing import Comparison, compare
    from fedstrata.data import Dataset, Split, from_arrays, from_clients, from_table
    from fedstrata.layers import LayerMap
    from fedstrata.methods import (
        Clients,
        Facts,
        Kept,
        LocalStep,
        Message,
        Method,
        Needs,
        Part,
        Phase,
        Probe,
        Server,
        Touches,
        Training,
    )
    from fedstrata.scores import metric, score
    from fedstrata.trained import TrainedModel

__all__ = [
    "Callback", "Clients", "Comparison", "Dataset", "Experiment", "Facts", "FedStrataError", "FedStrataWarning", "Kept",
    "LayerMap", "LocalStep", "Message", "Method", "Needs", "Part", "Phase", "Probe", "Result", "RoundView", "Server",
    "Split", "StopRun", "Touches", "TrainedModel", "Training", "__version__", "compare", "extend", "from_arrays",
    "from_clients", "from_table", "load", "metric", "parameter", "resume", "run", "score",
]  # fmt: skip

_HOMES = {
    "fedstrata.api": ("Result", "extend", "load", "resume", "run"),
    "fedstrata.callbacks": ("Callback", "RoundView", "StopRun"),
    "fedstrata.comparing": ("Comparison", "compare"),
    "fedstrata.data": ("Dataset", "Split", "from_arrays", "from_clients", "from_table"),
    "fedstrata.layers": ("LayerMap",),
    "fedstrata.methods": (
        "Clients", "Facts", "Kept", "LocalStep", "Message", "Method", "Needs", "Part", "Phase", "Probe", "Server",
        "Touches", "Training",
    ),
    "fedstrata.trained": ("TrainedModel",),
    "fedstrata.scores": ("metric", "score"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    """List what is public, imported or not."""
    return sorted({*globals(), *__all__})

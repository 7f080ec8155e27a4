"""What methods need that work on the parameters which clients share."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstrata.experiment import Experiment
from fedstrata.methods.contract.views import Clients, Declared, Server
from fedstrata.optimisers import Optimiser, optimisers


def shared_parameters(view: Clients | Server) -> list[str]:
    """Name the parameters that clients share with the server."""
    shared = view.model if isinstance(view, Server) else view.shared
    return [name for name in view.layers.parameter_names if name in shared]


def usual_optimiser() -> Optimiser:
    """Make the optimiser of an experiment that names none; methods that bring their own say where another is vain."""
    return optimisers.make(Experiment.optimiser)


def equal_weights(declared: Declared) -> Tensor:
    """Let all participants count alike ``[K]``, for methods whose authors count clients, not samples."""
    return torch.ones_like(declared.sizes, dtype=torch.float64)

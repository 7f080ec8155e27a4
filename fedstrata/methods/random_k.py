"""Random-k: a random mask at each client, the plainest sparse baseline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Server
from fedstrata.methods.mechanisms.masking import SCOPES, OwnMasks, maskable, random_masks
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, under

PAPER = (
    "Baseline of Ohib, Thapaliya et al., SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient "
    "Federated Learning, Appendix A.8"
)


@methods.register("random-k")
@dataclass(frozen=True)
class RandomK(OwnMasks):
    r"""Each client trains and sends under a random mask of its own, which never changes.

    An entry of the global model is the mean over the participants whose masks keep it, by their samples:
    :math:`w = \sum_k p_k m_k w_k / \sum_k p_k m_k`; where no mask does, it stays as it is. SSFL's text leaves open how
    masked entries are averaged; this is DisPFL's way, and ``random-clientwise`` that of SSFL's code. Both ways, only
    what the client's mask keeps travels; a client is tested under its mask. What is personal to a client is not
    masked. One random mask for all clients (Section 4.2.1) is ``ssfl(topology=random)``.

    Defaults:
        sparsity: paper, Section 4.1.
        scope: ours; the paper does not say what is masked.
    """

    facts: ClassVar[Facts] = Facts("sparse", PAPER)

    sparsity: float = parameter(0.5, "The fraction of weights that are masked.", low=0, below=1)
    scope: str = parameter("weights", "What is masked: the weights of all layers, or all parameters.", choices=SCOPES)

    def masked(self, layers: LayerMap) -> list[str]:
        """Name what is masked."""
        return maskable(layers, self.scope)

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Draw each client's mask, over what clients share."""
        names = [name for name in self.masked(clients.layers) if name in clients.shared]
        return self._drawn({name: model[name].shape[1:] for name in names}, clients, clients.ids)

    def server_memory(self, server: Server) -> Tensors:
        """Draw the same masks, for all clients."""
        names = [name for name in self.masked(server.layers) if name in server.model]
        return self._drawn({name: server.model[name].shape for name in names}, server, range(server.clients))

    def _drawn(self, shapes: dict[str, torch.Size], view: Clients | Server, clients: Iterable[int]) -> Tensors:
        if self.sparsity == 0:
            return {}
        return under("mask", random_masks(shapes, self.sparsity, view.seed, tuple(clients), view.sizes.device))

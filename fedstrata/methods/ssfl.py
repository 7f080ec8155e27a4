"""SSFL: one shared sparse subnetwork, found before training by the clients' saliency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional import aggregate_scores, saliency, top_mask
from fedstrata.layers import LayerMap
from fedstrata.methods.base import Clients, Facts, Message, Part, Probe, Server, Step, Training
from fedstrata.methods.registry import methods
from fedstrata.methods.selection import SETS_WEIGHTS, weights_of
from fedstrata.rng import permutation, uniform
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


@methods.register("ssfl")
@dataclass(frozen=True)
class SSFL(Part):
    r"""Find one mask for all clients before training; then train, merge and send only what it keeps.

    Every client scores the weights on one minibatch, :math:`s_k = |\partial L / \partial w \cdot w_0|` (Eq. 2); the
    server averages by data, :math:`s = \sum_k p_k s_k` (Eq. 3), and keeps the :math:`\lfloor (1 - \sigma) d \rfloor`
    largest over the whole model. From then on masked weights are zero at every step and do not travel.

    ``warmup`` trains dense for some rounds before the mask is found (Table 6). ``adapt_at`` finds a new mask before a
    round, as when clients with new data join (Algorithm 2): weights that were masked are scored, and start again, from
    their initial values. ``refresh_every`` does so periodically, and ``growth`` keeps the old mask and only adds to it
    (both named in Appendix A.6). ``topology`` replaces the mask by a random one, or shuffles it inside each tensor
    (Fig. 3a). The paper leaves open what is masked; here it is the weights of convolutions and linear layers
    (``scope=all``: every parameter).
    """

    facts: ClassVar[Facts] = Facts(
        "sparse",
        "Ohib, Thapaliya et al., SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient "
        "Federated Learning",
    )
    claims: ClassVar[tuple[str, ...]] = (SETS_WEIGHTS,)

    sparsity: float = parameter(0.5, "The fraction of weights that are masked.", low=0, below=1)
    batch_size: int = parameter(16, "Samples in a saliency minibatch.", low=1)
    batches: int = parameter(1, "Saliency minibatches per client.", low=1)
    balanced: bool = parameter(False, "Draw saliency minibatches with the client's classes in turn.")
    scope: str = parameter(
        "weights", "What is masked: conv and linear weights, or all parameters.", choices=("weights", "all")
    )
    warmup: int = parameter(0, "Dense rounds before the mask is found.", low=0)
    adapt_at: int | None = parameter(None, "Find a new mask before this round.", low=2)
    refresh_every: int | None = parameter(None, "Find a new mask every so many rounds.", low=1)
    growth: bool = parameter(False, "A new mask keeps all that the old one kept.")
    topology: str = parameter(
        "saliency",
        "The mask: by saliency, the same shuffled inside each tensor, or random.",
        choices=("saliency", "shuffled", "random"),
    )

    def __post_init__(self) -> None:
        """Refuse a new mask before the first one, and growth that never happens."""
        super().__post_init__()
        if self.adapt_at is not None and self.adapt_at <= self.warmup + 1:
            raise FedStrataError(
                f"'ssfl' finds its first mask before round {self.warmup + 1}, so it cannot find a new one before round "
                f"{self.adapt_at}; give a later adapt_at."
            )
        if self.growth and not self._finds_again():
            raise FedStrataError("'ssfl' grows its mask only when it finds a new one; give adapt_at or refresh_every.")

    def exchanges_before(self, round: int) -> int:
        """Find a mask after the warm-up, and again when asked."""
        since = round - self.warmup - 1
        periodic = self.refresh_every is not None and since > 0 and since % self.refresh_every == 0
        return self.sparsity > 0 and (since == 0 or periodic or (since > 0 and round == self.adapt_at))

    def _masked_names(self, layers: LayerMap) -> list[str]:
        return weights_of(layers, "all") if self.scope == "weights" else list(layers.parameter_names)

    def _finds_again(self) -> bool:
        return self.adapt_at is not None or self.refresh_every is not None

    # The mask ---------------------------------------------------------------------------------------------------------

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start dense; keep initial values where masked weights may come back to them."""
        names = self._masked_names(clients.layers)
        initial = {f"init/{name}": model[name] for name in names} if self._finds_again() else {}
        masks = {f"mask/{name}": torch.ones_like(model[name], dtype=torch.bool) for name in names}
        return {**masks, **initial, "found": torch.zeros_like(clients.sizes, dtype=torch.bool)}

    def server_memory(self, server: Server) -> Tensors:
        """Start dense; keep initial values where masked weights may come back to them."""
        names = [name for name in self._masked_names(server.layers) if name in server.model]
        initial = {f"init/{name}": server.model[name] for name in names} if self._finds_again() else {}
        masks = {f"mask/{name}": torch.ones_like(server.model[name], dtype=torch.bool) for name in names}
        return {**masks, **initial, "found": torch.tensor(False)}

    def survey(self, clients: Clients, model: Tensors, probe: Probe) -> Message:
        """Score every weight on the client's own data, masked ones at their initial values.

        A random mask needs no scores.
        """
        if self.topology == "random":
            return Message()
        memory = clients.memory
        whole = dict(model)
        for name in self._masked_names(clients.layers):
            if f"init/{name}" in memory:
                whole[name] = model[name].where(memory[f"mask/{name}"], memory[f"init/{name}"])
        gradients = probe.gradients(whole, self.batch_size, self.batches, self.balanced)
        scored = [name for name in self._masked_names(clients.layers) if name in clients.shared]
        return Message({name: saliency(gradients[name], whole[name]) for name in scored})

    def conclude(self, server: Server, replies: Message) -> tuple[Tensors, Tensors]:
        """Average the scores, keep the largest, and cut the global model down to them."""
        model, memory = {}, {**server.memory, "found": torch.tensor(True)}
        for name, mask in self._new_masks(server, replies).items():
            old = server.memory[f"mask/{name}"]
            kept = mask | old if self.growth and server.memory["found"] else mask
            values = server.model[name].where(old, memory.get(f"init/{name}", server.model[name].new_zeros(())))
            model[name] = values * kept
            memory[f"mask/{name}"] = kept
        return model, memory

    def _new_masks(self, server: Server, replies: Message) -> Tensors:
        keys = {name: torch.tensor(server.key(f"ssfl/{name}")) for name in _masked(server.memory)}
        if self.topology == "random":
            drawn = {name: server.model[name] for name in keys}
            scores = {name: uniform(keys[name], tensor.shape).to(tensor.device) for name, tensor in drawn.items()}
        else:
            scores = {name: aggregate_scores(tensor, server.sizes) for name, tensor in replies.tensors.items()}
        masks = top_mask(scores, self.sparsity)
        if self.topology == "shuffled":
            orders = {name: permutation(keys[name], mask.numel()) for name, mask in masks.items()}
            return {name: mask.flatten()[orders[name]].view(mask.shape) for name, mask in masks.items()}
        return masks

    def announce(self, server: Server) -> Message:
        """Send the mask, one bit per weight."""
        return Message({name: _mask_of(server.memory, name)[None] for name in _masked(server.memory)})

    def adopt(self, clients: Clients, announcement: Message) -> Tensors:
        """Take the mask over."""
        count = len(clients.ids)
        masks = {f"mask/{name}": mask.expand(count, *mask.shape[1:]) for name, mask in announcement.tensors.items()}
        return {**clients.memory, **masks, "found": torch.ones_like(clients.sizes, dtype=torch.bool)}

    # Inside the mask --------------------------------------------------------------------------------------------------

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send only what the mask keeps."""
        return _only_kept(message, {name: _mask_of(server.memory, name)[None] for name in _found(server.memory)})

    def gradients(self, clients: Clients, step: Step, gradients: Tensors) -> Tensors:
        """Train only what the mask keeps, so that momentum stays inside too."""
        masked = {
            name: gradient * clients.memory[f"mask/{name}"]
            for name, gradient in gradients.items()
            if f"mask/{name}" in clients.memory
        }
        return {**gradients, **masked}

    def perturb(self, clients: Clients, start: Tensors) -> Tensors:
        """Start inside the mask, also with weights that are personal."""
        return {**start, **{name: start[name] * _mask_of(clients.memory, name) for name in _masked(clients.memory)}}

    def project(self, clients: Clients, step: Step, parameters: Tensors) -> Tensors:
        """Keep masked weights at zero, whatever the optimiser does."""
        return self.perturb(clients, parameters)

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send only what the mask keeps."""
        return _only_kept(message, {name: _mask_of(clients.memory, name) for name in _found(clients.memory)})

    def refine(self, server: Server, replies: Message, shares: Tensor, new: Tensors) -> tuple[Tensors, Tensors]:
        """Keep masked weights at zero at the server too, where momentum from before the mask would move them."""
        masked = {name: new[name] * _mask_of(server.memory, name) for name in _masked(server.memory) if name in new}
        return {**new, **masked}, server.memory

    def notes(self, layers: LayerMap) -> Iterable[str]:
        """Say that without such weights nothing is masked."""
        if not self._masked_names(layers):
            yield "The model has no convolution or linear weights, so 'ssfl' masks nothing."

    def layer_metrics(self, server: Server) -> dict[str, dict[str, float]]:
        """Tell which part of each layer the mask keeps."""
        if self.sparsity == 0:
            return {}
        kept: dict[str, list[Tensor]] = {}
        for name in _masked(server.memory):
            kept.setdefault(server.layers.of(name).name, []).append(_mask_of(server.memory, name).flatten())
        return {"density": {layer: float(torch.cat(masks).double().mean()) for layer, masks in kept.items()}}


def _only_kept(message: Message, masks: Tensors) -> Message:
    sent = {name: mask for name, mask in masks.items() if name in message.tensors}
    return replace(message, masks={**message.masks, **sent})


def _found(memory: Tensors) -> list[str]:
    """Name what is masked, once a mask is found: before, everything travels as in FedAvg."""
    return _masked(memory) if bool(memory["found"].all()) else []


def _masked(memory: Tensors) -> list[str]:
    return [name.removeprefix("mask/") for name in memory if name.startswith("mask/")]


def _mask_of(memory: Tensors, name: str) -> Tensor:
    return memory[f"mask/{name}"]

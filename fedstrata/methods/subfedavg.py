"""Sub-FedAvg: every client prunes its way to a subnetwork of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import prune
from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Needs, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Declared, Message, ModelAndMemory, Phase, Server, Training
from fedstrata.methods.mechanisms.masking import OwnMasks, divided_at, epoch_ends, everything, keep
from fedstrata.methods.mechanisms.peers import noted
from fedstrata.methods.mechanisms.shared import equal_weights
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align, per_client, under


@methods.register("subfedavg")
@dataclass(frozen=True)
class SubFedAvg(OwnMasks):
    r"""Every client prunes its own small weights, step by step, and shares only what it has left.

    Masks start dense. A client derives two candidates in each round, after its first local epoch and after its last
    (in the middle of a single one): in each weight tensor the ``rate`` smallest of the weights that are left would go.
    It takes the second one over if the two differ by more than ``distance`` (the mean over tensors of the fraction of
    entries that differ: the mask is still moving), less than ``sparsity`` of its weights are pruned, and the pruned
    model is right on more than ``accuracy`` of its samples. The last pruning takes only what is missing, so that the
    target is not overshot.

    The server averages an entry over the clients that kept it, all counting alike: :math:`w = \sum_k m_k w_k / \sum_k
    m_k`; what nobody kept stays as it is. A client gets, and is tested with, the global model under its own mask. Only
    what a mask keeps travels, so that messages shrink as clients prune.

    This is the unstructured variant, with the thresholds that DisPFL's comparison uses. There the mask from before the
    pruning counts at the server, although pruned weights are sent as zeros; here, as the authors define it, what is
    pruned no longer counts. The authors judge a pruning by the client's test set, DisPFL and we by its training set.
    """

    facts: ClassVar[Facts] = Facts(
        "sparse",
        "Vahidian, Morafah and Lin, Personalized Federated Learning by Structured and Unstructured Pruning under Data "
        "Heterogeneity, ICDCS Workshops 2021",
        "https://arxiv.org/abs/2105.00562",
    )
    touches: ClassVar[Touches] = OwnMasks.touches.also(decides=(Decision.GAPS,), relies_on=(Matter.ALL_SENT,))

    sparsity: float = parameter(0.5, "The fraction of weights at which a client stops pruning.", low=0, below=1)
    rate: float = parameter(0.05, "The fraction of the weights left in a tensor that one pruning takes.", low=0, high=1)
    distance: float = parameter(1e-4, "How far the two candidates must be apart.", low=0, high=1)
    accuracy: float = parameter(0.5, "How often the pruned model must be right.", low=0, high=1)

    @property
    def needs(self) -> Needs:
        """The server notes the clients' masks."""
        return Needs(replies=True)

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start dense."""
        return under("mask", everything({name: model[name] for name in self.masked(clients.layers)}))

    def server_memory(self, server: Server) -> Tensors:
        """Know of every client that it starts dense."""
        shared = [name for name in self.masked(server.layers) if name in server.model]
        dense = {name: server.model[name].expand(server.clients, *server.model[name].shape) for name in shared}
        return under("mask", everything(dense))

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Stop after the first epoch to derive a mask."""
        return divided_at(epoch_ends(clients.epochs)[:1])

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Take the new mask over where the conditions hold."""
        masks = clients.memory.group("mask")
        if not masks:
            return training.trained, clients.memory
        rates = self._rates(masks)
        early, late = (self._pruned(masks, model, rates) for model in (training.after_phase[0], training.trained))
        accuracy, _ = clients.probe.test(keep(training.trained, late))
        accepted = (_distance(early, late) > self.distance) & (rates > 0) & (accuracy > self.accuracy)
        chosen = {name: late[name].where(align(accepted, mask), mask) for name, mask in masks.items()}
        return training.trained, under("mask", chosen)

    def _rates(self, masks: Tensors) -> Tensor:
        """Tell which fraction of its weights each client may prune ``[K]``: no more than is missing to the target."""
        kept = torch.stack([per_client(mask).sum(1) for mask in masks.values()]).sum(0).to(torch.float64)
        total = sum(mask[0].numel() for mask in masks.values())
        missing = 1 - (1 - self.sparsity) * total / kept.clamp(min=1)
        return missing.clamp(min=0, max=self.rate)

    def _pruned(self, masks: Tensors, model: Tensors, rates: Tensor) -> Tensors:
        return {
            name: prune(mask, model[name].abs(), (rates * per_client(mask).sum(1) + 1e-9).long(), batched=True)
            for name, mask in masks.items()
        }

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Use what the mask keeps, also right after a pruning."""
        return keep(model, clients.memory.group("mask"))

    def weigh(self, declared: Declared) -> Tensor:
        """Let all clients count alike."""
        return equal_weights(declared)

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Note the participants' new masks."""
        return model, server.memory | noted(server, "mask", replies.masks)


def _distance(first: Tensors, second: Tensors) -> Tensor:
    """Measure how far each client's two masks are apart ``[K]``: the fraction of entries that differ, over tensors."""
    differences = [per_client(mask != second[name]).to(torch.float64).mean(1) for name, mask in first.items()]
    return torch.stack(differences).mean(0)

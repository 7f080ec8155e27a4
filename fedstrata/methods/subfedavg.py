"""Sub-FedAvg: every client prunes its way to a subnetwork of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import prune
from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Needs, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Declared, Message, ModelAndMemory, Phase, Server, Training
from fedstrata.methods.mechanisms.masking import OwnMasks, divided_at, epoch_ends, everything, keep, kept_by
from fedstrata.methods.mechanisms.peers import noted
from fedstrata.methods.mechanisms.shared import equal_weights
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align, per_client, under

_LAST_RATE = 0.05
"""What the authors' code prunes at most when a client is close to its target."""


@methods.register("subfedavg")
@dataclass(frozen=True)
class SubFedAvg(OwnMasks):
    r"""Every client prunes its own small weights, step by step, and shares only what it has left.

    Masks start dense. A client derives two candidates in each round, after its first local epoch and after its last
    (in the middle of a single one, where the authors' code would never prune): in each weight tensor what lies below
    the ``rate`` quantile of the weights that are left would go, :math:`\lceil r (n - 1) \rceil` of n. It takes the
    second one over if the two differ by more than ``distance`` (the mean over tensors of the fraction of entries that
    differ: the mask is still moving), less than ``sparsity`` of its weights are pruned, and the pruned model is right
    on more than ``accuracy`` of its samples. Where less than ``rate`` of all weights is missing to the target, only the
    missing ones go, and at most 5 % of those left at a time.

    The server averages an entry over the clients that kept it, all counting alike: :math:`w = \sum_k m_k w_k / \sum_k
    m_k`; what nobody kept stays as it is. A client starts a round with the global model under its own mask. What it
    uses, and is tested with, is its own pruned model as its last training left it; with ``use=global`` it is the global
    model under its mask, as in DisPFL's and SSFL's comparisons. Only what a mask keeps travels, so that messages shrink
    as clients prune.

    This is the unstructured variant. In DisPFL's comparison the mask from before the pruning counts at the server,
    although pruned weights are sent as zeros; here, as the authors define it, what is pruned no longer counts. The
    authors judge a pruning by the client's test set, DisPFL and we by its training set. DisPFL prunes 5 % at a time.

    Defaults:
        rate, distance, accuracy: MMorafah/Sub-FedAvg, src/utils/options_u.py.
        sparsity: paper, SSFL's comparison (Section 4.1 there); the authors' src/utils/options_u.py has 0.3.
        use: MMorafah/Sub-FedAvg, main_u.py.
    """

    facts: ClassVar[Facts] = Facts(
        "sparse",
        "Vahidian, Morafah and Lin, Personalized Federated Learning by Structured and Unstructured Pruning under Data "
        "Heterogeneity, ICDCS Workshops 2021",
        "https://arxiv.org/abs/2105.00562",
    )
    touches: ClassVar[Touches] = OwnMasks.touches.also(
        decides=(Decision.GAPS, Decision.USE), relies_on=(Matter.ALL_SENT,)
    )

    sparsity: float = parameter(0.5, "The fraction of weights at which a client stops pruning.", low=0, below=1)
    rate: float = parameter(0.1, "The fraction of the weights left in a tensor that one pruning takes.", low=0, high=1)
    distance: float = parameter(1e-4, "How far the two candidates must be apart.", low=0, high=1)
    accuracy: float = parameter(0.5, "How often the pruned model must be right.", low=0, high=1)
    use: str = parameter(
        "own", "Which model a client uses: its own, just trained, or the global one under its mask.",
        choices=("own", "global"),
    )  # fmt: skip

    @property
    def needs(self) -> Needs:
        """The server notes the clients' masks, and a client goes on using the model that it trained."""
        return Needs(replies=True, previous=self.use == "own")

    def remarks(self, server: Server) -> Iterable[str]:
        """Say that nobody pruned anything."""
        masks = server.memory.group("mask")
        if masks and self.rate > 0 and self.sparsity > 0 and all(bool(mask.all()) for mask in masks.values()):
            yield (
                "No client pruned anything, so 'subfedavg' was an average in which all clients count alike: no pruned "
                f"model was right on more than {self.accuracy:g} of a client's samples (accuracy), or no mask moved by "
                f"more than {self.distance:g} during local training (distance)."
            )

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
        return keep(training.trained, chosen), under("mask", chosen)

    def _rates(self, masks: Tensors) -> Tensor:
        """Tell which fraction of its weights each client may prune ``[K]``: towards the end only what is missing."""
        kept = torch.stack([kept_by(mask) for mask in masks.values()]).sum(0).to(torch.float64)
        total = sum(mask[0].numel() for mask in masks.values())
        missing = kept - (1 - self.sparsity) * total
        last = (missing / kept.clamp(min=1)).clamp(min=0, max=min(self.rate, _LAST_RATE))
        return last.where(missing < self.rate * total, torch.full_like(last, self.rate))

    def _pruned(self, masks: Tensors, model: Tensors, rates: Tensor) -> Tensors:
        return {
            name: prune(mask, model[name].abs(), (rates * (kept_by(mask) - 1) - 1e-9).ceil().long(), batched=True)
            for name, mask in masks.items()
        }

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Use the model as the last training left it, or what the mask keeps of the global one."""
        return dict(clients.previous) if self.use == "own" else keep(model, clients.memory.group("mask"))

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

"""FedDST: one sparse model, whose mask the clients move and the server settles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.functional import erk_masks, readjust, readjusted_at
from fedstrata.methods.contract.declarations import Facts, Matter, Needs, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Server, Training
from fedstrata.methods.mechanisms.masking import MovingMask, keep
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, under


@methods.register("feddst")
@dataclass(frozen=True)
class FedDST(MovingMask):
    r"""Train one sparse model; every few rounds clients move its mask, and the server keeps the largest weights.

    The mask starts with the largest initial weights of each tensor, with Erdos-Renyi-Kernel densities. In most rounds
    clients train inside it. If ``every`` divides the round t and t lies before R, each participant exchanges, after its
    training, :math:`\frac{\alpha}{2} (1 + \cos(\pi (t - 1) / R))` of the mask: the smallest weights of each tensor go,
    and as many with the largest gradients on one minibatch come, from zero. The server averages each entry over the
    clients that hold it, weighted by their samples, and cuts each tensor down to its density again, by magnitude.

    Weights of convolutions and linear layers are masked, as far as they are shared. The defaults are those of the
    authors' CIFAR-10 runs, with R half of all rounds. In their code the fraction does not follow the cosine; here it
    does, as in the paper. Only the kept weights and the mask travel, both ways.
    """

    facts: ClassVar[Facts] = Facts(
        "sparse",
        "Bibikar et al., Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning Better, "
        "AAAI 2022",
        "https://arxiv.org/abs/2112.09824",
    )
    touches: ClassVar[Touches] = MovingMask.touches.also(takes_away=(Matter.SAME_ENTRIES,))

    sparsity: float = parameter(0.8, "The fraction of weights that are masked.", low=0, below=1)
    alpha: float = parameter(0.01, "The fraction of kept weights that are exchanged at first.", low=0, below=1)
    every: int = parameter(15, "The number of rounds from one move of the mask to the next.", low=1)
    until: float = parameter(0.5, "In which first part of all rounds the mask moves.", above=0, high=1)
    batch_size: int = parameter(32, "Samples in the minibatch on which gradients are taken.", low=1)

    @property
    def needs(self) -> Needs:
        """The server looks at the clients' masks."""
        return Needs(replies=True)

    def first_masks(self, weights: Tensors, seed: int) -> Tensors:
        """Keep the largest initial weights of each tensor."""
        return erk_masks({name: weight.abs() for name, weight in weights.items()}, 1 - self.sparsity)

    def moved_fraction(self, round: int, rounds: int) -> float:
        """Return the fraction of the mask that clients exchange in a round; zero in most rounds."""
        end = int(self.until * rounds)
        return readjusted_at(round - 1, end, self.alpha) if round % self.every == 0 and round < end else 0.0

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Move the mask, if it is time."""
        fraction = self.moved_fraction(clients.round, clients.rounds)
        if fraction == 0:
            return training.trained, clients.memory
        gradients = clients.probe.gradients(training.trained, self.batch_size)
        moved = {
            name: readjust(mask, training.trained[name], gradients[name].abs(), fraction, batched=True)
            for name, mask in clients.memory.group("mask").items()
        }
        return training.trained, under("mask", moved)

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Settle the mask, if it moved: the largest weights, and of equal ones those that a participant holds."""
        masks: Tensors = server.memory.group("mask")
        if self.moved_fraction(server.round, server.rounds) > 0:
            held = {name: replies.masks[name].any(0) if name in replies.masks else mask for name, mask in masks.items()}
            whole = {**server.model, **model}
            sizes = {name: whole[name].abs().where(kept, -1.0) for name, kept in held.items()}
            masks = erk_masks(sizes, 1 - self.sparsity)
        return keep(model, masks), under("mask", masks)

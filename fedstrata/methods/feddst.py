"""FedDST: one sparse model, whose mask the clients move and the server settles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstrata.functional import erk_densities, feddst_densities, layer_masks, prune, readjusted_at, regrow
from fedstrata.methods.contract.declarations import Facts, Matter, Needs, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Outline, Server, Training
from fedstrata.methods.mechanisms.masking import MovingMask, keep, kept_by
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, under

DIVISIONS = {"feddst": feddst_densities, "erk": erk_densities}
"""How a global density is divided over tensors."""


@methods.register("feddst")
@dataclass(frozen=True)
class FedDST(MovingMask):
    r"""Train one sparse model; every few rounds clients move its mask, and the server keeps the largest weights.

    The mask starts with the largest initial weights of each tensor. In most rounds clients train inside it. In some,
    each participant prunes its trained model by magnitude from the sparsity S to :math:`S + (1 - S) \alpha_t` and grows
    back to S, by the largest gradients on one minibatch; what it grows starts from zero. The server averages each entry
    over the clients that hold it, weighted by their samples, and cuts each tensor down to its density, by magnitude.

    The released code and the paper differ in when and how much the mask moves, with :math:`R = \lfloor u T \rfloor`
    for a part ``until`` u of T rounds. ``schedule=released``: in the rounds :math:`2, 2 + e, 2 + 2 e, \dots` up to R,
    with e the rounds of ``every``, and :math:`\alpha_t = \alpha`; the cosine is computed there, but only ends it.
    ``schedule=paper``: in rounds that e divides, before R, and :math:`\alpha_t = \frac{\alpha}{2} (1 + \cos(\pi (t -
    1) / R))`.

    Both speak of Erdos-Renyi-Kernel densities, with :math:`k_l = \sum_i n_i / \prod_i n_i` over the axes of a tensor.
    The released code scales sparsities, :math:`s_l = c (1 - k_l)` (``densities=feddst``,
    :func:`fedstrata.functional.feddst_densities`); RigL, where the name comes from, scales densities, :math:`d_l =
    \epsilon k_l` (``densities=erk``, :func:`fedstrata.functional.erk_densities`).

    The weights of all layers are masked, no biases and no norms, as far as they are shared. In the released code the
    gradients that decide what grows are ranked over all entries, so that some that are kept already are put to zero;
    here only those outside the mask can grow. Only the kept weights and the mask travel, both ways.

    Defaults:
        sparsity, alpha, every: bibikar/feddst, README.md (FedDST on CIFAR-10).
        until, schedule, batch_size: bibikar/feddst, dst.py.
        densities: bibikar/feddst, models.py.
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
    schedule: str = parameter(
        "released", "When the mask moves, and whether ever less: from round 2 on, or as in the paper.",
        choices=("released", "paper"),
    )  # fmt: skip
    densities: str = parameter(
        "feddst", "How sparsity is divided over tensors: sparsities are scaled, or densities, as in RigL.",
        choices=tuple(DIVISIONS),
    )  # fmt: skip
    batch_size: int = parameter(32, "Samples in the minibatch on which gradients are taken.", low=1)

    @property
    def needs(self) -> Needs:
        """The server looks at the clients' masks."""
        return Needs(replies=True)

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say that the mask never moves in so few rounds."""
        yield from super().notes(outline)
        events = sum(self.moved_fraction(round, outline.rounds) > 0 for round in range(1, outline.rounds + 1))
        if self.alpha > 0 and self.sparsity > 0 and events == 0:
            yield (
                f"With every={self.every} and until={self.until:g} the mask of 'feddst' never moves in "
                f"{outline.rounds} rounds: it is one fixed mask of the largest initial weights. Give fewer rounds "
                "between moves, a larger 'until', or more rounds."
            )

    @property
    def plans_ahead(self) -> str | None:
        """What depends on how many rounds there are in all."""
        return "it exchanges weights in a part of all rounds"

    def moved_fraction(self, round: int, rounds: int) -> float:
        """Return the fraction of the mask that clients exchange in a round; zero in most rounds."""
        end = int(self.until * rounds + 1e-9)
        if self.schedule == "paper":
            return readjusted_at(round - 1, end, self.alpha) if round % self.every == 0 and round < end else 0.0
        return self.alpha if (round - 2) % self.every == 0 and round <= end else 0.0

    def divided(self, shapes: Iterable[Iterable[int]], fraction: float = 0.0) -> list[float]:
        """Divide the density over tensors, when a fraction of what is kept has gone."""
        return DIVISIONS[self.densities]([tuple(shape) for shape in shapes], (1 - self.sparsity) * (1 - fraction))

    def largest(self, scores: Mapping[str, Tensor]) -> Tensors:
        """Keep the highest-scored entries of each tensor."""
        return layer_masks(scores, self.divided(tensor.shape for tensor in scores.values()))

    def first_masks(self, weights: Tensors, seed: int) -> Tensors:
        """Keep the largest initial weights of each tensor."""
        return self.largest({name: weight.abs() for name, weight in weights.items()})

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Move the mask, if it is time."""
        fraction = self.moved_fraction(clients.round, clients.rounds)
        if fraction == 0:
            return training.trained, clients.memory
        gradients = clients.probe.gradients(training.trained, self.batch_size)
        masks = clients.memory.group("mask")
        fewer = self.divided((mask.shape[1:] for mask in masks.values()), fraction)
        moved = {
            name: _exchanged(mask, training.trained[name], gradients[name], left)
            for (name, mask), left in zip(masks.items(), fewer, strict=True)
        }
        return training.trained, under("mask", moved)

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Settle the mask, if it moved: the largest weights, and of equal ones those that a participant holds."""
        masks: Tensors = server.memory.group("mask")
        if self.moved_fraction(server.round, server.rounds) > 0:
            held = {name: replies.masks[name].any(0) if name in replies.masks else mask for name, mask in masks.items()}
            whole = {**server.model, **model}
            masks = self.largest({name: whole[name].abs().where(kept, -1.0) for name, kept in held.items()})
        return keep(model, masks), under("mask", masks)


def _exchanged(masks: Tensor, weights: Tensor, gradients: Tensor, left: float) -> Tensor:
    """Prune each client's mask ``[K, ...]`` to a density by magnitude, and grow as many by gradients."""
    gone = kept_by(masks) - int(left * masks[0].numel() + 1e-9)
    return regrow(prune(masks, weights.abs(), gone, batched=True), gradients.abs(), gone, batched=True)

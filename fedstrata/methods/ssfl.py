"""SSFL: one shared sparse subnetwork, found before training by the clients' saliency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstrata.errors import FedStrataError
from fedstrata.functional import aggregate_scores, mean_saliency, top_mask
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.exchange import Exchange
from fedstrata.methods.contract.part import Metrics, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Server, Training
from fedstrata.methods.mechanisms.masking import SCOPES, MaskExchange, SharedMask, maskable
from fedstrata.methods.random_k import RandomK
from fedstrata.rng import permutation, uniform
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, under


@methods.register("ssfl")
@dataclass(frozen=True)
class SSFL(SharedMask):
    r"""Find one mask for all clients before training; then train, merge and send only what it keeps.

    Every client scores the weights on one minibatch, :math:`s_k = |\partial L / \partial w \cdot w_0|` (Eq. 2); the
    server averages by data, :math:`s = \sum_k p_k s_k` (Eq. 3), and keeps the :math:`\lfloor (1 - \sigma) d \rfloor`
    largest over the whole model. From then on masked weights are zero at every step and do not travel. On several
    ``batches`` a client's score is the mean of theirs, :func:`fedstrata.functional.mean_saliency`, each with its own
    absolute value (Section 4.2.3, and the authors' code).

    ``warmup`` trains dense for some rounds before the mask is found (Table 6). ``adapt_at`` finds a new mask before a
    round, ``adapt_on_joining`` when clients join (Algorithm 2; ``late_clients`` of an experiment): weights that were
    masked are scored, and start again, from their initial values. ``refresh_every`` does so periodically, and
    ``growth`` keeps the old mask and only adds to it (both named in Appendix A.6). The paper leaves open what is
    masked; in the authors' code it is the weights of convolutions and linear layers, and here also those of whatever
    else computes with matrices, such as the projections of an attention (``scope=all``: every parameter).

    The authors' code differs from the paper in two places: it lets all clients count alike in the mean of the scores
    (``weighted=false``; no difference where clients have equally many samples, as in its Dirichlet partition), and it
    takes gradients in evaluation mode, which only matters to models with dropout or batch norm; here they are those of
    training.

    ``topology`` replaces the mask by one that its studies compare with: ``shuffled`` inside each tensor, one ``random``
    mask for all, ``random-per-client`` (both Fig. 3a; the latter is ``random-k``), or the ``oracle``, the mask of the
    whole training set as if it lay in one place (Section 4.2.3): every client sends its signed
    :math:`\partial L_k / \partial w \cdot w_0` over all its samples, and the absolute value is taken of their mean,
    :math:`s^* = |\sum_k p_k \, \partial L_k / \partial w \cdot w_0|`, once. How far masks from few minibatches are
    from it, :func:`fedstrata.studies.mask_errors` measures (Fig. 4).

    Defaults:
        sparsity, batch_size: paper, Appendix A.8.
        batches: riohib/SSFL, conf/base.yaml.
        balanced: riohib/SSFL, api/client/client_strategies.py; Section 3.2 of the paper speaks of class-balanced
            minibatches, Eq. 2 and Algorithm 1 of plain ones.
        weighted: paper, Eq. 3.
        scope: riohib/SSFL, api/trainers/model_trainer.py.
        warmup: riohib/SSFL, conf/algorithm/ssfl.yaml.
        adapt_at, adapt_on_joining, refresh_every, growth, topology: paper, Algorithm 1.
    """

    facts: ClassVar[Facts] = Facts(
        "sparse",
        "Ohib, Thapaliya et al., SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient "
        "Federated Learning",
    )

    sparsity: float = parameter(0.5, "The fraction of weights that are masked.", low=0, below=1)
    batch_size: int = parameter(16, "Samples in a saliency minibatch.", low=1)
    batches: int = parameter(1, "Saliency minibatches per client.", low=1)
    balanced: bool = parameter(False, "Draw saliency minibatches with the client's classes in turn.")
    weighted: bool = parameter(True, "Weight the clients' scores by their samples; otherwise all count alike.")
    scope: str = parameter("weights", "What is masked: the weights of all layers, or all parameters.", choices=SCOPES)
    warmup: int = parameter(0, "Dense rounds before the mask is found.", low=0)
    adapt_at: int | None = parameter(None, "Find a new mask before this round.", low=2)
    adapt_on_joining: bool = parameter(False, "Find a new mask when clients join.")
    refresh_every: int | None = parameter(
        None, "The number of rounds after which a new mask is found, again and again.", low=1
    )
    growth: bool = parameter(False, "A new mask keeps all that the old one kept.")
    topology: str = parameter(
        "saliency",
        "The mask: by saliency, the same shuffled inside each tensor, random, or the oracle's.",
        choices=("saliency", "shuffled", "random", "random-per-client", "oracle"),
    )

    def __post_init__(self) -> None:
        """Refuse a new mask before the first or where each client has its own, vain growth, equality without scores."""
        super().__post_init__()
        if self.adapt_at is not None and self.adapt_at <= self.warmup + 1:
            raise FedStrataError(
                f"'ssfl' finds its first mask before round {self.warmup + 1}, so it cannot find a new one before round "
                f"{self.adapt_at}; give a later adapt_at."
            )
        if self.growth and not self.finds_again():
            raise FedStrataError(
                "'ssfl' grows its mask only when it finds a new one; give adapt_at, adapt_on_joining or refresh_every."
            )
        if self.topology == "random-per-client" and (self.warmup or self.finds_again()):
            raise FedStrataError(
                "'ssfl' with topology=random-per-client keeps its masks from the first round on; leave out warmup, "
                "adapt_at, adapt_on_joining and refresh_every."
            )
        if not self.weighted and self.topology not in ("saliency", "shuffled"):
            raise FedStrataError(
                f"'ssfl' with topology={self.topology} has no mean of scores in which clients could count alike; leave "
                "out weighted."
            )

    def parts(self) -> tuple[Part, ...]:
        """Stand for itself, or for the method with a random mask at each client."""
        return (RandomK(self.sparsity, self.scope),) if self.topology == "random-per-client" else (self,)

    def exchanges(self) -> tuple[Exchange, ...]:
        """Find a mask by the clients' saliency."""
        return (Saliency(self),) if self.sparsity > 0 else ()

    def finds_again(self) -> bool:
        """Tell whether there may be another mask after the first."""
        return self.adapt_at is not None or self.adapt_on_joining or self.refresh_every is not None

    # The mask ---------------------------------------------------------------------------------------------------------

    def masked(self, layers: LayerMap) -> list[str]:
        """Name what is masked."""
        return maskable(layers, self.scope)

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start dense; keep initial values where masked weights may come back to them."""
        return self._first_memory(super().client_memory(clients, model), model)

    def server_memory(self, server: Server) -> Tensors:
        """Start dense; keep initial values where masked weights may come back to them."""
        return self._first_memory(super().server_memory(server), server.model)

    def _first_memory(self, dense: Tensors, weights: Tensors) -> Stack:
        memory = Stack(dense)
        initial = {name: weights[name] for name in memory.group("mask")}
        return memory | under("init", initial) if self.finds_again() else memory

    # Before a mask is found, everything travels as in FedAvg ----------------------------------------------------------

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send only what the mask keeps, once there is one: a name tells it, so that no round waits for a GPU."""
        return super().broadcast(server, message) if "found" in server.memory else message

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send only what the mask keeps, once there is one."""
        found = self.sparsity > 0 and clients.round > self.warmup
        return super().upload(clients, training, message) if found else message

    def metrics(self, server: Server) -> Metrics:
        """Tell which part of each layer the mask keeps."""
        return super().metrics(server) if self.sparsity > 0 else {}


@dataclass(frozen=True)
class Saliency(MaskExchange):
    """Clients score the weights, and the server keeps those with the largest scores."""

    method: SSFL

    def due(self, round: int, rounds: int, joining: bool) -> int:
        """Find a mask after the warm-up, and from then on again when asked, or when clients join."""
        method, since = self.method, round - self.method.warmup - 1
        if since <= 0:
            return since == 0
        periodic = method.refresh_every is not None and since % method.refresh_every == 0
        return periodic or round == method.adapt_at or (joining and method.adapt_on_joining)

    def survey(self, clients: Clients, model: Tensors) -> Message:
        """Score every weight on the client's own data, masked ones at their initial values.

        A random mask needs no scores.
        """
        method = self.method
        if method.topology == "random":
            return Message()
        initial, masks = clients.memory.group("init"), clients.memory.group("mask")
        whole = {**model, **{name: model[name].where(masks[name], initial[name]) for name in initial}}
        scored = [name for name in method.masked(clients.layers) if name in clients.shared]
        if method.topology == "oracle":
            gradients = clients.probe.gradients(whole, method.batch_size, all_samples=True)
            return Message({name: gradients[name] * whole[name] for name in scored})
        minibatches = (
            clients.probe.gradients(whole, method.batch_size, balanced=method.balanced, draw=draw)
            for draw in range(method.batches)
        )
        return Message(mean_saliency(minibatches, {name: whole[name] for name in scored}))

    def conclude(self, server: Server, replies: Message) -> ModelAndMemory:
        """Average the scores, keep the largest, and cut the global model down to them."""
        masks, initial = server.memory.group("mask"), server.memory.group("init")
        model, kept = {}, {}
        for name, mask in self._new_masks(server, replies).items():
            old, weight = masks[name], server.model[name]
            kept[name] = mask | old if self.method.growth and "found" in server.memory else mask
            model[name] = weight.where(old, initial.get(name, weight)) * kept[name]
        found = torch.ones_like(server.sizes[0], dtype=torch.bool)
        return model, server.memory | under("mask", kept) | {"found": found}

    def _new_masks(self, server: Server, replies: Message) -> Tensors:
        keys = {name: torch.tensor(server.key(f"ssfl/{name}")) for name in server.memory.group("mask")}
        if self.method.topology == "random":
            drawn = {name: server.model[name] for name in keys}
            scores = {name: uniform(keys[name], tensor.shape).to(tensor.device) for name, tensor in drawn.items()}
        else:
            counts = server.sizes if self.method.weighted else torch.ones_like(server.sizes)
            scores = {name: aggregate_scores(tensor, counts).abs() for name, tensor in replies.tensors.items()}
        masks = top_mask(scores, self.method.sparsity)
        if self.method.topology == "shuffled":
            orders = {name: permutation(keys[name], mask.numel()) for name, mask in masks.items()}
            return {name: mask.flatten()[orders[name]].view(mask.shape) for name, mask in masks.items()}
        return masks

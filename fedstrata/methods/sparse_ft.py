"""Federated sparse fine-tuning of a pretrained model: first the head, then a chosen part of the backbone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedstrata.functional import aggregate_scores, select
from fedstrata.functional.sparse_finetuning import RULES
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Decision, Facts, Touches
from fedstrata.methods.contract.exchange import Exchange
from fedstrata.methods.contract.part import Metrics, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import (
    Clients,
    LocalStep,
    Message,
    ModelAndMemory,
    Outline,
    Phase,
    Server,
    Training,
)
from fedstrata.methods.mechanisms.masking import everything, layer_densities, one_for_all
from fedstrata.rng import numpy_generator
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, under


@methods.register("sparse-ft")
@dataclass(frozen=True)
class SparseFineTuning(Part):
    r"""Fine-tune a pretrained model in two stages: the head alone, then a chosen part of the backbone.

    Stage one, ``head_rounds`` rounds: the backbone is frozen and only the head is trained and sent. Then the mask is
    found once: in each of ``calibration_rounds`` exchanges some clients estimate the diagonal empirical Fisher
    information :math:`F_j = \mathrm{mean}_i (\partial \log p(y_i | x_i) / \partial \theta_j)^2` of the backbone, the
    server averages over clients and rounds, and a global threshold freezes the fraction ``sparsity`` (Section 3.3).
    Stage two: the head is frozen, and of the backbone only what the mask marks is trained, merged and sent. Frozen
    entries stay bit for bit what they were: the mask applies to gradients, and to weight decay too (SparseSGDM).

    ``rule`` says what is trained: the ``least`` or ``most`` sensitive entries, those of ``lowest-magnitude`` or
    ``highest-magnitude``, or ``random`` ones (Section 3.4); only the first two need the clients' estimates. The report
    leaves open whether gradients are squared per sample or per batch; per sample is the definition, ``fisher=batch``
    the other reading, and ``fisher=sampled-label`` draws labels from the model's own predictions, as TaLoS does.

    The backbone of a model is everything but its last linear layer. What is frozen is known to everybody from the
    beginning and never travels, so all sites must start from the same pretrained weights. Local steps J come from the
    experiment (``steps``); :func:`fedstrata.functional.scaled_rounds` gives the rounds that keep the budget.
    With one client, this is the centralised two-stage baseline.
    """

    facts: ClassVar[Facts] = Facts(
        "sparse",
        "Del Vecchio et al., Federated Learning Under the Lens of Task Arithmetic: Mitigating Interference via Sparse "
        "Fine-Tuning, Politecnico di Torino",
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.TRAVEL, Decision.WEIGHTS))

    head_rounds: int | None = parameter(
        None,
        "Rounds of stage one, in which only the head is trained; none: a third of all, as the report has it.",
        low=0,
    )
    sparsity: float = parameter(0.2, "The fraction of the backbone that is frozen in stage two.", low=0, below=1)
    rule: str = parameter("least", "Which entries of the backbone are trained.", choices=RULES)
    calibration_rounds: int = parameter(3, "Exchanges in which the Fisher information is estimated.", low=1)
    calibration_clients: float = parameter(0.1, "The fraction of clients asked in each of them.", above=0, high=1)
    batch_size: int = parameter(64, "Samples in a calibration minibatch.", low=1)
    batches: int = parameter(1, "Calibration minibatches of a client.", low=1)
    fisher: str = parameter("sample", "How it is estimated (see above).", choices=("sample", "batch", "sampled-label"))
    backbone_rate: float = parameter(0.1, "What the learning rate is multiplied by in stage two.", above=0)

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say where a stage has nothing to train."""
        if not outline.layers.head_names:
            yield "The model has no linear head, so stage one of 'sparse-ft' trains nothing."
        elif self.head_rounds == 0:
            yield "'sparse-ft' has no rounds for the head (head_rounds=0), which stays as it was initialised or loaded."

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Train the head in stage one and the backbone in stage two."""
        if clients.round <= self.stage_one(clients.rounds):
            return (Phase(trains=lambda layers: layers.head_names, name="head"),)
        return (Phase(trains=_backbone, rate=self.backbone_rate, name="backbone"),)

    def stage_one(self, rounds: int) -> int:
        """Tell how many rounds stage one has."""
        return rounds // 3 if self.head_rounds is None else self.head_rounds

    # The mask ---------------------------------------------------------------------------------------------------------

    def exchanges(self) -> tuple[Exchange, ...]:
        """Calibrate between the stages; rules that need no estimates only have the mask announced."""
        return (Calibration(self),)

    def calibrations(self) -> int:
        """Tell how many exchanges the mask takes."""
        return self.calibration_rounds if self.estimates() else 1

    def estimates(self) -> bool:
        """Tell whether the mask depends on the clients' estimates."""
        return self.rule in ("least", "most") and self.sparsity > 0

    def calibrated(self, memory: Stack) -> bool:
        """Tell whether the server has found the mask."""
        return int(memory["calibrated"]) >= self.calibrations()

    def server_memory(self, server: Server) -> Tensors:
        """Start with a mask that trains everything."""
        masks = everything({name: server.model[name] for name in _shared_backbone(server)})
        return under("mask", masks) | {"calibrated": torch.tensor(0)}

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start with a mask that trains everything, and the initial head."""
        masks = everything({name: model[name] for name in _backbone(clients.layers)})
        return under("mask", masks) | under("head", {name: model[name] for name in clients.layers.head_names})

    # What travels, and what moves -------------------------------------------------------------------------------------

    def masks_known(self, view: Clients | Server, upload: bool) -> Tensors:
        """Both sides hold the mask, which was announced to everybody."""
        return one_for_all(view.memory) if isinstance(view, Server) else view.memory.group("mask")

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send the head in stage one, and what the mask marks in stage two."""
        second_stage = self.calibrated(server.memory)
        return self._travelling(server.layers, second_stage, message, one_for_all(server.memory))

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the head in stage one, and what the mask marks in stage two."""
        second_stage = clients.round > self.stage_one(clients.rounds)
        return self._travelling(clients.layers, second_stage, message, clients.memory.group("mask"))

    def _travelling(self, layers: LayerMap, second_stage: bool, message: Message, masks: Tensors) -> Message:
        frozen = layers.head_names if second_stage else _backbone(layers)
        sent = message.without(frozen)
        return replace(sent, masks={name: mask for name, mask in masks.items() if name in sent.tensors})

    def receive(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Fill in what is frozen: the head that was announced, the backbone as it was at the beginning."""
        heads = {name: head for name, head in clients.memory.group("head").items() if name not in message.tensors}
        backbone = {name: model[name].where(mask, clients.initial[name]) for name, mask in message.masks.items()}
        return {**model, **heads, **backbone}, clients.memory

    def gradients(self, clients: Clients, step: LocalStep, gradients: Tensors) -> Tensors:
        """Hide what is frozen from momentum and from the gradient's norm."""
        masks = clients.memory.group("mask")
        return {**gradients, **{name: gradients[name] * mask for name, mask in masks.items() if name in gradients}}

    def project(self, clients: Clients, step: LocalStep, parameters: Tensors) -> ModelAndMemory:
        """Hold what is frozen where it was, whatever weight decay does."""
        if step.phase.name != "backbone":
            return parameters, clients.memory
        masks = clients.memory.group("mask")
        held = {name: parameters[name].where(mask, step.received[name]) for name, mask in masks.items()}
        return {**parameters, **held}, clients.memory

    def metrics(self, server: Server) -> Metrics:
        """Tell which part of each layer is trained, once the mask is found."""
        if server.round <= self.stage_one(server.rounds):
            return {}
        return {"density": layer_densities(server.layers, server.memory.group("mask"))}


@dataclass(frozen=True)
class Calibration(Exchange):
    """Some clients estimate the Fisher information of the backbone, and the server chooses what is trained."""

    method: SparseFineTuning

    def due(self, round: int, rounds: int, joining: bool) -> int:
        """Take place between the two stages, as often as the mask takes."""
        return self.method.calibrations() if round == self.method.stage_one(rounds) + 1 else 0

    def asks(self, server: Server) -> Sequence[int]:
        """Ask some clients, others in each calibration round; only one, for nothing, where no estimate is needed."""
        if not self.method.estimates():
            return range(1)
        count = max(1, round(self.method.calibration_clients * server.clients))
        chance = numpy_generator(server.seed, "sparse-ft", "calibration", int(server.memory["calibrated"]))
        return [int(client) for client in chance.choice(server.clients, size=count, replace=False)]

    def survey(self, clients: Clients, model: Tensors) -> Message:
        """Estimate the Fisher information of the backbone on the client's own data."""
        method = self.method
        if not method.estimates():
            return Message()
        names = [name for name in _backbone(clients.layers) if name in clients.shared]
        return Message(clients.probe.fisher(model, names, method.batch_size, method.batches, method.fisher))

    def conclude(self, server: Server, replies: Message) -> ModelAndMemory:
        """Average over clients, accumulate over rounds, and after the last choose what is trained."""
        equal, so_far = torch.ones_like(server.sizes), server.memory.group("fisher")
        means = {name: aggregate_scores(estimates, equal) for name, estimates in replies.tensors.items()}
        fisher = {name: mean + so_far.get(name, torch.zeros_like(mean)) for name, mean in means.items()}
        memory = server.memory | under("fisher", fisher) | {"calibrated": server.memory["calibrated"] + 1}
        if not self.method.calibrated(memory):
            return {}, memory
        scores = {name: fisher.get(name, server.model[name]) for name in _shared_backbone(server)}
        masks = select(scores, self.method.sparsity, self.method.rule, seed=server.seed)
        return {}, memory.without("fisher") | under("mask", masks)

    def announce(self, server: Server) -> Message:
        """Send the mask, one bit per entry, and the head as stage one left it."""
        if not self.method.calibrated(server.memory):
            return Message()
        heads = sorted(name for name in server.layers.head_names if name in server.model)
        head = {name: server.model[name][None] for name in heads}
        return Message(under("mask", one_for_all(server.memory)) | under("head", head))

    def adopt(self, clients: Clients, announcement: Message) -> Tensors:
        """Take over the mask and the head."""
        count = len(clients.ids)
        taken = {name: tensor.expand(count, *tensor.shape[1:]) for name, tensor in announcement.tensors.items()}
        return {**clients.memory, **taken}


def _backbone(layers: LayerMap) -> list[str]:
    """Name all parameters but those of the head."""
    return [name for name in layers.parameter_names if name not in layers.head_names]


def _shared_backbone(server: Server) -> list[str]:
    return [name for name in _backbone(server.layers) if name in server.model]

"""Federated sparse fine-tuning of a pretrained model: first the head, then a chosen part of the backbone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstrata.functional import aggregate_scores, select
from fedstrata.functional.sparse_finetuning import RULES
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Phase, Probe, Server, Step, Training
from fedstrata.methods.mechanisms.layer_choice import CHOOSES_WHAT_TRAVELS, SETS_WEIGHTS
from fedstrata.methods.mechanisms.masking import masks_in
from fedstrata.rng import numpy_generator
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


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
    claims: ClassVar[tuple[str, ...]] = (CHOOSES_WHAT_TRAVELS, SETS_WEIGHTS)
    deploys_alike: ClassVar[bool] = True

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

    def notes(self, layers: LayerMap) -> Iterable[str]:
        """Say where a stage has nothing to train."""
        if not layers.head_names:
            yield "The model has no linear head, so stage one of 'sparse-ft' trains nothing."
        elif self.head_rounds == 0:
            yield "'sparse-ft' has no rounds for the head (head_rounds=0), which stays as it was initialised or loaded."

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Train the head in stage one and the backbone in stage two."""
        if clients.round <= self._head_rounds(clients.rounds):
            return (Phase(trains=lambda layers: layers.head_names, name="head"),)
        return (Phase(trains=_backbone, rate=self.backbone_rate, name="backbone"),)

    def _head_rounds(self, rounds: int) -> int:
        return rounds // 3 if self.head_rounds is None else self.head_rounds

    # The mask ---------------------------------------------------------------------------------------------------------

    def exchanges_before(self, round: int, rounds: int) -> int:
        """Calibrate between the stages; rules that need no estimates only have the mask announced."""
        return self._calibrations() if round == self._head_rounds(rounds) + 1 else 0

    def _calibrations(self) -> int:
        return self.calibration_rounds if self._estimates() else 1

    def _estimates(self) -> bool:
        return self.rule in ("least", "most") and self.sparsity > 0

    def asks(self, server: Server) -> Sequence[int]:
        """Ask some clients, others in each calibration round; only one, for nothing, where no estimate is needed."""
        if not self._estimates():
            return range(1)
        count = max(1, round(self.calibration_clients * server.clients))
        chance = numpy_generator(server.seed, "sparse-ft", "calibration", int(server.memory["calibrated"]))
        return [int(client) for client in chance.choice(server.clients, size=count, replace=False)]

    def server_memory(self, server: Server) -> Tensors:
        """Start with a mask that trains everything."""
        names = _shared_backbone(server)
        masks = {f"mask/{name}": torch.ones_like(server.model[name], dtype=torch.bool) for name in names}
        return {**masks, "calibrated": torch.tensor(0)}

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start with a mask that trains everything, and the initial head."""
        names = _backbone(clients.layers)
        masks = {f"mask/{name}": torch.ones_like(model[name], dtype=torch.bool) for name in names}
        return {**masks, **{f"head/{name}": model[name] for name in clients.layers.head_names}}

    def survey(self, clients: Clients, model: Tensors, probe: Probe) -> Message:
        """Estimate the Fisher information of the backbone on the client's own data."""
        if not self._estimates():
            return Message()
        names = [name for name in _backbone(clients.layers) if name in clients.shared]
        return Message(probe.fisher(model, names, self.batch_size, self.batches, self.fisher))

    def conclude(self, server: Server, replies: Message) -> tuple[Tensors, Tensors]:
        """Average over clients, accumulate over rounds, and after the last choose what is trained."""
        equal = torch.ones_like(server.sizes)
        memory = {**server.memory, "calibrated": server.memory["calibrated"] + 1}
        for name, estimates in replies.tensors.items():
            mean = aggregate_scores(estimates, equal)
            memory[f"fisher/{name}"] = mean + server.memory.get(f"fisher/{name}", torch.zeros_like(mean))
        if not self._calibrated(memory):
            return {}, memory
        scores = {name: memory.get(f"fisher/{name}", server.model[name]) for name in _shared_backbone(server)}
        masks = select(scores, self.sparsity, self.rule, seed=server.seed)
        others = {name: tensor for name, tensor in memory.items() if not name.startswith("fisher/")}
        return {}, {**others, **{f"mask/{name}": mask for name, mask in masks.items()}}

    def _calibrated(self, memory: Tensors) -> bool:
        return int(memory["calibrated"]) >= self._calibrations()

    def announce(self, server: Server) -> Message:
        """Send the mask, one bit per entry, and the head as stage one left it."""
        if not self._calibrated(server.memory):
            return Message()
        masks = {f"mask/{name}": server.memory[f"mask/{name}"][None] for name in _shared_backbone(server)}
        heads = [name for name in server.layers.head_names if name in server.model]
        return Message({**masks, **{f"head/{name}": server.model[name][None] for name in sorted(heads)}})

    def adopt(self, clients: Clients, announcement: Message) -> Tensors:
        """Take over the mask and the head."""
        count = len(clients.ids)
        taken = {name: tensor.expand(count, *tensor.shape[1:]) for name, tensor in announcement.tensors.items()}
        return {**clients.memory, **taken}

    # What travels, and what moves -------------------------------------------------------------------------------------

    def masks_known(self, view: Clients | Server, upload: bool) -> Tensors:
        """Both sides hold the mask, which was announced to everybody."""
        masks = masks_in(view.memory)
        return {name: mask[None] for name, mask in masks.items()} if isinstance(view, Server) else masks

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send the head in stage one, and what the mask marks in stage two."""
        masks = {name: server.memory[f"mask/{name}"][None] for name in _shared_backbone(server)}
        return self._travelling(server.layers, self._calibrated(server.memory), message, masks)

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the head in stage one, and what the mask marks in stage two."""
        masks = {name: clients.memory[f"mask/{name}"] for name in _backbone(clients.layers)}
        return self._travelling(clients.layers, clients.round > self._head_rounds(clients.rounds), message, masks)

    def _travelling(self, layers: LayerMap, second_stage: bool, message: Message, masks: Tensors) -> Message:
        names = {*layers.buffer_names, *(_backbone(layers) if second_stage else layers.head_names)}
        sent = {name: tensor for name, tensor in message.tensors.items() if name in names}
        return Message(sent, {name: mask for name, mask in masks.items() if name in sent}, message.numbers)

    def receive(self, clients: Clients, message: Message, model: Tensors, probe: Probe) -> tuple[Tensors, Tensors]:
        """Fill in what is frozen: the head that was announced, the backbone as it was at the beginning."""
        whole = dict(model)
        for name in clients.layers.head_names:
            if name not in message.tensors:
                whole[name] = clients.memory[f"head/{name}"]
        for name, mask in message.masks.items():
            whole[name] = model[name].where(mask, clients.initial[name])
        return whole, clients.memory

    def gradients(self, clients: Clients, step: Step, gradients: Tensors) -> Tensors:
        """Hide what is frozen from momentum and from the gradient's norm."""
        masked = {
            name: gradient * clients.memory[f"mask/{name}"]
            for name, gradient in gradients.items()
            if f"mask/{name}" in clients.memory
        }
        return {**gradients, **masked}

    def project(self, clients: Clients, step: Step, parameters: Tensors) -> Tensors:
        """Hold what is frozen where it was, whatever weight decay does."""
        if step.phase.name != "backbone":
            return parameters
        held = {
            name: parameters[name].where(clients.memory[f"mask/{name}"], step.received[name])
            for name in _backbone(clients.layers)
        }
        return {**parameters, **held}

    def layer_metrics(self, server: Server) -> dict[str, dict[str, float]]:
        """Tell which part of each layer is trained, once the mask is found."""
        if server.round <= self._head_rounds(server.rounds):
            return {}
        marked: dict[str, list[torch.Tensor]] = {}
        for name in _shared_backbone(server):
            marked.setdefault(server.layers.of(name).name, []).append(server.memory[f"mask/{name}"].flatten())
        return {"density": {layer: float(torch.cat(masks).double().mean()) for layer, masks in marked.items()}}


def _backbone(layers: LayerMap) -> list[str]:
    """Name all parameters but those of the head."""
    return [name for name in layers.parameter_names if name not in layers.head_names]


def _shared_backbone(server: Server) -> list[str]:
    return [name for name in _backbone(server.layers) if name in server.model]

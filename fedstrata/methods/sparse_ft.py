"""Federated sparse fine-tuning of a pretrained model: first the head, then a chosen part of the backbone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedstrata.functional import aggregate_scores, select
from fedstrata.functional.sparse_finetuning import RULES, progressive_sparsity, select_further, soften
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
    information :math:`F_j = \mathrm{mean}_i (\partial \log p(y_i | x_i) / \partial \theta_j)^2` of the backbone on
    minibatches drawn afresh, the server averages over clients and adds up over rounds, and a global threshold freezes
    the fraction ``sparsity`` (Section 3.3). Stage two: the head is frozen, and of the backbone only what the mask marks
    is trained, merged and sent. Frozen entries stay bit for bit what they were: the mask applies to gradients, and to
    weight decay too (SparseSGDM).

    The report gives both stages to all models (Section 4.1), but their lengths only for the centralised baseline: 20
    epochs for the head and 40 for the backbone (Section 3.1.1). For federated runs it counts 800 local steps, 200
    rounds of 4 (Section 3.2.4), and leaves open whether those of the head are among them. So a third of the rounds is
    ours, by the baseline's proportion; the head gets one round at least. The baseline anneals the learning rate in each
    stage anew, and so does any schedule here; ``restart=false`` lets one schedule run over both.

    ``rule`` says what is trained: the ``least`` or ``most`` sensitive entries, those of ``lowest-magnitude`` or
    ``highest-magnitude``, or ``random`` ones (Section 3.4); only the first two need the clients' estimates. The report
    leaves open whether gradients are squared per sample or per batch; per sample is the definition, ``fisher=batch``
    the other reading. With ``fisher=sampled-label`` labels are drawn from the model's own predictions, which gives the
    Fisher information itself instead of the empirical one.

    In the released code the head is trained centrally before, for 20 epochs, gradients of batches are squared
    (``fisher=batch, batches=14, batch_size=32``), and the backbone has a hundredth of the head's rate
    (``backbone_rate=0.01``), without a schedule.

    The scores of TaLoS, on which the report builds, are ``sparse-ft(fisher=sampled-logit, calibration=soft-mask,
    calibration_rounds=4)``: the squared gradient of a logit, not of a loss, whose class is drawn from the model's
    predictions, and a mask that grows over the rounds. Round t of T freezes up to the fraction
    :math:`1 - (1 - s)^{t/T}`, by the scores of that round alone, and what is frozen counts a tenth in the forward
    passes of the rounds after it (Iurada et al., ICLR 2025; iurada/talos-task-arithmetic, vision/pruners.py). There all
    samples are looked at, here ``batches`` of each client.

    The backbone of a model is everything but its last linear layer. What is frozen is known to everybody from the
    beginning and never travels, so all sites must start from the same pretrained weights. Local steps J come from the
    experiment (``steps``); :func:`fedstrata.functional.scaled_rounds` gives the rounds that keep the budget.
    With one client, this is the centralised two-stage baseline. The report's inputs (Section 3.2.1) are
    ``transforms="crop+flip+randaugment+normalise:imagenet"`` and ``validation=5000``; the strength of RandAugment and
    the crop are not given, and images are enlarged after these, inside the model. The best model of all rounds is kept,
    while the baseline's stage two also begins with the best head of stage one; here it begins with the last.

    Defaults:
        head_rounds: ours; the centralised baseline's 20 of 60 epochs in the paper's Section 3.1.1.
        sparsity: paper, Section 4.4.1 and Table 2.
        rule: paper, Section 3.4.1.
        calibration_rounds: paper, Section 4.4.1 and Table 2.
        calibration_clients: ours; the fraction that takes part in a round in the paper's Section 3.1.2.
        batch_size: iurada/talos-task-arithmetic, vision/prune_finetune.py.
        batches: ours; the paper gives no value.
        fisher: ours; the paper says only that it is empirical (Section 3.3.1).
        calibration: paper, Section 3.3.2.
        backbone_rate: ours; the paper says only that it is lower (Section 3.1.1).
        restart: paper, Section 3.1.1.
    """

    facts: ClassVar[Facts] = Facts(
        "sparse",
        "Del Vecchio et al., Federated Learning Under the Lens of Task Arithmetic: Mitigating Interference via Sparse "
        "Fine-Tuning, Politecnico di Torino",
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.TRAVEL, Decision.WEIGHTS))

    head_rounds: int | None = parameter(
        None,
        "Rounds of stage one, in which only the head is trained; none: a third of all, at least one.",
        low=0,
    )
    sparsity: float = parameter(0.2, "The fraction of the backbone that is frozen in stage two.", low=0, below=1)
    rule: str = parameter("least", "Which entries of the backbone are trained.", choices=RULES)
    calibration_rounds: int = parameter(3, "Exchanges in which the Fisher information is estimated.", low=1)
    calibration_clients: float = parameter(0.1, "The fraction of clients asked in each of them.", above=0, high=1)
    batch_size: int = parameter(64, "Samples in a calibration minibatch.", low=1)
    batches: int = parameter(1, "Calibration minibatches of a client.", low=1)
    fisher: str = parameter(
        "sample", "How it is estimated (see above).", choices=("sample", "batch", "sampled-label", "sampled-logit")
    )
    calibration: str = parameter(
        "accumulate",
        "Estimates add up over the exchanges, or each freezes more under a soft mask of what is frozen so far.",
        choices=("accumulate", "soft-mask"),
    )
    backbone_rate: float = parameter(0.1, "What the learning rate is multiplied by in stage two.", above=0)
    restart: bool = parameter(True, "Whether the schedule of the learning rate begins anew in stage two.")

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say where a stage is missing or has nothing to train, and which options have no effect."""
        first = self.stage_one(outline.rounds)
        if not outline.layers.head_names:
            yield "The model has no linear head, so stage one of 'sparse-ft' trains nothing."
        elif first == 0:
            yield "'sparse-ft' has no rounds for the head (head_rounds=0), which stays as it was initialised or loaded."
        if first >= outline.rounds:
            yield (
                f"'sparse-ft' trains the head in all {outline.rounds} rounds and never the backbone; "
                "give more rounds, or fewer head_rounds."
            )
        estimating = ("calibration_rounds", "calibration_clients", "batch_size", "batches", "fisher", "calibration")
        unused = [name for name in estimating if getattr(self, name) != getattr(SparseFineTuning, name)]
        if unused and not self.estimates():
            why = f"rule={self.rule}" if self.sparsity > 0 else "sparsity=0"
            yield f"'sparse-ft' estimates nothing with {why}: leave {' and '.join(unused)} out, which have no effect."

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Train the head in stage one and the backbone in stage two."""
        first, rounds = self.stage_one(clients.rounds), clients.rounds
        if clients.round <= first:
            stage = (1, min(first, rounds)) if self.restart else None
            return (Phase(trains=lambda layers: layers.head_names, name="head", stage=stage),)
        stage = (first + 1, rounds) if self.restart else None
        return (Phase(trains=_backbone, rate=self.backbone_rate, name="backbone", stage=stage),)

    @property
    def plans_ahead(self) -> str | None:
        """What depends on how many rounds there are in all."""
        return "its stages divide the rounds"

    def stage_one(self, rounds: int) -> int:
        """Tell how many rounds stage one has."""
        return max(1, rounds // 3) if self.head_rounds is None else self.head_rounds

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

    def softens(self) -> bool:
        """Tell whether the mask grows from exchange to exchange."""
        return self.calibration == "soft-mask" and self.estimates()

    def calibrated(self, memory: Stack) -> bool:
        """Tell whether the server has found the mask: by a name, so that no round waits for a GPU to know it."""
        return "found" in memory

    def server_memory(self, server: Server) -> Tensors:
        """Start with a mask that trains everything."""
        masks = everything({name: server.model[name] for name in _shared_backbone(server)})
        return under("mask", masks) | {"calibrated": torch.zeros((), dtype=torch.int64, device=server.sizes.device)}

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start with a mask that trains everything, the initial head, and no calibration done."""
        masks = everything({name: model[name] for name in _backbone(clients.layers)})
        head = {name: model[name] for name in clients.layers.head_names}
        return under("mask", masks) | under("head", head) | {"calibrated": torch.zeros_like(clients.sizes)}

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
        seen = soften(model, clients.memory.group("mask")) if method.softens() else model
        number = int(clients.memory["calibrated"][0])  # other minibatches each time
        return Message(clients.probe.fisher(seen, names, method.batch_size, method.batches, method.fisher, number))

    def conclude(self, server: Server, replies: Message) -> ModelAndMemory:
        """Average over clients, accumulate over rounds, and after the last choose what is trained."""
        method, equal = self.method, torch.ones_like(server.sizes)
        means = {name: aggregate_scores(estimates, equal) for name, estimates in replies.tensors.items()}
        number = int(server.memory["calibrated"]) + 1
        memory = server.memory | {"calibrated": server.memory["calibrated"] + 1}
        if number >= method.calibrations():
            memory |= {"found": torch.ones_like(server.memory["calibrated"], dtype=torch.bool)}
        if method.softens():
            frozen = progressive_sparsity(method.sparsity, number, method.calibration_rounds)
            return {}, memory | under("mask", select_further(means, memory.group("mask"), frozen, method.rule))
        so_far = memory.group("fisher")
        fisher = {name: mean + so_far.get(name, torch.zeros_like(mean)) for name, mean in means.items()}
        if not method.calibrated(memory):
            return {}, memory | under("fisher", fisher)
        scores = {name: fisher.get(name, server.model[name]) for name in _shared_backbone(server)}
        masks = select(scores, method.sparsity, method.rule, seed=server.seed)
        return {}, memory.without("fisher") | under("mask", masks)

    def announce(self, server: Server) -> Message:
        """Send the number of the calibration and its mask, one bit per entry; after the last also the head, as stage
        one left it.
        """
        number = {"calibrated": server.memory["calibrated"][None]}
        masks = under("mask", one_for_all(server.memory))
        if not self.method.calibrated(server.memory):
            return Message(number | masks if self.method.softens() else number)
        heads = sorted(name for name in server.layers.head_names if name in server.model)
        return Message(number | masks | under("head", {name: server.model[name][None] for name in heads}))

    def adopt(self, clients: Clients, announcement: Message) -> Tensors:
        """Take over what was announced."""
        count = len(clients.ids)
        taken = {name: tensor.expand(count, *tensor.shape[1:]) for name, tensor in announcement.tensors.items()}
        return {**clients.memory, **taken}


def _backbone(layers: LayerMap) -> list[str]:
    """Name all parameters but those of the head."""
    return [name for name in layers.parameter_names if name not in layers.head_names]


def _shared_backbone(server: Server) -> list[str]:
    return [name for name in _backbone(server.layers) if name in server.model]

"""Methods that treat the head of a model in another way than its body: FedPer, FedRep, FedBABU, FedRoD.

The head is the last layer with weights, or the last few, each with the norm on its output; the body is the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.losses import cross_entropy
from fedstrata.methods.contract.compatibility import defines
from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Phase, Server, Step, Training
from fedstrata.methods.mechanisms.layer_choice import CHOOSES_WHAT_TRAVELS, DECIDES_ON_THE_HEAD, DECIDES_WHAT_IS_USED
from fedstrata.methods.mechanisms.masking import Masked
from fedstrata.spec import parameter
from fedstrata.stack import Tensors

_FAMILY = "personal layers and models"


@dataclass(frozen=True)
class BodyAndHead(Part):
    """A model divided into body and head, of which the body travels."""

    claims: ClassVar[tuple[str, ...]] = (DECIDES_ON_THE_HEAD,)
    only_on_shared: ClassVar[bool] = True

    head_layers: int = parameter(1, "How many of the last layers with weights form the head.", low=1)

    def notes(self, layers: LayerMap) -> Iterable[str]:
        """Refuse a head that leaves no body."""
        if self.head_layers >= len(layers.weighted):
            raise FedStrataError(
                f"'{self.name}' was given head_layers={self.head_layers}, but the model has {len(layers.weighted)} "
                "layers with weights, and at least one must form the body; give a smaller number or another model."
            )
        return ()

    def head(self, layers: LayerMap) -> frozenset[str]:
        """Name all tensors of the head."""
        last = layers.weighted[-self.head_layers :]
        return frozenset(
            name for block in layers.blocks() if block[0] in last for layer in block for name in layer.names
        )

    def body(self, layers: LayerMap) -> list[str]:
        """Name the parameters of the body."""
        head = self.head(layers)
        return [name for name in layers.parameter_names if name not in head]


@methods.register("fedper")
@dataclass(frozen=True)
class FedPer(BodyAndHead):
    r"""FedAvg on the body; every client keeps a head of its own and trains both together.

    With body :math:`\phi` and heads :math:`h_k`, each client makes its local steps on :math:`f_k(\phi, h_k)` and sends
    :math:`\phi`; heads never leave a client. Norm layers and their running statistics belong to the body and are
    averaged, unless ``fedbn`` keeps them.
    """

    facts: ClassVar[Facts] = Facts(
        _FAMILY,
        "Arivazhagan et al., Federated Learning with Personalization Layers, 2019",
        "https://arxiv.org/abs/1912.00818",
    )

    def personal(self, layers: LayerMap) -> Iterable[str]:
        """Keep the head."""
        return self.head(layers)


@methods.register("fedrep")
@dataclass(frozen=True)
class FedRep(FedPer):
    r"""Like FedPer, but a client first trains its head on the body received, then the body under it.

    With the body frozen, the head :math:`h_k` is trained for ``head_epochs``; with this head frozen, the body
    :math:`\phi` is trained for ``body_epochs`` and sent. As in the authors' experiments, the local epochs of the
    experiment are those of the head, and the body is trained for a single one. Running statistics follow the data in
    both phases.
    """

    facts: ClassVar[Facts] = Facts(
        _FAMILY,
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021",
        "https://arxiv.org/abs/2102.07089",
    )

    head_epochs: int | None = parameter(None, "Epochs for the head; none: as the experiment says.", low=1)
    body_epochs: int | None = parameter(1, "Epochs for the body; none: as the experiment says.", low=1)

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Train the head, then the body."""
        return (
            Phase(trains=self.head, epochs=self.head_epochs, name="head"),
            Phase(trains=self.body, epochs=self.body_epochs, name="body"),
        )


@methods.register("fedbabu")
@dataclass(frozen=True)
class FedBABU(BodyAndHead):
    r"""Train and average only the body under a fixed random head; fine-tune for each client at the end.

    The head stays at its common initial values, which everybody knows, so that it never travels; all clients learn a
    body for the same head. After the last round each client fine-tunes its copy: the whole model (``tune=full``, the
    authors' choice), or its ``body`` or ``head`` alone, at a hundredth of the initial learning rate, where the authors'
    schedule ends. PLayer-FL's variant is ``fedbabu(head_layers=2, tune=head, epochs=1, rate=1)``. Before that,
    everybody uses the same global model.
    """

    facts: ClassVar[Facts] = Facts(
        _FAMILY,
        "Oh et al., FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022",
        "https://arxiv.org/abs/2106.06042",
    )
    claims: ClassVar[tuple[str, ...]] = (DECIDES_ON_THE_HEAD, CHOOSES_WHAT_TRAVELS, DECIDES_WHAT_IS_USED)

    tune: str = parameter("full", "What is fine-tuned at the end.", choices=("full", "body", "head"))
    epochs: int | None = parameter(5, "Epochs of fine-tuning; none: as many as in a round.", low=1)
    rate: float = parameter(0.01, "What the initial learning rate is multiplied by for fine-tuning.", above=0)

    def objects_to(self, other: Part) -> str | None:
        """Refuse masks that would change the head."""
        if not isinstance(other, Masked):
            return None
        return f"'{other.name}' masks weights of the head too, and under '{self.name}' it stays as it was initialised"

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Train the body."""
        return (Phase(trains=self.body, name="body"),)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send the body."""
        return message.without(self.head(server.layers))

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the body."""
        return message.without(self.head(clients.layers))

    def adaptation(self) -> Phase:
        """Fine-tune the model, or a part of it."""
        trains = {"full": None, "body": self.body, "head": self.head}[self.tune]
        return Phase(trains=trains, epochs=self.epochs, rate=self.rate, name="fine-tuning")


@methods.register("fedrod")
@dataclass(frozen=True)
class FedRoD(Part):
    r"""Share a model trained with a class-balanced loss; add a personal head to it at each client.

    The shared model, body :math:`z` and generic head :math:`g`, minimises the balanced softmax loss :math:`-\log
    \frac{n_{k,y} e^{g_y}}{\sum_c n_{k,c} e^{g_c}}` with the client's own class counts :math:`n_{k,c}` (a class that it
    lacks has no part in the sum), so that clients with different classes learn towards one goal. The personal head
    :math:`h_k`, linear on the same features, minimises the plain cross entropy of :math:`g(z) + h_k(z)` without
    touching :math:`z` and :math:`g`. Clients use the sum of both. The personal head never leaves a client; what travels
    is as in FedAvg.

    Where the paper says nothing, the personal head starts at zero: a client begins with the generic prediction. The
    variant whose personal heads come from a hypernetwork is not offered.
    """

    facts: ClassVar[Facts] = Facts(
        _FAMILY,
        "Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022",
        "https://arxiv.org/abs/2107.00778",
    )
    claims: ClassVar[tuple[str, ...]] = (DECIDES_ON_THE_HEAD, DECIDES_WHAT_IS_USED)

    def objects_to(self, other: Part) -> str | None:
        """Refuse parts that train something else than weights, to which a head could not be added."""
        if not (defines(other, "deployed") and other.deploys_alike):
            return None
        return f"'{self.name}' adds to the weights of the head, and '{other.name}' trains something else than weights"

    def notes(self, layers: LayerMap) -> Iterable[str]:
        """Refuse a model without a linear head."""
        if layers.head is None or layers.head.weight is None:
            raise FedStrataError(
                f"'{self.name}' adds to a linear head, and the model does not end in a linear layer with a weight of "
                "its own; choose another model or method."
            )
        return ()

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start every personal head at zero."""
        return {name: torch.zeros_like(model[name.removeprefix("head/")]) for name in self.learns(clients.layers)}

    def learns(self, layers: LayerMap) -> Iterable[str]:
        """Train the personal head."""
        return [f"head/{name}" for name in layers.head.parameters] if layers.head else []

    def wants_features(self) -> bool:
        """The personal head works on the input of the generic one."""
        return True

    def base_loss(self, clients: Clients, step: Step) -> Tensor:
        """Compute the balanced softmax loss of the generic prediction."""
        counts = clients.label_counts.to(step.outputs.dtype)
        return cross_entropy(step.outputs + counts.log()[:, None], step.labels).mean(1)

    def loss(self, clients: Clients, step: Step) -> Tensor | None:
        """Add the cross entropy of the personal prediction, which only the personal head learns from."""
        assert step.features is not None
        personal = self._personal_outputs(clients.layers, step.parameters, step.features.detach())
        return cross_entropy(step.outputs.detach() + personal, step.labels).mean(1)

    def _personal_outputs(self, layers: LayerMap, parameters: Tensors, features: Tensor) -> Tensor:
        assert layers.head is not None
        weight = parameters[f"{self.name}/head/{layers.head.weight}"]
        outputs = features @ weight.transpose(1, 2)
        return (
            outputs
            if layers.head.bias is None
            else outputs + parameters[f"{self.name}/head/{layers.head.bias}"][:, None]
        )

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Add the personal head to the generic one: the sum of two linear maps."""
        heads = {name.removeprefix("head/"): tensor for name, tensor in clients.memory.items()}
        return {name: tensor + heads[name] if name in heads else tensor for name, tensor in model.items()}

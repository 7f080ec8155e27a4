"""pFedMe: personal models from Moreau envelopes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Phase, Server, Step, Training
from fedstrata.methods.fedprox import proximal_term
from fedstrata.methods.mechanisms.drift import DriftCorrection
from fedstrata.methods.mechanisms.layer_choice import DECIDES_WHAT_IS_USED
from fedstrata.methods.mechanisms.shared import shared_parameters
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


@methods.register("pfedme")
@dataclass(frozen=True)
class PFedMe(Part):
    r"""Clients solve their own problem near a local copy of the global model, and move the copy towards it.

    On each batch, ``inner_steps`` steps of the experiment's optimiser bring the personal model :math:`\theta_k` towards
    the minimum of :math:`f_k(\theta_k) + \frac{\lambda}{2} \lVert \theta_k - w_k \rVert^2`; then the local copy moves,
    :math:`w_k \leftarrow w_k - \eta \lambda (w_k - \theta_k)`. Both start a round at the global model. The copies
    :math:`w_k` are sent and merged, and the server goes :math:`w \leftarrow (1 - \beta) w + \beta \sum_k p_k w_k`;
    clients use :math:`\theta_k`. As much travels as in FedAvg.

    The defaults are the authors'; their inner learning rate, about 0.1, is the experiment's here. At the minimum
    :math:`\lambda (w_k - \theta_k)` is the gradient, so :math:`\eta` acts as the learning rate of the copies: at 0.005
    they need hundreds of rounds; in a short run give more. As in the authors' code, :math:`\theta_k` goes on from batch
    to batch and clients count by their samples. Their code lets all clients train in every round and merges some; here
    those who sit out do not train, and keep their :math:`\theta_k`. Running statistics are those of :math:`\theta_k`,
    and the server averages them. What is personal to a client is not held and not copied.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020",
        "https://arxiv.org/abs/2006.08848",
    )
    claims: ClassVar[tuple[str, ...]] = (DECIDES_WHAT_IS_USED,)

    strength: float = parameter(15.0, "How strongly the personal model is held (lambda).", low=0)
    inner_steps: int = parameter(5, "Steps of the personal model on each batch (K).", low=1)
    copy_rate: float = parameter(0.005, "The learning rate of the local copy (eta).", above=0)
    beta: float = parameter(1.0, "How far the server goes towards the merged model.", above=0)

    def objects_to(self, other: Part) -> str | None:
        """Refuse corrections of the drift, which take what is trained for what is sent."""
        if not isinstance(other, DriftCorrection):
            return None
        return f"'{other.name}' corrects the drift of the model in training, and '{self.name}' sends another one"

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Keep the local copy of the parameters, and the whole personal model."""
        return {**_copy_of(model, clients.layers), **_personal(model)}

    def begin(self, clients: Clients, received: Tensors, message: Message) -> Tensors:
        """Start the local copy at what was received."""
        return {**clients.memory, **_copy_of(received, clients.layers)}

    def learns(self, layers: LayerMap) -> Iterable[str]:
        """Let the local copy change during training."""
        return [f"copy/{name}" for name in layers.parameter_names]

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Take several steps on each batch."""
        return (Phase(repeats=self.inner_steps),)

    def loss(self, clients: Clients, step: Step) -> Tensor | None:
        """Hold the personal model near the local copy, which learns nothing from the loss."""
        copy = {name: tensor.detach() for name, tensor in self._copy(clients, step.parameters).items()}
        return proximal_term(clients, step.parameters, copy, self.strength)

    def project(self, clients: Clients, step: Step, parameters: Tensors) -> Tensors:
        """After the last step on a batch, move the local copy towards the personal model."""
        if step.repeat < step.phase.repeats - 1:
            return parameters
        reach = self.copy_rate * self.strength
        moved = {
            f"{self.name}/copy/{name}": copy - reach * (copy - parameters[name])
            for name, copy in self._copy(clients, parameters).items()
        }
        return {**parameters, **moved}

    def _copy(self, clients: Clients, parameters: Tensors) -> Tensors:
        """Find the shared part of the local copy among what is trained."""
        return {name: parameters[f"{self.name}/copy/{name}"] for name in shared_parameters(clients)}

    def remember(self, clients: Clients, training: Training) -> Tensors:
        """Keep the personal model."""
        return {**clients.memory, **_personal(training.trained)}

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the local copy in place of the personal model."""
        sent = {name: clients.memory.get(f"copy/{name}", tensor) for name, tensor in message.tensors.items()}
        return replace(message, tensors=sent)

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Use the personal model."""
        return {name: clients.memory[f"personal/{name}"] for name in model}

    def refine(self, server: Server, new: Tensors) -> tuple[Tensors, Tensors]:
        """Go towards the merged parameters by beta, beyond them if it is larger than one."""
        if self.beta == 1:
            return new, server.memory
        gone = {
            name: server.model[name] + self.beta * (new[name] - server.model[name])
            for name in server.layers.parameter_names
            if name in new
        }
        return {**new, **gone}, server.memory


def _copy_of(model: Tensors, layers: LayerMap) -> Tensors:
    return {f"copy/{name}": model[name] for name in layers.parameter_names}


def _personal(model: Tensors) -> Tensors:
    return {f"personal/{name}": tensor for name, tensor in model.items()}

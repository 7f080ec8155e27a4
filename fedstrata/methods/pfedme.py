"""pFedMe: personal models from Moreau envelopes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, Message, ModelAndMemory, Phase, Server, Training
from fedstrata.methods.mechanisms.proximal import proximal_term
from fedstrata.methods.mechanisms.shared import shared_parameters
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, under


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
    touches: ClassVar[Touches] = Touches(
        decides=(Decision.USE,),
        relies_on=(Matter.SHARING, Matter.WEIGHTS),
        takes_away=(Matter.TRAINED_IS_SENT,),
    )

    strength: float = parameter(15.0, "How strongly the personal model is held (lambda).", low=0)
    inner_steps: int = parameter(5, "Steps of the personal model on each batch (K).", low=1)
    copy_rate: float = parameter(0.005, "The learning rate of the local copy (eta).", above=0)
    beta: float = parameter(1.0, "How far the server goes towards the merged model.", above=0)

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Keep the local copy of the parameters, and the whole personal model."""
        return under("copy", _parameters(clients, model)) | under("personal", model)

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Start the local copy at what was received."""
        return model, clients.memory | under("copy", _parameters(clients, model))

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Take several steps on each batch."""
        return (Phase(repeats=self.inner_steps),)

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Hold the personal model near the local copy."""
        return loss + proximal_term(clients, step.parameters, clients.memory.group("copy"), self.strength)

    def project(self, clients: Clients, step: LocalStep, parameters: Tensors) -> ModelAndMemory:
        """After the last step on a batch, move the shared part of the local copy towards the personal model."""
        if step.repeat < step.phase.repeats - 1:
            return parameters, clients.memory
        reach, copy = self.copy_rate * self.strength, clients.memory.group("copy")
        moved = {name: copy[name] - reach * (copy[name] - parameters[name]) for name in shared_parameters(clients)}
        return parameters, under("copy", moved)

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Keep the personal model."""
        return training.trained, clients.memory | under("personal", training.trained)

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the local copy in place of the personal model."""
        copy = clients.memory.group("copy")
        return replace(message, tensors={name: copy.get(name, tensor) for name, tensor in message.tensors.items()})

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Use the personal model."""
        return clients.memory.group("personal")

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Go towards the merged parameters by beta, beyond them if it is larger than one."""
        if self.beta == 1:
            return model, server.memory
        gone = {
            name: server.model[name] + self.beta * (model[name] - server.model[name])
            for name in server.layers.parameter_names
            if name in model
        }
        return {**model, **gone}, server.memory


def _parameters(clients: Clients, model: Tensors) -> Tensors:
    return {name: model[name] for name in clients.layers.parameter_names}

"""pFedMe: personal models from Moreau envelopes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Touches
from fedstrata.methods.contract.part import Part
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
from fedstrata.methods.mechanisms.proximal import proximal_term
from fedstrata.methods.mechanisms.shared import shared_parameters, usual_optimiser
from fedstrata.optimisers import SGD
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, under


@methods.register("pfedme")
@dataclass(frozen=True)
class PFedMe(Part):
    r"""Clients solve their own problem near a local copy of the global model, and move the copy towards it.

    On each batch, ``inner_steps`` steps :math:`\theta_k \leftarrow \theta_k - \eta_p (\nabla f_k(\theta_k) + \lambda
    (\theta_k - w_k) + \mu \theta_k)` bring the personal model towards the minimum of :math:`f_k(\theta_k) +
    \frac{\lambda}{2} \lVert \theta_k - w_k \rVert^2`; then the local copy moves, :math:`w_k \leftarrow w_k - \eta
    \lambda (w_k - \theta_k)`. Both start a round at the global model. The copies :math:`w_k` are sent and merged, and
    the server goes :math:`w \leftarrow (1 - \beta) w + \beta \sum_k p_k w_k`; clients use :math:`\theta_k`. As much
    travels as in FedAvg.

    At the minimum :math:`\lambda (w_k - \theta_k)` is the gradient, so :math:`\eta` is to the copies what the learning
    rate is to FedAvg's models: it is the experiment's. Personal models take plain steps at ``personal_rate``
    (:math:`\eta_p`), and nothing else of the experiment's optimiser acts; the schedule changes both rates. A personal
    model that jumps over its copy by more than the gap at every step, :math:`\eta_p \lambda \ge 2`, is refused. The
    copy's own jump over the personal model, by :math:`|1 - \eta \lambda|` of the gap, is made good by the inner steps
    as long as :math:`|1 - \eta_p \lambda|^K \, |1 - \eta \lambda| < 1`.

    As in the authors' code, :math:`\theta_k` goes on from batch to batch and clients count by their samples. Their code
    lets all clients train in every round and merges some; here those who sit out do not train, and keep their
    :math:`\theta_k`. What it tests as the personal models are the local copies, since both lists hold the same tensors;
    here it is :math:`\theta_k`, as in the paper. Running statistics are those of :math:`\theta_k`, and the server
    averages them. What is personal to a client is not held and not copied.

    Defaults:
        strength, inner_steps, personal_rate, beta: CharlieDinh/pFedMe, main.py.
        decay: CharlieDinh/pFedMe, FLAlgorithms/optimizers/fedoptimizer.py.
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
    personal_rate: float = parameter(0.09, "The learning rate of the personal model.", above=0)
    decay: float = parameter(0.001, "The weight decay of the personal model (mu).", low=0)
    beta: float = parameter(1.0, "How far the server goes towards the merged model.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.personal_rate * self.strength >= 2:
            raise FedStrataError(
                f"'{self.name}' was given personal_rate={self.personal_rate:g} and strength={self.strength:g}, with "
                "which personal models run away from their copies at every step; their product must be below 2."
            )

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say what of the optimiser does not act, and where the copies run away from the personal models."""
        optimiser = outline.optimiser
        if optimiser not in (usual_optimiser(), SGD(optimiser.learning_rate)):
            yield f"'{self.name}' brings its own optimiser; of '{optimiser}' only the learning rate acts, on copies."
        left = abs(1 - self.personal_rate * self.strength) ** self.inner_steps
        if left * abs(1 - optimiser.learning_rate * self.strength) >= 1:
            yield (
                f"With a learning rate of {optimiser.learning_rate:g} and strength={self.strength:g} the local copies "
                f"of '{self.name}' jump over the personal models further than these can follow; give a smaller "
                "learning rate or strength, or more inner_steps."
            )

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Keep the local copy of the parameters, and the whole personal model."""
        return under("copy", _parameters(clients, model)) | under("personal", model)

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Start the local copy at what was received."""
        return model, clients.memory | under("copy", _parameters(clients, model))

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Take several plain steps on each batch."""
        plain = SGD(self.personal_rate, weight_decay=self.decay)
        return (Phase(repeats=self.inner_steps, optimiser=plain),)

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Hold the personal model near the local copy."""
        return loss + proximal_term(clients, step.parameters, clients.memory.group("copy"), self.strength)

    def project(self, clients: Clients, step: LocalStep, parameters: Tensors) -> ModelAndMemory:
        """After the last step on a batch, move the shared part of the local copy towards the personal model."""
        if step.repeat < step.phase.repeats - 1:
            return parameters, clients.memory
        reach, copy = step.learning_rate * self.strength, clients.memory.group("copy")
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

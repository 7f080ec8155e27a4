"""FedALA: each client learns, weight by weight, how much of the global model it takes over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstrata.methods.contract.declarations import Facts, Matter, Needs, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory
from fedstrata.methods.mechanisms.shared import shared_parameters
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, align, under


@methods.register("fedala")
@dataclass(frozen=True)
class FedALA(Part):
    r"""Start each client between its own last model and the global one, as its own data says.

    With the client's model :math:`\theta_k` after its last training and the global model :math:`\theta`, it goes on
    from :math:`\hat\theta_k = \theta_k + (\theta - \theta_k) \odot W_k` in its last layers, and from :math:`\theta` in
    all others. The weights :math:`W_k`, at first one, follow the loss on the client's own samples with the rest held:
    :math:`W_k \leftarrow \mathrm{clip}(W_k - \eta \, \nabla_{\hat\theta_k} L \odot (\theta - \theta_k), 0, 1)`. The
    model so initialised is trained and tested; a client that has not trained yet takes the global model. What travels
    is as in FedAvg.

    In the authors' code :math:`W_k` is learned in a pass over a random 80 % of the samples, and the first time in
    passes until the loss of ten of them deviates by less than 0.1, at least eleven; here it takes as many steps on
    random minibatches, the first time eleven passes' worth.

    Defaults:
        layers, samples, rate, batch_size: TsingZ0/FedALA, system/main.py.
        first_passes: TsingZ0/FedALA, system/utils/ALA.py.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023",
        "https://arxiv.org/abs/2212.01197",
    )
    touches: ClassVar[Touches] = Touches(
        relies_on=(Matter.SHARING, Matter.AVERAGE, Matter.SHARED_HEAD), takes_away=(Matter.ONE_MODEL,)
    )

    layers: int = parameter(1, "How many of the last layers with weights are adapted (p).", low=1)
    samples: float = parameter(0.8, "The part of its samples that a client learns from (s).", above=0, high=1)
    rate: float = parameter(1.0, "The learning rate of the weights (eta).", above=0)
    batch_size: int = parameter(10, "Samples in a minibatch.", low=1)
    first_passes: int = parameter(11, "Passes over the samples the first time.", low=1)

    @property
    def needs(self) -> Needs:
        """The own model of the round before is one end of the way."""
        return Needs(previous=True)

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start with weights of one, which take the global model over."""
        last = {name for layer in clients.layers.weighted[-self.layers :] for name in layer.parameters}
        adapted = {name: torch.ones_like(model[name]) for name in shared_parameters(clients) if name in last}
        return under("weight", adapted) | {"begun": torch.zeros_like(clients.sizes, dtype=torch.bool)}

    def receive(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Learn the weights, and start between the two models."""
        weights, own, trained = clients.memory.group("weight"), clients.previous, clients.trained
        way = {name: model[name] - own[name] for name in weights}
        passes = torch.where(clients.memory["begun"], 1, self.first_passes)
        steps = trained * passes * (self.samples * clients.sizes / self.batch_size).ceil()
        for step in range(int(steps.max())):
            between = {**model, **{name: own[name] + way[name] * weight for name, weight in weights.items()}}
            slopes = clients.probe.gradients(between, self.batch_size, draw=step + 1)
            moved = {name: (weights[name] - self.rate * slopes[name] * way[name]).clamp(0, 1) for name in weights}
            weights = Stack({name: moved[name].where(align(step < steps, old), old) for name, old in weights.items()})
        between = {
            name: (own[name] + way[name] * weight).where(align(trained, weight), model[name])
            for name, weight in weights.items()
        }
        return {**model, **between}, under("weight", weights) | {"begun": clients.memory["begun"] | trained}

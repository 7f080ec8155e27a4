"""FedPM: random weights that nobody changes, and masks that everybody learns."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Facts, Matter, Touches
from fedstrata.methods.contract.part import Metrics
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Declared, Message, Outline, Phase, Server, Training
from fedstrata.methods.mechanisms.reparametrised import Reparametrised
from fedstrata.methods.mechanisms.shared import equal_weights, usual_optimiser
from fedstrata.optimisers import Adam
from fedstrata.rng import key, numpy_generator, uniform
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, constant


@methods.register("fedpm")
@dataclass(frozen=True)
class FedPM(Reparametrised):
    r"""Random weights stay as they are; clients learn which of them to use, and send one bit for each.

    Every weight and bias of a layer that is no norm is frozen at :math:`\pm c` with :math:`c = e \sqrt{1 /
    n_{in}}`, drawn from the seed, so that it never travels. Clients train a score :math:`s` for each, which begins at
    a draw from N(0, 1): in every forward pass a weight is used with probability :math:`\theta = \sigma(s)`, and the
    gradient passes through the draw as if it were :math:`\theta`, in the authors' code times :math:`\theta` once more
    (``slope``). A client then sends one drawn mask. The server takes the mode of the posterior under a uniform Beta
    prior that is renewed in every round, which is the mean of the masks, with 0 and 1 replaced by ``epsilon`` and 1 -
    ``epsilon``, and sends the scores :math:`\log(\theta / (1 - \theta))`. All clients count alike.

    Scores need large steps, and are trained by an Adam of their own, whose state each client keeps from round to round:
    the experiment's optimiser does not act, only its schedule. What is tested is one network drawn from :math:`\theta`,
    or with ``tested=threshold`` the weights with :math:`\theta > 1/2`. Norm layers stay at their initial scale and
    shift; their running statistics are shared as usual.

    A good network must lie hidden among the random weights, and one bit per client must tell where. The authors' models
    have four to ten convolutions of 64 to 1024 channels and train for 100 or 200 rounds; in a small model or few
    rounds, and all the more where clients have different classes, FedAvg is far ahead.

    Defaults:
        learning_rate: BerivanIsik/sparse-random-networks, src/fedssm/models/utils.py.
        epsilon: BerivanIsik/sparse-random-networks, src/fedssm/client.py.
        slope: BerivanIsik/sparse-random-networks, src/fedssm/utils/random.py.
        tested: BerivanIsik/sparse-random-networks, src/fedssm/simulator.py.
    """

    facts: ClassVar[Facts] = Facts(
        "sparse",
        "Isik et al., Sparse Random Networks for Communication-Efficient Federated Learning, ICLR 2023",
        "https://arxiv.org/abs/2209.15328",
    )

    touches: ClassVar[Touches] = Reparametrised.touches.also(takes_away=(Matter.SHARED_WEIGHTS,))

    epsilon: float = parameter(0.01, "How near to 0 and 1 a probability may come at the server.", above=0, below=0.5)
    learning_rate: float = parameter(0.1, "The learning rate of Adam, which trains the scores.", above=0)
    slope: str = parameter(
        "released", "What the gradient of a draw is taken to be: the probability, or one.", choices=("released", "one")
    )
    tested: str = parameter(
        "sample", "The network that is tested: one draw, or what is likelier than not.", choices=("sample", "threshold")
    )

    def initial(self, layers: LayerMap, model: Tensors, seed: int) -> Tensors:
        """Put a score in the place of each weight."""
        scores = {
            name: torch.from_numpy(numpy_generator(seed, "fedpm", "scores", name).standard_normal(model[name].shape))
            for name in _scored(layers)
        }
        return {**model, **{name: score.to(model[name]) for name, score in scores.items()}}

    # The network ------------------------------------------------------------------------------------------------------

    def effective(self, clients: Clients, parameters: Tensors, step: Tensor | None) -> Tensors:
        """Draw the weights that take part in this pass; gradients go to their probabilities.

        For a test, scores become one network, by the same draws for everybody.
        """

        def used(name: str) -> Tensor:
            chance = parameters[name].sigmoid()
            if step is None:
                return self._tested(clients, name, chance)
            drawn = uniform(clients.keys(f"fedpm/{name}"), chance.shape[1:], step) < chance
            passed = chance * chance.detach() if self.slope == "released" else chance
            return passed + (drawn.to(chance.dtype) - passed).detach()

        return {**parameters, **_masked(clients, parameters, {name: used(name) for name in _scored(clients.layers)})}

    def _tested(self, clients: Clients, name: str, chance: Tensor) -> Tensor:
        place = torch.tensor(key(clients.seed, clients.round, "fedpm", "tested", name), device=chance.device)
        drawn = uniform(place, chance.shape[1:]) if self.tested == "sample" else chance.new_full((), 0.5)
        return (drawn < chance).to(chance.dtype)

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Train scores only, with their own optimiser."""
        return (Phase(trains=_scored, optimiser=Adam(self.learning_rate, keep=True)),)

    # What travels -----------------------------------------------------------------------------------------------------

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send scores; what is frozen everybody knows."""
        return message.without(_frozen(server.layers))

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send one drawn mask, a bit per weight."""
        sent = message.without(_frozen(clients.layers))
        for name in _scored(clients.layers):
            if name in sent.tensors:
                chance = sent.tensors[name].sigmoid()
                sent.tensors[name] = uniform(clients.keys(f"fedpm/sent/{name}"), chance.shape[1:]) < chance
        return sent

    def weigh(self, declared: Declared) -> Tensor:
        """Let all clients count alike."""
        return equal_weights(declared)

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Average the masks into probabilities, and those into scores; average the rest as usual."""
        scored = [name for name in _scored(server.layers) if name in replies.tensors]
        merged = super().merge(server, replies.without(scored), shares)
        for name in scored:
            masks = replies.tensors[name].to(server.model[name].dtype)
            weights = shares.to(masks.dtype).reshape(-1, *[1] * (masks.dim() - 1))
            chance = (weights * (self.epsilon + (1 - 2 * self.epsilon) * masks)).sum(0)
            merged[name] = chance.logit()
        return merged

    def metrics(self, server: Server) -> Metrics:
        """Tell which part of each layer's weights is used on average."""
        chances = {
            layer.name: [server.model[name].sigmoid().flatten() for name in layer.weights if name in server.model]
            for layer in server.layers.weighted
        }
        return {"density": {layer: float(torch.cat(own).mean()) for layer, own in chances.items() if own}}

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say that without such weights nothing is learned, and that another optimiser does not act."""
        if not _scored(outline.layers):
            yield "The model has no convolution or linear weights, so 'fedpm' learns nothing."
        if outline.optimiser != usual_optimiser():
            yield f"'fedpm' brings its own optimiser, and '{outline.optimiser}' does not act; give its learning_rate."


def _scored(layers: LayerMap) -> list[str]:
    """Name what has a score: the weights and biases of all layers with weights."""
    return [name for layer in layers.weighted for name in layer.parameters]


def _frozen(layers: LayerMap) -> list[str]:
    """Name the parameters that stay at their initial values."""
    scored = set(_scored(layers))
    return [name for name in layers.parameter_names if name not in scored]


def _masked(clients: Clients, parameters: Tensors, masks: Tensors) -> Tensors:
    """Multiply the frozen weights, drawn from the seed again each time, by masks ``[K, ...]``."""
    layers, masked = clients.layers, {}
    for name, mask in masks.items():
        weights = layers.of(name).weights
        weight = name if name in weights or not weights else weights[0]
        size = math.e / math.sqrt(math.prod(parameters[weight].shape[2:]))
        place = constant(key(clients.seed, "fedpm", "weights", name), torch.int64, mask.device)
        heads = uniform(place, mask.shape[1:])
        masked[name] = torch.where(heads < 0.5, -size * mask, size * mask)
    return masked

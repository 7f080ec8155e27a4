"""FLTrust: the server trains on samples of its own, and trusts clients that go its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional import trust_weights
from fedstrata.methods.contract.declarations import Facts, Matter, Needs, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, Proxy, Server
from fedstrata.methods.mechanisms.masking import keep
from fedstrata.methods.mechanisms.robust_merging import RobustMerge, updates_of
from fedstrata.optimisers import SGD
from fedstrata.rng import permutation
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align, clone, take_first


@methods.register("fltrust")
@dataclass(frozen=True)
class FLTrust(RobustMerge):
    r"""Trust each client as far as it goes the way of the server's own training on a few labelled samples.

    The server trains the model on its samples as a client would, which gives an update g. A client's update counts by
    :math:`\mathrm{ReLU}(\cos(\Delta_k, g))`, cut or stretched to the length of g, over all shared parameters together.
    It is the only method here that may hold where more than half of the clients lie; it is as good as the server's
    samples are like the clients', and a step is as long as the server's own training, whatever the clients did. Where
    nobody is trusted the model stays as it is.

    Running statistics of norm layers are no part of an update in the paper; they become those of the server's own
    training, because a liar could send true weights with false statistics. The samples are taken out of the test set,
    balanced over the classes, so all scores are on the rest; a server of real sites has none. ``epochs``,
    ``batch_size``, ``learning_rate`` and ``momentum`` should be what clients do. Nothing more travels than in FedAvg.

    Defaults:
        samples: ours.
        batch_size, epochs, learning_rate, momentum: ours; those of an experiment that names none.
    """

    facts: ClassVar[Facts] = Facts(
        "robust",
        "Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS 2021",
        "https://arxiv.org/abs/2012.13995",
    )
    touches: ClassVar[Touches] = RobustMerge.touches.also(relies_on=(Matter.WHOLE_MODEL,))

    samples: int = parameter(100, "Labelled samples at the server.", low=1)
    epochs: int = parameter(5, "Passes over them in every round.", low=1)
    batch_size: int = parameter(32, "The samples of one step.", low=1)
    learning_rate: float = parameter(0.1, "The learning rate of the server's training.", above=0)
    momentum: float = parameter(0.9, "The momentum of the server's training.", low=0, below=1)

    @property
    def needs(self) -> Needs:
        """Ask for the server's samples."""
        return Needs(proxy=self.samples)

    def combined(self, server: Server, replies: Message) -> Tensors:
        """Add the updates up, each by the trust in its client."""
        if server.proxy is None:
            raise FedStrataError(f"'{self.name}' trains on labelled samples at the server, and this server has none.")
        trained, buffers = self._trained(server, server.proxy)
        updates = {name: update for name, update in updates_of(server, replies).items() if name in trained}
        if not updates:
            return {name: server.model[name] for name in replies.tensors}
        sent = {name: mask[:1] for name, mask in replies.masks.items()}
        own = take_first(keep({name: (trained[name] - server.model[name])[None] for name in updates}, sent))
        weights = trust_weights(list(updates.values()), list(own.values()))
        new = {name: server.model[name] + _total(update, weights) for name, update in updates.items()}
        return {**new, **{name: tensor for name, tensor in buffers.items() if name in replies.tensors}}

    def _trained(self, server: Server, proxy: Proxy) -> tuple[Tensors, Tensors]:
        """Train the server's model on its samples; return its parameters and its buffers after it."""
        optimiser = SGD(self.learning_rate, momentum=self.momentum)
        whole = {name: tensor[None] for name, tensor in server.model.items()}
        parameters: Tensors = clone({name: whole[name] for name in server.layers.parameter_names})
        buffers = {name: whole[name] for name in server.layers.buffer_names if name in whole}
        state = optimiser.state(parameters)
        key = torch.tensor(server.key(self.name), device=server.sizes.device)
        batches = [
            rows
            for epoch in range(self.epochs)
            for rows in torch.split(permutation(key, proxy.size, epoch), self.batch_size)
        ]
        for step, rows in enumerate(batches, server.round * len(batches)):
            with torch.enable_grad():
                moving = {name: tensor.requires_grad_() for name, tensor in parameters.items()}
                loss, after = proxy.loss(moving, buffers, step, rows)
                slopes = torch.autograd.grad(loss[0], list(moving.values()), allow_unused=True)
            parameters = {name: tensor.detach() for name, tensor in moving.items()}
            used = {name: slope for name, slope in zip(parameters, slopes, strict=True) if slope is not None}
            optimiser.update_(parameters, used, state, self.learning_rate)
            buffers = {name: after[name].detach() for name in buffers}
        return take_first(parameters), take_first(buffers)


def _total(update: Tensor, weights: Tensor) -> Tensor:
    return (update * align(weights, update).to(update.dtype)).sum(0)

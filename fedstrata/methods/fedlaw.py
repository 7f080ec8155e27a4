"""FedLAW: the server learns the clients' shares, and how much to shrink, on labelled samples of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Needs, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, Server
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, weighted_mean

_ADAM_BETAS = (0.5, 0.999)
_HALVE_EVERY = 20


@methods.register("fedlaw")
@dataclass(frozen=True)
class FedLAW(Part):
    r"""Learn the clients' shares and a global shrinking factor on a small labelled set at the server.

    The new model is :math:`\gamma \sum_k \lambda_k w_k` with :math:`\lambda = \mathrm{softmax}(a)` and :math:`\gamma =
    e^b`. In every round a starts at the logarithms of the relative sizes and b at 0, and both follow the loss on the
    server's samples with Adam (betas 0.5 and 0.999, the learning rate halved every 20 epochs). Nothing holds
    :math:`\gamma` below 1.

    The samples are taken out of the test set, balanced over the classes, so all scores are on the rest. An epoch is one
    step on all of them, where the released code makes batches of 128. It makes 20 epochs; FedLWS compares with 100. Its
    learning rate is 0.01 on CIFAR-10 and else 0.005. Running statistics become those of the server's samples, in whose
    passes norm layers are in training mode, as there. Nothing more travels than in FedAvg.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Li et al., Revisiting Weighted Aggregation in Federated Learning with Neural Networks, ICML 2023",
        "https://arxiv.org/abs/2302.10911",
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.SHARES,), relies_on=(Matter.WHOLE_MODEL,))

    samples: int = parameter(200, "Labelled samples at the server.", low=1)
    epochs: int = parameter(20, "Steps on them in every round.", low=1)
    learning_rate: float = parameter(0.01, "The learning rate of shares and factor.", above=0)

    @property
    def needs(self) -> Needs:
        """Ask for the server's samples."""
        return Needs(proxy=self.samples)

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Learn the shares and the factor, and merge the parameters by them."""
        if server.proxy is None:
            raise FedStrataError(f"'{self.name}' learns from labelled samples at the server, and this server has none.")
        buffers = {name: server.model[name][None] for name in server.layers.buffer_names if name in server.model}
        with torch.enable_grad():
            logits = shares.log().requires_grad_()
            factor = torch.zeros_like(shares.sum()).requires_grad_()
            optimiser = torch.optim.Adam([logits, factor], lr=self.learning_rate, betas=_ADAM_BETAS)
            schedule = torch.optim.lr_scheduler.StepLR(optimiser, _HALVE_EVERY, 0.5)
            for step in range(self.epochs):
                model = self._merged(server, replies, logits, factor)
                loss, after = server.proxy.loss({name: tensor[None] for name, tensor in model.items()}, buffers, step)
                logits.grad, factor.grad = torch.autograd.grad(loss.sum(), [logits, factor])
                optimiser.step()
                schedule.step()
                buffers = {name: after[name].detach() for name in buffers}
        merged = self._merged(server, replies, logits.detach(), factor.detach())
        return {**merged, **{name: tensor[0] for name, tensor in buffers.items()}}

    def _merged(self, server: Server, replies: Message, logits: Tensor, factor: Tensor) -> Tensors:
        shares, tensors, masks = logits.softmax(0), replies.tensors, replies.masks
        merged = {
            name: factor.exp().to(old.dtype) * weighted_mean(tensors[name], shares, masks.get(name), old)
            for name, old in server.model.items()
            if name in tensors and name in server.layers.parameter_names
        }
        return {**{name: server.model[name] for name in server.layers.parameter_names}, **merged}

"""FedLAW: the server learns the clients' shares, and how much to shrink, on labelled samples of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional import shrinking
from fedstrata.functional.lws import Shrinking
from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Needs, Touches
from fedstrata.methods.contract.part import Metrics, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, ModelAndMemory, Proxy, Server
from fedstrata.methods.mechanisms.masking import keep
from fedstrata.rng import permutation
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, subtract, weighted_mean

_ADAM_BETAS = (0.5, 0.999)
_HALVE_EVERY = 20


@methods.register("fedlaw")
@dataclass(frozen=True)
class FedLAW(Part):
    r"""Learn the clients' shares and a global shrinking factor on a small labelled set at the server.

    The new model is :math:`\gamma \sum_k \lambda_k w_k` with :math:`\lambda = \mathrm{softmax}(a)` and :math:`\gamma =
    e^b`. In every round a starts at the logarithms of the sizes and b at 0, and both follow the loss on
    batches of the server's samples with Adam (betas 0.5 and 0.999, the learning rate halved every 20 epochs). Nothing
    holds :math:`\gamma` below 1. ``learns=factor`` leaves the shares at the relative sizes, ``learns=shares`` the
    factor at 1.

    The samples are taken out of the test set, balanced over the classes, so all scores are on the rest. The released
    code makes 20 epochs of 200 samples in batches of 128, so 40 steps; FedLWS compares with 100 epochs. Its learning
    rate is 0.01 on CIFAR-10 and else 0.005. Running statistics become those of the server's samples, in whose passes
    norm layers are in training mode, as there. Nothing more travels than in FedAvg.

    The run's metrics tell ``fedlaw.gamma``, and what FedLWS sets beside it (its Eq. 4 and 5, Fig. 1a): how much the
    clients disagree, ``fedlaw.tau``, and the balance ``fedlaw.r`` between the shrinking and the step.

    Defaults:
        samples: ZexiLee/ICML-2023-FedLAW, args.py (2 % of the 10,000 test images of CIFAR-10).
        epochs, batch_size: ZexiLee/ICML-2023-FedLAW, args.py.
        learning_rate, learns: ZexiLee/ICML-2023-FedLAW, server_funct.py.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Li et al., Revisiting Weighted Aggregation in Federated Learning with Neural Networks, ICML 2023",
        "https://arxiv.org/abs/2302.10911",
    )
    touches: ClassVar[Touches] = Touches(
        decides=(Decision.SHARES, Decision.MERGING), relies_on=(Matter.WHOLE_MODEL,), takes_away=(Matter.MEAN,)
    )
    refines_merged: ClassVar[bool] = True

    samples: int = parameter(200, "Labelled samples at the server.", low=1)
    epochs: int = parameter(20, "Passes over them in every round.", low=1)
    learning_rate: float = parameter(0.01, "The learning rate of shares and factor.", above=0)
    batch_size: int = parameter(128, "The samples of one step.", low=1)
    learns: str = parameter(
        "both", "Learn the shares and the factor, or one of them.", choices=("both", "factor", "shares")
    )

    @property
    def needs(self) -> Needs:
        """Ask for the server's samples, and all replies to weigh."""
        return Needs(proxy=self.samples, replies=True)

    def server_memory(self, server: Server) -> Tensors:
        """Remember the last factor, and what goes with it."""
        return _remembered(Shrinking(gamma=1.0, tau=0.0, r=0.0))

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Learn the shares and the factor, and merge the parameters by them, instead of by the sizes."""
        if server.proxy is None:
            raise FedStrataError(f"'{self.name}' learns from labelled samples at the server, and this server has none.")
        shares, gamma, buffers = self._learned(server, server.proxy, replies)
        mean = _mean(server, replies, shares)
        shrunk = {**model, **{name: gamma.to(tensor.dtype) * tensor for name, tensor in mean.items()}}
        old = {name: server.model[name] for name in mean}
        updates = keep({name: replies.tensors[name] - old[name] for name in mean}, replies.masks)
        step = subtract(mean, old)
        told = shrinking(list(old.values()), list(updates.values()), None, step=list(step.values()), fixed=float(gamma))
        return {**shrunk, **{name: tensor[0] for name, tensor in buffers.items()}}, _remembered(told)

    def _learned(self, server: Server, proxy: Proxy, replies: Message) -> tuple[Tensor, Tensor, Tensors]:
        """Return the shares ``[K]``, the factor, and the buffers after all passes."""
        sizes = server.sizes.to(torch.float64)
        buffers = {name: server.model[name][None] for name in server.layers.buffer_names if name in server.model}
        rest = {name: server.model[name] for name in server.layers.parameter_names}
        with torch.enable_grad():
            logits, factor = sizes.log(), sizes.new_zeros(())
            learned = {"both": [logits, factor], "factor": [factor], "shares": [logits]}[self.learns]
            for one in learned:
                one.requires_grad_()
            optimiser = torch.optim.Adam(learned, lr=self.learning_rate, betas=_ADAM_BETAS)
            schedule = torch.optim.lr_scheduler.StepLR(optimiser, _HALVE_EVERY, 0.5)
            for step, (epoch_ends, rows) in enumerate(self._batches(server, proxy.size)):
                mean = _mean(server, replies, logits.softmax(0))
                model = {**rest, **{name: factor.exp().to(tensor.dtype) * tensor for name, tensor in mean.items()}}
                loss, after = proxy.loss({name: tensor[None] for name, tensor in model.items()}, buffers, step, rows)
                for one, slope in zip(learned, torch.autograd.grad(loss[0], learned), strict=True):
                    one.grad = slope
                optimiser.step()
                if epoch_ends:
                    schedule.step()
                buffers = {name: after[name].detach() for name in buffers}
        return logits.detach().softmax(0), factor.detach().exp(), buffers

    def _batches(self, server: Server, size: int) -> Iterator[tuple[bool, Tensor]]:
        """Shuffle the samples in every epoch; tell which batch ends one."""
        key = torch.tensor(server.key(self.name), device=server.sizes.device)
        for epoch in range(self.epochs):
            batches = torch.split(permutation(key, size, epoch), self.batch_size)
            yield from ((number == len(batches), rows) for number, rows in enumerate(batches, 1))

    def metrics(self, server: Server) -> Metrics:
        """Tell the factor of the round, and what goes with it."""
        return {f"{self.name}.{number}": float(server.memory[number]) for number in Shrinking._fields}


def _mean(server: Server, replies: Message, shares: Tensor) -> Tensors:
    """Merge the parameters by some shares."""
    return {
        name: weighted_mean(replies.tensors[name], shares, replies.masks.get(name), server.model[name])
        for name in server.layers.parameter_names
        if name in replies.tensors
    }


def _remembered(told: Shrinking) -> Tensors:
    return {number: torch.tensor(value, dtype=torch.float64) for number, value in told._asdict().items()}

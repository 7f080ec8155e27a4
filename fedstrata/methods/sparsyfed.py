"""SparsyFed: weights under a power, so that small ones stay small, pruned before they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedstrata.functional import top_mask
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Facts, Needs
from fedstrata.methods.contract.part import Metrics
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Outline, Server, Training
from fedstrata.methods.mechanisms.masking import keep, layer_densities, left_out, maskable, mean_with_zeros, send_under
from fedstrata.methods.mechanisms.reparametrised import Reparametrised
from fedstrata.spec import parameter
from fedstrata.stack import Tensors

_NEARLY = 1 - 1e-6
"""Where equal activations differ by rounding, all of them are kept or dropped."""


@methods.register("sparsyfed")
@dataclass(frozen=True)
class SparsyFed(Reparametrised):
    r"""Train weights under a power, prune them before sending, and train on sparse activations.

    The weights of the model's layers are :math:`w = \mathrm{sign}(v) |v|^\alpha` and clients train v: large
    weights move faster than small ones, and a weight at zero has no gradient and stays there, without a mask. It starts
    such that w is the common initial model. After local training a client keeps the :math:`\lfloor (1 - \sigma) d
    \rfloor` largest of all its weights and sends those. The server averages, with zeros for what was pruned, and sends
    what is not zero: clients agree on most of it, so that the global model stays nearly as sparse.

    In the backward pass, the gradient of a weight is computed from the layer's inputs of largest magnitude only, as
    many as the weight is dense (``activations``). The forward pass and the gradients of inputs are exact. The released
    code keeps the threshold of the first batch, and draws initial weights of its own; here each batch is thresholded
    by itself, and the model's own initial weights are used.

    Defaults:
        sparsity: paper, SSFL's comparison (Section 4.1 there); the authors go up to 0.95.
        alpha, activations: DieRoche/sparsyfed_copy, project/conf/task/cifar_resnet18.yaml (a copy of the authors'
            code).
    """

    facts: ClassVar[Facts] = Facts(
        "sparse",
        "Guastella, Sani et al., SparsyFed: Sparse Adaptive Federated Training, ICLR 2025",
        "https://arxiv.org/abs/2504.05153",
    )

    sparsity: float = parameter(0.5, "The fraction of weights that a client prunes before it sends.", low=0, below=1)
    alpha: float = parameter(1.25, "The power.", low=1)
    activations: bool = parameter(True, "Whether gradients of weights are computed from sparse activations.")

    def initial(self, layers: LayerMap, model: Tensors, seed: int) -> Tensors:
        """Start where the power gives the common initial model."""
        return {**model, **_powers(layers, model, 1 / self.alpha)}

    @property
    def needs(self) -> Needs:
        """Compute the gradients of weights from sparse inputs."""
        functions = (F.linear, F.conv1d, F.conv2d, F.conv3d) if self.activations else ()
        return Needs(operations=dict.fromkeys(functions, sparse_backward))

    def effective(self, clients: Clients, parameters: Tensors, step: Tensor | None) -> Tensors:
        """Run the model with the powers."""
        return {**parameters, **_powers(clients.layers, parameters, self.alpha)}

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Prune to the largest weights of the whole model."""
        trained = training.trained
        magnitudes = {name: trained[name].abs() for name in maskable(clients.layers)}
        return keep(trained, top_mask(magnitudes, self.sparsity, batched=True)), clients.memory

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send what is not zero."""
        return self._without_zeros(clients.layers, message)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send what is not zero."""
        return self._without_zeros(server.layers, message)

    def _without_zeros(self, layers: LayerMap, message: Message) -> Message:
        if self.sparsity == 0:
            return message
        return send_under(message, _not_zero(layers, message.tensors))

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Average with zeros for what was pruned."""
        return mean_with_zeros(server, replies, shares)

    def metrics(self, server: Server) -> Metrics:
        """Tell which part of each layer of the global model is not zero."""
        return {"density": layer_densities(server.layers, _not_zero(server.layers, server.model))}

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say that without such weights nothing is pruned, and which others stay dense."""
        weights = maskable(outline.layers)
        if not weights:
            yield f"The model has no convolution or linear weights, so '{self.name}' prunes nothing."
        elif dense := left_out(outline.layers, weights):
            yield f"'{self.name}' leaves {dense} dense, outside the model's layers with weights."


def sparse_backward(
    operation: Callable[..., Tensor],
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Tensor:
    """Compute a convolution or linear layer whose weight gets its gradient from the largest inputs only.

    The value, and the gradients of inputs and bias, are those of the operation itself. As many inputs are kept as the
    weight has entries that are not zero, in proportion.
    """
    exact = operation(inputs, weight.detach(), bias, *rest, **kwargs)
    from_largest = operation(_largest(inputs.detach(), weight.detach()), weight, None, *rest, **kwargs)
    return exact + (from_largest - from_largest.detach())


def _largest(inputs: Tensor, weight: Tensor) -> Tensor:
    """Put inputs to zero, the smallest first, until they are as sparse as the weight."""
    magnitudes = inputs.abs().flatten()
    dropped = ((weight == 0).sum() * magnitudes.numel()).div(weight.numel(), rounding_mode="floor")
    threshold = magnitudes.sort().values.gather(0, dropped.clamp(max=magnitudes.numel() - 1).unsqueeze(0))
    return inputs * (inputs.abs() >= threshold * _NEARLY)


def _powers(layers: LayerMap, tensors: Mapping[str, Tensor], exponent: float) -> Tensors:
    if exponent == 1:
        return {}
    return {name: tensors[name].sign() * tensors[name].abs().pow(exponent) for name in maskable(layers)}


def _not_zero(layers: LayerMap, tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensors[name] != 0 for name in maskable(layers) if name in tensors}

"""FedDrop: every client trains a random subnet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstrata.layers import Layer, LayerMap
from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Outline, Server, Training
from fedstrata.methods.mechanisms.layer_choice import choose_layers
from fedstrata.methods.mechanisms.masking import keep, send_under
from fedstrata.rng import client_keys, uniform
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


@methods.register("feddrop")
@dataclass(frozen=True)
class FedDrop(Part):
    r"""In every round each client gets, trains and sends a random subnet, drawn by dropping units.

    For each client and round every unit (a neuron, a channel) of the chosen layers is dropped with probability p. The
    server sends a client the weights that make its kept units, with their biases and norms; the client trains with the
    activations of kept units scaled by :math:`1 / (1 - p)`, and sends the same weights back. An entry of the new model
    is the mean over the clients that trained it, the old one where nobody did. Tested is the whole model, unscaled.

    The paper drops neurons of fully connected layers, with a rate for each device from its channel; LIPS compares with
    it on convolutional networks and gives neither rate nor place. Here it is one rate, on all middle layers. The paper
    leaves out what reads a dropped unit too; which weights do cannot be told for every model (sums, concatenations), so
    those travel, get no gradient, and enter the mean unchanged. A dropped unit's norm and statistics stay as they were,
    also where they are personal (``fedbn+feddrop``, LIPS's setting).

    Defaults:
        rate, layers: ours; LIPS gives neither, and the paper's rates follow from the devices' channels.
    """

    facts: ClassVar[Facts] = Facts(
        "layers",
        "Wen, Jeon and Huang, Federated Dropout - A Simple Approach for Enabling Federated Learning on Resource "
        "Constrained Devices, IEEE Wireless Communications Letters 2022",
        "https://arxiv.org/abs/2109.15258",
    )
    touches: ClassVar[Touches] = Touches(
        decides=(Decision.TRAVEL, Decision.WEIGHTS), relies_on=(Matter.SHARING,), takes_away=(Matter.SAME_ENTRIES,)
    )

    rate: float = parameter(0.2, "With what probability a unit is dropped.", low=0, below=1)
    layers: str = parameter(
        "middle", "Which layers: a role, 'all', or names with wildcards joined by '|'; never the last one."
    )

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say that without such layers nothing is dropped."""
        if not list(self._blocks(outline.layers)):
            yield f"The model has no units to drop in '{self.layers}' layers, so 'feddrop' does what 'fedavg' does."

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send each participant its subnet; for a test, everybody the whole model."""
        return message if server.testing else send_under(message, self._kept(server, message.tensors))

    def effective(self, clients: Clients, parameters: Tensors, step: Tensor | None) -> Tensors:
        """Run the subnet, with the outputs of its units scaled; for a test, the whole model."""
        if step is None:
            return parameters
        scaled = {name for block in self._blocks(clients.layers) for name in _outermost(block).parameters}
        return {
            name: tensor / (1 - self.rate) if name in scaled else tensor
            for name, tensor in keep(parameters, self._kept(clients, parameters)).items()
        }

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Leave everything that belongs to a dropped unit as it was."""
        trained, start = training.trained, training.start
        kept = self._kept(clients, trained)
        whole = {**trained, **{name: trained[name].where(mask, start[name]) for name, mask in kept.items()}}
        return whole, clients.memory

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the subnet."""
        return send_under(message, self._kept(clients, message.tensors))

    def _kept(self, view: Clients | Server, tensors: Tensors) -> Tensors:
        """Draw masks ``[K, units, 1, ...]`` for those of some tensors ``[K or 1, units, ...]`` that belong to units.

        The draws depend on the seed, the round and the client's number, so that the server and the client agree.
        """
        masks: Tensors = {}
        if self.rate == 0:
            return masks
        for block in self._blocks(view.layers):
            keys = self._keys(view, f"{self.name}/{block[0].name}")
            for name in (name for layer in block for name in layer.names if name in tensors):
                if tensors[name].dim() > 1:  # a norm's counter has no units
                    masks[name] = _drawn(keys, tensors[name], self.rate)
        return masks

    def _keys(self, view: Clients | Server, purpose: str) -> Tensor:
        if isinstance(view, Clients):
            return view.keys(purpose)
        return client_keys(view.seed, view.round, view.participants, purpose, view.sizes.device)

    def _blocks(self, layers: LayerMap) -> Iterator[tuple[Layer, ...]]:
        """Find the layers whose units may be dropped, each with the norm on its output."""
        chosen = choose_layers(layers, self.layers)
        for block in layers.blocks():
            layer = block[0]
            if layer in chosen and layer.role != "last" and _has_units(layer):
                yield block


def _has_units(layer: Layer) -> bool:
    """Tell whether the first axis of a layer's weight is its units."""
    return layer.weight is not None and layer.kind in ("conv", "linear") and "Transpose" not in layer.module_type


def _outermost(block: tuple[Layer, ...]) -> Layer:
    """Choose the last layer of a block that has parameters: it decides how large the output is."""
    return next(layer for layer in reversed(block) if layer.parameters)


def _drawn(keys: Tensor, tensor: Tensor, rate: float) -> Tensor:
    units = tensor.shape[1]
    return (uniform(keys, (units,)) >= rate).reshape(len(keys), units, *[1] * (tensor.dim() - 2))

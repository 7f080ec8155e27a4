"""PLayer-FL: measure which layers to share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.functional import federation_sensitivity, split_point
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Touches
from fedstrata.methods.contract.exchange import Exchange
from fedstrata.methods.contract.part import Kept, Metrics, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Outline, Server, Training
from fedstrata.rng import numpy_generator
from fedstrata.spec import parameter
from fedstrata.stack import Tensors

PRESETS: Mapping[str, tuple[int, int | None]] = {
    "fmnist": (3, 5),
    "emnist": (3, 5),
    "emnist-released": (4, 5),
    "cifar": (5, 7),
    "isic": (5, 7),
    "isic-released": (6, 7),
    "heart": (2, 4),
    "heart-released": (1, 4),
    "sent140": (-1, None),
    "mimic": (-1, None),
    "mimic-released": (-3, None),
}
"""How many layers are shared, and how many there are (Table A.2): counted from the front, or, negative, left out at the
end of a transformer, whose attention may be one layer or several."""


@methods.register("player")
@dataclass(frozen=True)
class PLayer(Part):
    r"""Share only the first layers: those before the point where the federation sensitivity jumps.

    Every client trains one epoch from the common initial model and measures :math:`F_l = \sum_{k \le l} \mathrm{mean}_p
    (\theta_p \, g_p)^2` (Eq. 2) on one batch; the server sums over clients and shares the layers up to the first p with
    :math:`F_{p+1} / F_p > t` (Eq. 3), all of them if there is none. That epoch is a survey of its own: training then
    begins at the initial model. The layers after p stay with each client, norms and running statistics with the layer
    before them. The mean of a layer runs over all entries of all its weights (the projections of an attention are one
    layer), without biases. A weight that several layers use is measured and shared with the first; a layer with no
    weights of its own adds nothing to the curve, so that it stands on the side of the layer before it.

    The paper gives no value for t and the released code has no threshold but lists of layers picked by eye; the default
    2 is ours; ``inf`` shares everything. ``up_to`` shares the layers up to a named one instead, without a survey.
    ``random`` shares a random prefix, neither all layers nor the measured ones (PLayer-FL-Random), or beside a
    ``preset`` not the paper's. The curve and the choice are in the run's layer metrics as ``federation_sensitivity``
    and ``federated``.

    ``preset`` shares as many layers as the paper does on a dataset, for models with as many layers with weights as its
    own (Table A.2): the convolutions of the CNNs for ``fmnist``, ``emnist``, ``cifar`` and ``isic``, two of four layers
    for ``heart``, all but the last layer of the transformers for ``sent140`` and ``mimic``. The lists in the released
    code differ for four of them: with the first of the two linear layers for ``emnist-released`` and ``isic-released``,
    only the first layer for ``heart-released``, without the two layers after the attention for ``mimic-released``.

    Defaults:
        threshold: ours; the paper gives no value, and the released code has lists of layers instead.
        random, up_to, preset: paper, Algorithm 3.
        batch_size: gaiters-aerials/player_fl, code/configs.py.
    """

    facts: ClassVar[Facts] = Facts(
        "layers", "PLayer-FL: A Principled Approach to Personalized Layer-wise Cross-Silo Federated Learning"
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.TRAVEL,), takes_away=(Matter.SHARED_HEAD,))

    threshold: float = parameter(
        2.0,
        "By how much the sensitivity must grow from one layer to the next to end the shared part; inf: share all.",
        above=0,
        finite=False,
    )
    random: bool = parameter(False, "Share a random prefix instead.")
    up_to: str | None = parameter(None, "Share the layers up to the one of this name instead.")
    preset: str | None = parameter(
        None, "Share the layers that the paper shares on this dataset instead.", choices=tuple(PRESETS)
    )
    batch_size: int = parameter(128, "Samples in the batch on which gradients are taken.", low=1)

    def __post_init__(self) -> None:
        """Refuse two ways of choosing at once."""
        super().__post_init__()
        given = {
            "random=true": self.random,
            f"up_to='{self.up_to}'": self.up_to is not None,
            f"preset={self.preset}": self.preset is not None,
        }
        ways = [way for way, chosen in given.items() if chosen]
        if len(ways) > 1 and self.up_to is not None:
            raise FedStrataError(f"'{self.name}' was given {' and '.join(ways)}, which are ways to choose; keep one.")

    def keeps(self, layers: LayerMap) -> Kept:
        """Any layer but the first may turn out to be local."""
        first = set(self._names_up_to(layers, 1))
        return Kept(resident=[name for name in (*layers.parameter_names, *layers.buffer_names) if name not in first])

    def notes(self, outline: Outline) -> Iterable[str]:
        """Refuse a layer name that does not exist, and a preset for another model; say what has no effect."""
        self._start(outline.layers, 0)
        idle = [name for name in ("threshold", "batch_size") if getattr(self, name) != getattr(PLayer, name)]
        if idle and not self.exchanges():
            given = "up_to" if self.preset is None else "preset"
            words = " and ".join(idle)
            yield f"'{self.name}' measures nothing where {given} is given: its {words} will not be looked at."

    # How many layers are shared ---------------------------------------------------------------------------------------

    def exchanges(self) -> tuple[Exchange, ...]:
        """Measure before the first round, unless the layers are given."""
        return (Sensitivity(self),) if self.up_to is None and self.preset is None else ()

    def server_memory(self, server: Server) -> Tensors:
        """Share everything until something is concluded."""
        return {"federated": server.sizes.new_tensor(self._start(server.layers, server.seed))}

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Share everything until something is announced."""
        return {"federated": torch.full_like(clients.sizes, self._start(clients.layers, clients.seed))}

    def _start(self, layers: LayerMap, seed: int) -> int:
        if self.preset is not None:
            of_paper = self._preset_layers(layers, self.preset)
            return random_prefix(layers, of_paper, seed) if self.random else of_paper
        return len(layers.weighted) if self.up_to is None else self._position(layers, self.up_to) + 1

    def _federated(self, view: Clients | Server, told: Tensor) -> int:
        """Count the layers that are shared; where they are given, without waiting for a GPU to tell."""
        return int(told) if self.exchanges() else self._start(view.layers, view.seed)

    def _preset_layers(self, layers: LayerMap, preset: str) -> int:
        """Count the layers that a preset shares of this model."""
        (shared, expected), found = PRESETS[preset], len(layers.weighted)
        if (expected is not None and found != expected) or found + shared < 1:
            wanted = f"{expected}" if expected is not None else f"more than {-shared}"
            raise FedStrataError(
                f"The preset '{preset}' of '{self.name}' is for models with {wanted} layers with weights, and this one "
                f"has {found}; name the last layer to share with up_to instead."
            )
        return shared if shared > 0 else found + shared

    # What travels -----------------------------------------------------------------------------------------------------

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send only the shared layers."""
        return self._shared_only(message, server.layers, self._federated(server, server.memory["federated"]))

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send only the shared layers."""
        return self._shared_only(message, clients.layers, self._federated(clients, clients.memory["federated"][:1]))

    def _shared_only(self, message: Message, layers: LayerMap, count: int) -> Message:
        shared = set(self._names_up_to(layers, count))
        return message.without([name for name in (*layers.parameter_names, *layers.buffer_names) if name not in shared])

    def _names_up_to(self, layers: LayerMap, count: int) -> Iterable[str]:
        """Name all tensors up to the layer with weights number ``count``, and what stands between it and the next."""
        met = 0
        for layer in layers.all:
            met += layer in layers.weighted
            if met <= count:
                yield from layer.names

    def _position(self, layers: LayerMap, name: str) -> int:
        names = [layer.name for layer in layers.weighted]
        if name not in names:
            raise unknown_name("layer with weights called", name, names)
        return names.index(name)

    def metrics(self, server: Server) -> Metrics:
        """Tell the curve and the choice, once."""
        if server.round != 1:
            return {}
        names = [layer.name for layer in server.layers.weighted]
        federated = self._federated(server, server.memory["federated"])
        metrics: Metrics = {"federated": {name: float(place < federated) for place, name in enumerate(names)}}
        if "curve" in server.memory:
            metrics["federation_sensitivity"] = dict(zip(names, server.memory["curve"].tolist(), strict=True))
        return metrics


@dataclass(frozen=True)
class Sensitivity(Exchange):
    """Clients measure how sensitive each layer is, and the server decides how many are shared."""

    method: PLayer

    def due(self, round: int, rounds: int, joining: bool) -> int:
        """Measure before the first round."""
        return round == 1

    def survey(self, clients: Clients, model: Tensors) -> Message:
        """Train one epoch and measure every layer's sensitivity on one batch."""
        trained = clients.probe.train(model, epochs=1)
        gradients = clients.probe.gradients(trained, self.method.batch_size)
        layers = clients.layers.weighted
        weights, slopes = (
            [[tensors[name] for name in layer.weights] for layer in layers] for tensors in (trained, gradients)
        )
        return Message({"sensitivity": federation_sensitivity(weights, slopes, batched=True)})

    def conclude(self, server: Server, replies: Message) -> ModelAndMemory:
        """Sum over clients and find the transition point."""
        curve = replies.tensors["sensitivity"].sum(0)
        measured = split_point(curve, self.method.threshold)
        federated = random_prefix(server.layers, measured, server.seed) if self.method.random else measured
        return {}, {"federated": server.sizes.new_tensor(federated), "curve": curve}

    def announce(self, server: Server) -> Message:
        """Tell how many layers are shared."""
        return Message(numbers={"federated": server.memory["federated"][None]})

    def adopt(self, clients: Clients, announcement: Message) -> Tensors:
        """Note how many layers are shared."""
        return {"federated": announcement.numbers["federated"].expand(len(clients.ids))}


def random_prefix(layers: LayerMap, left_out: int, seed: int) -> int:
    """Draw how many layers are shared: neither all of them nor ``left_out``, unless nothing else is possible."""
    choices = [count for count in range(1, len(layers.weighted)) if count != left_out]
    return int(numpy_generator(seed, "player", "prefix").choice(choices)) if choices else left_out

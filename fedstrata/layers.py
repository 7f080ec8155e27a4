"""Which tensors form which layer, in which order and role.

Layers are found by running the model once and by the types of its modules, never by names: a norm layer inside a
shortcut is a norm layer whatever it is called, and a layer's place is where the forward pass meets it, not where the
constructor mentions it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.models.trial import forward, undisturbed, zero_samples

Kind = Literal["conv", "linear", "norm", "embedding", "attention", "other"]
Role = Literal["first", "middle", "last", "norm", "extra", "unused"]

ROOT = "(model)"
"""The name of the layer that the whole model itself is, or whose parameters it holds directly."""

_TYPES: Mapping[Kind, tuple[type[nn.Module], ...]] = {
    "conv": (nn.modules.conv._ConvNd,),
    "linear": (nn.Linear, nn.Bilinear),
    "norm": (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "attention": (nn.MultiheadAttention,),
}


@dataclass(frozen=True)
class Layer:
    """One layer and the tensors that it owns.

    Tensors go by their names in ``named_parameters()`` and ``named_buffers()`` of the whole model.
    """

    name: str
    """The name of its module in the model."""
    kind: Kind
    """What it is, by the type of its module."""
    role: Role
    """``first``, ``middle`` or ``last`` among the layers with weights (a single one is the last); ``norm`` for norm
    layers; ``extra`` for class tokens, scales, activation slopes and whatever else lies outside such layers; ``unused``
    for a layer other than a norm that the forward pass never meets."""
    module_type: str
    """The class of its module."""
    parameters: tuple[str, ...]
    """The parameters that it owns; one that several layers use belongs to the first that does."""
    buffers: tuple[str, ...]
    """The buffers that it owns, such as running statistics."""
    weight: str | None
    """The parameter that its module calls ``weight``, if it owns it."""
    weights: tuple[str, ...]
    """All weights that it owns: its parameters with several axes, such as the projections of an attention or the
    matrices of a recurrent layer, without biases; a norm layer has none."""
    bias: str | None
    """The parameter that its module calls ``bias``, if it owns it."""
    tied: tuple[str, ...]
    """The tensors that it uses but that belong to an earlier layer."""
    size: int
    """How many numbers its own parameters hold."""
    follows: str | None
    """For a norm layer: the layer with weights whose output, and nothing else, it normalises."""
    running_mean: str | None = None
    """For a norm layer with running statistics: the buffer with the mean."""
    running_variance: str | None = None
    """For a norm layer with running statistics: the buffer with the variance."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters and buffers that it owns."""
        return self.parameters + self.buffers

    @property
    def head(self) -> bool:
        """Whether it is the classifier: the last layer with weights, if that is linear."""
        return self.role == "last" and self.kind == "linear"


@dataclass(frozen=True)
class LayerMap:
    """All layers of a model: each parameter and each buffer belongs to exactly one.

    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    >>> layers = LayerMap.read(model, (1, 8, 8))
    >>> [(layer.name, layer.kind, layer.role) for layer in layers.layers]
    [('0', 'conv', 'first'), ('1', 'norm', 'norm'), ('3', 'linear', 'last')]
    >>> sorted(layers.norm_names)
    ['1.bias', '1.num_batches_tracked', '1.running_mean', '1.running_var', '1.weight']
    """

    layers: tuple[Layer, ...]
    """In the order in which the forward pass first meets them."""
    unused: tuple[Layer, ...] = ()
    """Those that it never meets in evaluation mode, in the order of the model's constructor."""

    @classmethod
    def read(cls, model: nn.Module, input_shape: tuple[int, ...], sample: Tensor | None = None) -> LayerMap:
        """Read the layers of a model from one forward pass of a copy in evaluation mode; the model is not touched.

        The pass sees zeros of ``input_shape`` (the shape of one sample), or ``sample``, a batch, where zeros are no
        valid input (token numbers). A layer is a convolution, linear, norm, embedding or attention module with all
        that it contains, and any other module that holds parameters or buffers directly.
        """
        name = type(model).__name__
        with undisturbed(model, name) as copy, torch.enable_grad():
            trace = _Trace(copy)
            samples = zero_samples(copy, input_shape) if sample is None else sample
            if samples.is_floating_point():
                # Seen by the graph, and no leaf: the model may add its input to something or change it in place.
                samples = samples.detach().requires_grad_().clone()
            with trace:
                output = forward(copy, samples, name)
            return _map(copy, trace, output, name)

    @cached_property
    def all(self) -> tuple[Layer, ...]:
        """The layers that the forward pass meets, then those that it does not."""
        return self.layers + self.unused

    @cached_property
    def weighted(self) -> tuple[Layer, ...]:
        """The layers with weights, from the first to the last: no norm layers, no extras."""
        return tuple(layer for layer in self.layers if layer.role in ("first", "middle", "last"))

    @property
    def head(self) -> Layer | None:
        """The classifier: the last layer with weights, if that is linear."""
        return next((layer for layer in self.layers if layer.head), None)

    def linear_head(self) -> tuple[str, str | None]:
        """Name the weight and the bias of the head, for methods that compute with it; refuse a model without one."""
        if self.head is None or self.head.weight is None:
            raise FedStrataError(
                "The method works on a linear head, and the model does not end in a linear layer with a weight of its "
                "own; choose another model or method."
            )
        return self.head.weight, self.head.bias

    def layer(self, name: str) -> Layer:
        """Return the layer of this name."""
        for layer in self.all:
            if layer.name == name:
                return layer
        raise unknown_name("layer", name, [layer.name for layer in self.all])

    def of(self, name: str) -> Layer:
        """Return the layer that owns this parameter or buffer."""
        if name not in self._owners:
            raise unknown_name("parameter or buffer", name, self._owners)
        return self._owners[name]

    def names(self, kind: Kind | None = None, role: Role | None = None) -> frozenset[str]:
        """Return the parameters and buffers of all layers of a kind and of a role; none given means any."""
        for word, given, known in (("kind", kind, get_args(Kind)), ("role", role, get_args(Role))):
            if given is not None and given not in known:
                raise unknown_name(f"layer {word}", given, known)
        return frozenset(
            name
            for layer in self.all
            if kind in (None, layer.kind) and role in (None, layer.role)
            for name in layer.names
        )

    @cached_property
    def norm_names(self) -> frozenset[str]:
        """All parameters and buffers of norm layers, running statistics and counters included."""
        return self.names(kind="norm")

    @cached_property
    def variance_names(self) -> frozenset[str]:
        """The running variances of norm layers."""
        return frozenset(layer.running_variance for layer in self.all if layer.running_variance is not None)

    @cached_property
    def head_names(self) -> frozenset[str]:
        """All parameters and buffers of the head; empty without one."""
        return frozenset(self.head.names if self.head else ())

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """All parameters, layer by layer."""
        return tuple(name for layer in self.all for name in layer.parameters)

    @cached_property
    def buffer_names(self) -> tuple[str, ...]:
        """All buffers, layer by layer."""
        return tuple(name for layer in self.all for name in layer.buffers)

    def blocks(self) -> tuple[tuple[Layer, ...], ...]:
        """Group each layer with weights with the norm layer on its output; every layer stands in exactly one block.

        These are the layers of methods that treat a convolution and its norm as one, such as FedLWS.
        """
        return tuple(
            (layer, *(norm for norm in self.all if norm.follows == layer.name))
            for layer in self.all
            if layer.follows is None
        )

    def table(self) -> list[dict[str, str | int]]:
        """Describe the layers as rows of plain data."""
        return [
            {
                "layer": layer.name,
                "type": layer.module_type,
                "kind": layer.kind,
                "role": layer.role,
                "parameters": layer.size,
                "tensors": ", ".join(name.removeprefix(f"{layer.name}.") for name in layer.names),
            }
            for layer in self.all
        ]

    def __str__(self) -> str:
        """Show the table as text, one layer per line."""
        rows = [{key: str(value) for key, value in row.items()} for row in self.table()]
        rows = [{key: key for key in rows[0]}, *rows] if rows else []
        widths = {key: max(len(row[key]) for row in rows) for key in rows[0]} if rows else {}
        return "\n".join("  ".join(row[key].ljust(width) for key, width in widths.items()).rstrip() for row in rows)

    @cached_property
    def _owners(self) -> dict[str, Layer]:
        return {name: layer for layer in self.all for name in layer.names}


class _Trace(TorchFunctionMode):
    """Watches one forward pass: when each module is first called, when each tensor is first used, what feeds what."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.called: dict[nn.Module, int] = {}
        self.used: dict[int, int] = {}
        self.input_nodes: dict[nn.Module, Node | None] = {}
        self.output_nodes: dict[Node, list[nn.Module]] = {}
        self._time = 0
        # Gradients are only needed for the graph, which tells what feeds what; frozen models have one too this way.
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(self._leave)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Reading a shape or a device is no use of a tensor; computing another tensor from it is.
        if any(True for _ in _tensors(result)):
            for tensor in _tensors((args, kwargs)):
                self.used.setdefault(id(tensor), self._tick())
        return result

    def first_meeting(self, module: nn.Module, tensors: Iterable[Tensor]) -> int | None:
        """Tell when the module was first called or, if others use its tensors without a call, when they first did."""
        if module in self.called:
            return self.called[module]
        return min((self.used[id(tensor)] for tensor in tensors if id(tensor) in self.used), default=None)

    def source(self, module: nn.Module, producers: Mapping[nn.Module, str]) -> str | None:
        """Name the producer whose output alone feeds the module, if only through activations, pooling or views."""
        node = self.input_nodes.get(module)
        while node is not None:
            for producer in self.output_nodes.get(node, ()):
                if producer in producers:
                    return producers[producer]
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            node = parents[0] if len(parents) == 1 else None
        return None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in self.called:
            self.called[module] = self._tick()
            first = next(_tensors((args, kwargs)), None)
            self.input_nodes[module] = None if first is None else first.grad_fn

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                self.output_nodes.setdefault(tensor.grad_fn, []).append(module)

    def _tick(self) -> int:
        self._time += 1
        return self._time


@dataclass(frozen=True)
class _Candidate:
    """A module that forms a layer."""

    name: str
    module: nn.Module
    kind: Kind
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]

    @property
    def has_weights(self) -> bool:
        """Whether it computes with weights: by its type, or as a module of another type without layers inside."""
        if self.kind != "other":
            return self.kind != "norm"
        holder = isinstance(self.module, nn.ParameterList | nn.ParameterDict)
        whole = len(self.parameters) == sum(1 for _ in self.module.parameters())
        return not holder and whole and any(parameter.dim() > 1 for parameter in self.parameters)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Its parameters with several axes that are no biases; none for a norm."""
        if self.kind == "norm":
            return ()
        biases = (self.module.bias_k, self.module.bias_v) if isinstance(self.module, nn.MultiheadAttention) else ()
        return tuple(
            parameter
            for parameter in self.parameters
            if parameter.dim() > 1 and not any(parameter is bias for bias in biases)
        )


def _candidates(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[_Candidate]:
    if module in seen:
        return
    kind = _kind(module)
    whole = kind != "other"
    seen.update(module.modules() if whole else (module,))
    parameters, buffers = tuple(module.parameters(recurse=whole)), tuple(module.buffers(recurse=whole))
    if parameters or buffers:
        yield _Candidate(name or ROOT, module, kind, parameters, buffers)
    if not whole:
        for child_name, child in module.named_children():
            yield from _candidates(child, f"{name}.{child_name}" if name else child_name, seen)


def _kind(module: nn.Module) -> Kind:
    return next((kind for kind, types in _TYPES.items() if isinstance(module, types)), "other")


def _map(model: nn.Module, trace: _Trace, output: Any, model_name: str) -> LayerMap:
    candidates = list(_candidates(model, "", set()))
    meetings = {
        candidate.name: trace.first_meeting(candidate.module, candidate.parameters + candidate.buffers)
        for candidate in candidates
    }
    unmet = [candidate for candidate in candidates if meetings[candidate.name] is None]
    _refuse_hidden_use(unmet, output, model_name)
    met = [candidate for candidate in candidates if meetings[candidate.name] is not None]
    met.sort(key=lambda candidate: meetings[candidate.name] or 0)
    with_weights = [candidate for candidate in met if candidate.has_weights]
    producers = {candidate.module: candidate.name for candidate in with_weights}
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    layers: list[Layer] = []
    owned: set[int] = set()
    for candidate in (*met, *unmet):
        layers.append(
            _layer(
                candidate,
                role=_role(candidate, with_weights, used=meetings[candidate.name] is not None),
                follows=trace.source(candidate.module, producers) if candidate.kind == "norm" else None,
                names=names,
                owned=owned,
            )
        )
        owned.update(map(id, candidate.parameters + candidate.buffers))
    return LayerMap(tuple(layers[: len(met)]), tuple(layers[len(met) :]))


def _role(candidate: _Candidate, with_weights: list[_Candidate], used: bool) -> Role:
    if candidate.kind == "norm":
        return "norm"
    if not used:
        return "unused"
    if not candidate.has_weights:
        return "extra"
    if candidate is with_weights[-1]:
        return "last"
    return "first" if candidate is with_weights[0] else "middle"


def _layer(candidate: _Candidate, role: Role, follows: str | None, names: Mapping[int, str], owned: set[int]) -> Layer:
    def own(tensors: Iterable[Tensor | None]) -> tuple[str, ...]:
        return tuple(names[id(tensor)] for tensor in tensors if tensor is not None and id(tensor) not in owned)

    direct = dict(candidate.module.named_parameters(recurse=False))
    return Layer(
        name=candidate.name,
        kind=candidate.kind,
        role=role,
        module_type=type(candidate.module).__name__,
        parameters=own(candidate.parameters),
        buffers=own(candidate.buffers),
        weight=next(iter(own([direct.get("weight")])), None),
        weights=own(candidate.weights),
        bias=next(iter(own([direct.get("bias")])), None),
        tied=tuple(names[id(tensor)] for tensor in candidate.parameters + candidate.buffers if id(tensor) in owned),
        size=sum(parameter.numel() for parameter in candidate.parameters if id(parameter) not in owned),
        follows=follows,
        running_mean=next(iter(own([_running(candidate.module, "running_mean")])), None),
        running_variance=next(iter(own([_running(candidate.module, "running_var")])), None),
    )


def _running(module: nn.Module, name: str) -> Tensor | None:
    """Find a running statistic of a norm layer that keeps some; a buffer of the same name elsewhere is none."""
    return getattr(module, name) if isinstance(module, nn.modules.batchnorm._NormBase) else None


def _refuse_hidden_use(unmet: list[_Candidate], output: Any, model_name: str) -> None:
    """Refuse layers that feed the output although nothing was seen of them, such as those of TorchScript."""
    reached = _reached(tensor.grad_fn for tensor in _tensors(output))
    for candidate in unmet:
        if any(id(parameter) in reached for parameter in candidate.parameters):
            raise FedStrataError(
                f"The module '{candidate.name}' of the model '{model_name}' is used where it cannot be seen, so its "
                "place among the layers is unknown; make it an ordinary Python module and call it."
            )


def _reached(nodes: Iterable[Node | None]) -> set[int]:
    """Collect the parameters, by identity, from which a computation graph starts."""
    waiting, seen = [node for node in nodes if node is not None], set[Node]()
    reached = set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            reached.add(id(getattr(node, "variable", None)))
            waiting.extend(parent for parent, _ in node.next_functions if parent is not None)
    return reached


def _tensors(value: Any) -> Iterator[Tensor]:
    """Find the tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))

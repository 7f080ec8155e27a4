"""Several parts as one method: ``fedbn+fedprox(mu=0.01)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods.base import EXCLUSIVE_HOOKS, Clients, Message, Part, Phase, Server, Step, defines, first_defining
from fedstrata.methods.registry import methods
from fedstrata.spec import parse
from fedstrata.stack import Tensors

View = TypeVar("View", Clients, Server)


@dataclass(frozen=True)
class Method:
    """A method as the engines see it: every hook runs through all parts, each with its own memory.

    ``text`` is how the method was written; two methods with the same parts are the same method.
    """

    text: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        for hook, what in EXCLUSIVE_HOOKS.items():
            owners = [part.name for part in self.parts if defines(part, hook)]
            if len(owners) > 1:
                raise FedStrataError(
                    f"'{owners[0]}' and '{owners[1]}' cannot be combined: each of them {what}, and only one can. "
                    "Leave one of them out."
                )

    @classmethod
    def make(cls, given: str | Part | Method) -> Method:
        """Read a composition such as ``fedbn+fedprox(mu=0.01)``, or take ready parts.

        A part that stands twice with the same parameters counts once.

        >>> str(Method.make("fedavg+fedprox(mu=0.1)+fedavg"))
        'fedavg+fedprox(mu=0.1)'
        """
        if isinstance(given, Method):
            return given
        named = [given] if isinstance(given, Part) else [methods.build(call) for call in parse(given, "method")]
        unique: dict[str, Part] = {}
        for part in (part for spec in named for part in spec.parts()):
            known = unique.setdefault(part.name, part)
            if known != part:
                raise FedStrataError(
                    f"The method names '{part.name}' twice with different parameters: {known} and {part}. Keep one."
                )
        texts = list(dict.fromkeys(str(spec) for spec in named))
        return cls("+".join(texts), tuple(unique.values()))

    def __str__(self) -> str:
        """Write the method as it is written on the command line."""
        return self.text

    def notes(self, layers: LayerMap) -> list[str]:
        """Collect what the parts say about a model."""
        return [note for part in self.parts for note in part.notes(layers)]

    def personal(self, layers: LayerMap) -> frozenset[str]:
        """All names that never leave a client."""
        return frozenset(name for part in self.parts for name in part.personal(layers))

    # Client hooks -----------------------------------------------------------------------------------------------------

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Collect the parts' first memories."""
        return _join((part, part.client_memory(clients, model)) for part in self.parts)

    def perturb(self, clients: Clients, start: Tensors) -> Tensors:
        """Let every part change the starting weights."""
        return self._chain("perturb", start, lambda part, value: part.perturb(_own(clients, part), value))

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of local training."""
        return first_defining(self.parts, "phases").phases()

    def loss(self, clients: Clients, step: Step) -> Tensor | None:
        """Sum the parts' loss terms."""
        total: Tensor | None = None
        for part in self.parts:
            term = part.loss(_own(clients, part), step) if defines(part, "loss") else None
            if term is not None:
                total = term if total is None else total + term
        return total

    def gradients(self, clients: Clients, step: Step, gradients: Tensors) -> Tensors:
        """Let every part change the gradients."""
        return self._chain("gradients", gradients, lambda part, value: part.gradients(_own(clients, part), step, value))

    def project(self, clients: Clients, step: Step, parameters: Tensors) -> Tensors:
        """Let every part change the parameters after a step."""
        return self._chain("project", parameters, lambda part, value: part.project(_own(clients, part), step, value))

    def remember(self, clients: Clients, received: Tensors, trained: Tensors) -> Tensors:
        """Collect the parts' new memories."""
        return _join((part, part.remember(_own(clients, part), received, trained)) for part in self.parts)

    def upload(self, clients: Clients, received: Tensors, trained: Tensors, message: Message) -> Message:
        """Let every part change what leaves the client."""
        return self._chain(
            "upload", message, lambda part, value: part.upload(_own(clients, part), received, trained, value)
        )

    def adaptation(self) -> Phase | None:
        """Return the final adaptation, if there is one."""
        return first_defining(self.parts, "adaptation").adaptation()

    # Server hooks -----------------------------------------------------------------------------------------------------

    def server_memory(self, server: Server) -> Tensors:
        """Collect the parts' first memories."""
        return _join((part, part.server_memory(server)) for part in self.parts)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Let every part change what the server sends."""
        return self._chain("broadcast", message, lambda part, value: part.broadcast(_own(server, part), value))

    def aggregate(self, server: Server, replies: Message) -> tuple[Tensors, Tensors]:
        """Weigh, merge, step and refine: return the new model and the server's new memory."""
        weigher, merger, stepper = (first_defining(self.parts, hook) for hook in ("weigh", "merge", "step"))
        shares = weigher.weigh(_own(server, weigher), replies)
        merged = merger.merge(_own(server, merger), replies, shares)
        new, own_memory = stepper.step(_own(server, stepper), merged)
        memory = {**server.memory, **_join([(stepper, own_memory)])}
        return self._chain(
            "refine", new, lambda part, value: part.refine(_own(server, part), replies, shares, value)
        ), memory

    def _chain(self, hook: str, value: _Value, call: Callable[[Part, _Value], _Value]) -> _Value:
        for part in self.parts:
            if defines(part, hook):
                value = call(part, value)
        return value


_Value = TypeVar("_Value", Tensors, Message)


def _own(view: View, part: Part) -> View:
    """Narrow the memory in a view to what belongs to one part."""
    prefix = f"{part.name}/"
    return replace(
        view, memory={name[len(prefix) :]: tensor for name, tensor in view.memory.items() if name.startswith(prefix)}
    )


def _join(memories: Iterable[tuple[Part, Tensors]]) -> Tensors:
    return {f"{part.name}/{name}": tensor for part, memory in memories for name, tensor in memory.items()}

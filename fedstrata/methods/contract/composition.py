"""Several parts as one method: ``fedbn+fedprox(mu=0.01)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.compatibility import defines, first_defining, objection
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Phase, Probe, Server, Step, Training
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
        for first, second in combinations(self.parts, 2):
            reason = objection(first, second)
            if reason is not None:
                raise FedStrataError(
                    f"'{first.name}' and '{second.name}' cannot be combined: {reason}. Leave one of them out."
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

    def resident(self, layers: LayerMap) -> frozenset[str]:
        """All names that a client keeps between rounds."""
        kept = frozenset(name for part in self.parts for name in part.resident(layers))
        return kept | self.personal(layers)

    def initial(self, layers: LayerMap, model: Tensors, seed: int) -> Tensors:
        """Let every part replace the common initial model."""
        return self._chain("initial", model, lambda part, value: part.initial(layers, value, seed))

    def proxy_samples(self) -> int:
        """Tell how many samples the server needs for itself."""
        return max(part.proxy_samples() for part in self.parts)

    def held_out(self) -> float:
        """Tell which fraction of its training samples each client holds out."""
        return max(part.held_out() for part in self.parts)

    def samples_per_epoch(self) -> int | None:
        """Return the samples of a local epoch, if they are fixed."""
        return first_defining(self.parts, "samples_per_epoch").samples_per_epoch()

    def masks_known(self, view: View, upload: bool) -> Tensors:
        """Collect the masks that both sides of a link hold."""
        return {name: mask for part in self.parts for name, mask in part.masks_known(_own(view, part), upload).items()}

    # Client hooks -----------------------------------------------------------------------------------------------------

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Collect the parts' first memories; second models start as copies of the initial one."""
        second = {
            f"{part.name}/{other}/{name}": tensor
            for part in self.parts
            for other in part.second_models
            for name, tensor in model.items()
        }
        return {**second, **_join((part, part.client_memory(clients, model)) for part in self.parts)}

    def receive(self, clients: Clients, message: Message, model: Tensors, probe: Probe) -> tuple[Tensors, Tensors]:
        """Put the client's model together from a message; return it and all parts' memories."""
        part = first_defining(self.parts, "receive")
        model, memory = part.receive(_own(clients, part), message, model, probe)
        return model, {**clients.memory, **_join([(part, memory)])}

    def begin(self, clients: Clients, received: Tensors, message: Message) -> Tensors:
        """Collect the parts' memories after a look at what was received."""
        return _join((part, part.begin(_own(clients, part), received, message)) for part in self.parts)

    def perturb(self, clients: Clients, start: Tensors) -> Tensors:
        """Let every part change the starting weights."""
        return self._chain("perturb", start, lambda part, value: part.perturb(_own(clients, part), value))

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Return the phases of local training."""
        part = first_defining(self.parts, "phases")
        return part.phases(_own(clients, part))

    def between_phases(self, clients: Clients, number: int, model: Tensors, probe: Probe) -> tuple[Tensors, Tensors]:
        """Let every part change the model and its memory between two phases."""
        for part in self.parts:
            if defines(part, "between_phases"):
                model, memory = part.between_phases(_own(clients, part), number, model, probe)
                clients = replace(clients, memory={**clients.memory, **_join([(part, memory)])})
        return model, clients.memory

    def second_models(self) -> list[str]:
        """List the second models that clients keep, by the prefix of their names in the clients' memory."""
        return [f"{part.name}/{other}" for part in self.parts for other in part.second_models]

    def second_model(self, phase: Phase) -> str | None:
        """Name the second model that a phase trains, by the prefix of its names, if it trains one."""
        owner = first_defining(self.parts, "phases")
        return None if phase.model is None else f"{owner.name}/{phase.model}"

    def _concerned(self, phase: Phase) -> Sequence[Part]:
        """Choose the parts that decide on the loss and the gradients of a phase.

        A second model is the business of the part that keeps it: terms that hold clients near the shared model, or
        correct their drift from it, are not meant for it.
        """
        return self.parts if phase.model is None else (first_defining(self.parts, "phases"),)

    def learns(self, layers: LayerMap) -> list[str]:
        """Name what is trained beside the model, as it is named in the clients' memory."""
        return [f"{part.name}/{name}" for part in self.parts for name in part.learns(layers)]

    def effective(self, clients: Clients, parameters: Tensors, step: int) -> Tensors:
        """Let every part compute the weights with which the model runs."""
        return self._chain(
            "effective", parameters, lambda part, value: part.effective(_own(clients, part), value, step)
        )

    def operations(self) -> dict[Callable[..., Tensor], Callable[..., Tensor]]:
        """Collect the torch functions that parts compute in another way."""
        return {function: other for part in self.parts for function, other in part.operations().items()}

    def wants_features(self) -> bool:
        """Tell whether a part needs the input of the model's head."""
        return any(part.wants_features() for part in self.parts)

    def base_loss(self, clients: Clients, step: Step) -> Tensor:
        """Compute each client's loss, before the parts' own terms."""
        part = first_defining(self._concerned(step.phase), "base_loss")
        return part.base_loss(_own(clients, part), step)

    def loss(self, clients: Clients, step: Step) -> Tensor | None:
        """Sum the parts' loss terms."""
        total: Tensor | None = None
        for part in self._concerned(step.phase):
            term = part.loss(_own(clients, part), step) if defines(part, "loss") else None
            if term is not None:
                total = term if total is None else total + term
        return total

    def gradients(self, clients: Clients, step: Step, gradients: Tensors) -> Tensors:
        """Let every part change the gradients."""
        for part in self._concerned(step.phase):
            if defines(part, "gradients"):
                gradients = part.gradients(_own(clients, part), step, gradients)
        return gradients

    def project(self, clients: Clients, step: Step, parameters: Tensors) -> Tensors:
        """Let every part change the parameters after a step."""
        return self._chain("project", parameters, lambda part, value: part.project(_own(clients, part), step, value))

    def wants_gradients(self) -> bool:
        """Tell whether a part needs the gradients of the last local step."""
        return any(part.wants_gradients() for part in self.parts)

    def wants_mean_gradients(self) -> bool:
        """Tell whether a part needs the mean of the gradients over all local steps."""
        return any(part.wants_mean_gradients() for part in self.parts)

    def settle(self, clients: Clients, start: Tensors, trained: Tensors) -> Tensors:
        """Let every part change the trained model."""
        return self._chain("settle", trained, lambda part, value: part.settle(_own(clients, part), start, value))

    def remember(self, clients: Clients, training: Training) -> Tensors:
        """Collect the parts' new memories."""
        return _join((part, part.remember(_own(clients, part), training)) for part in self.parts)

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Let every part change what leaves the client."""
        return self._chain("upload", message, lambda part, value: part.upload(_own(clients, part), training, value))

    def adaptation(self) -> Phase | None:
        """Return the final adaptation, if there is one."""
        return first_defining(self.parts, "adaptation").adaptation()

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Let parts choose the model that each client uses, then turn it into weights."""
        for part in self.parts:
            if not part.deploys_alike:
                model = part.deployed(_own(clients, part), model)
        return self.as_weights(clients, model)

    def as_weights(self, clients: Clients, model: Tensors) -> Tensors:
        """Turn what training works on into the weights of the network, where a part trains something else."""
        for part in self.parts:
            if part.deploys_alike:
                model = part.deployed(_own(clients, part), model)
        return model

    @property
    def personalises(self) -> bool:
        """Whether a client may use another model than the one that the server sends."""
        return any(
            defines(part, hook) for part in self.parts for hook in ("deployed", "receive") if not part.deploys_alike
        )

    # Server hooks -----------------------------------------------------------------------------------------------------

    def select(self, server: Server, count: int) -> tuple[int, ...]:
        """Choose the participants of a round."""
        part = first_defining(self.parts, "select")
        return part.select(_own(server, part), count)

    def server_memory(self, server: Server) -> Tensors:
        """Collect the parts' first memories."""
        return _join((part, part.server_memory(server)) for part in self.parts)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Let every part change what the server sends."""
        return self._chain("broadcast", message, lambda part, value: part.broadcast(_own(server, part), value))

    def weigh(self, server: Server) -> Tensor:
        """Give each participant its weight ``[K]``."""
        part = first_defining(self.parts, "weigh")
        return part.weigh(_own(server, part))

    def aggregate(self, server: Server, replies: Message) -> tuple[Tensors, Tensors]:
        """Weigh and merge all replies of a round, and advance."""
        merger = first_defining(self.parts, "merge")
        merged = merger.merge(_own(server, merger), replies, self._shares(server))
        return self.advance(server, merged, replies)

    def _shares(self, server: Server) -> Tensor:
        weights = self.weigh(server)
        return weights / weights.sum()

    def advance(self, server: Server, merged: Tensors, replies: Message | None) -> tuple[Tensors, Tensors]:
        """Adjust, step, examine and refine: from the merged model to the new one and the server's new memory.

        Without ``replies`` nothing can be examined (see :attr:`objection_to_summing`).
        """
        stepper = first_defining(self.parts, "step")
        merged = self._chain("adjust", merged, lambda part, value: part.adjust(_own(server, part), value))
        new, memory = stepper.step(_own(server, stepper), merged)
        memories = {**server.memory, **_join([(stepper, memory)])}
        for part in self.parts:
            if replies is not None and defines(part, "examine"):
                view = _own(replace(server, memory=memories), part)
                new, memory = part.examine(view, replies, self._shares(server), new)
                memories |= _join([(part, memory)])
            if defines(part, "refine"):
                new, memory = part.refine(_own(replace(server, memory=memories), part), new)
                memories |= _join([(part, memory)])
        return new, memories

    @property
    def objection_to_rounding(self) -> str | None:
        """Why uploads cannot travel in a narrower type, if they cannot."""
        for part in self.parts:
            if part.needs_exact_uploads:
                return f"rounding could carry an update beyond the bound that '{part.name}' accounts for"
        return None

    @property
    def merges_by_mean(self) -> bool:
        """Whether the merged model is the weighted mean of the replies."""
        return not any(defines(part, "merge") for part in self.parts)

    @property
    def objection_to_summing(self) -> str | None:
        """Why replies cannot be added up as they come, one by one, if they cannot."""
        for part in self.parts:
            if not part.averages:
                return f"under '{part.name}' clients go on with models of single others"
            if defines(part, "examine"):
                return f"'{part.name}' looks at the replies of single clients"
            if defines(part, "merge"):
                return f"'{part.name}' merges replies in a way of its own"
            if not part.separable:
                return f"the weights of '{part.name}' depend on who else takes part"
        return None

    @property
    def objection_to_secure_aggregation(self) -> str | None:
        """Why the server cannot do with the sum of all replies alone, if it cannot."""
        for part in self.parts:
            if not part.one_support:
                return f"under '{part.name}' each client sends entries of its own"
        return self.objection_to_summing

    def round_metrics(self, server: Server) -> dict[str, float]:
        """Collect the parts' numbers of the round."""
        return {name: value for part in self.parts for name, value in part.round_metrics(_own(server, part)).items()}

    def layer_metrics(self, server: Server) -> dict[str, dict[str, float]]:
        """Collect the parts' numbers of layers."""
        return {name: values for part in self.parts for name, values in part.layer_metrics(_own(server, part)).items()}

    def exchanges_before(self, round: int, rounds: int, joining: bool = False) -> list[Exchange]:
        """List the exchanges of the parts with clients before a round, in their order."""
        counts = [
            max(part.exchanges_before(round, rounds), part.exchanges_on_joining() if joining else 0)
            for part in self.parts
        ]
        return [Exchange(part) for part, count in zip(self.parts, counts, strict=True) for _ in range(count)]

    def _chain(self, hook: str, value: _Value, call: Callable[[Part, _Value], _Value]) -> _Value:
        for part in self.parts:
            if defines(part, hook):
                value = call(part, value)
        return value


_Value = TypeVar("_Value", Tensors, Message)


@dataclass(frozen=True)
class Exchange:
    """One part's exchange before a round, as the engines see it: the hooks of that part, each with its own memory."""

    part: Part

    def asks(self, server: Server) -> Sequence[int]:
        """Choose the clients that are asked."""
        return self.part.asks(_own(server, self.part))

    def survey(self, clients: Clients, model: Tensors, probe: Probe) -> Message:
        """Answer at the clients."""
        return self.part.survey(_own(clients, self.part), model, probe)

    def conclude(self, server: Server, replies: Message) -> tuple[Tensors, Tensors]:
        """Conclude at the server."""
        model, memory = self.part.conclude(_own(server, self.part), replies)
        return model, {**server.memory, **_join([(self.part, memory)])}

    def announce(self, server: Server) -> Message:
        """Announce to all clients."""
        return self.part.announce(_own(server, self.part))

    def adopt(self, clients: Clients, announcement: Message) -> Tensors:
        """Take the announcement in at the clients."""
        return {**clients.memory, **_join([(self.part, self.part.adopt(_own(clients, self.part), announcement))])}


def _own(view: View, part: Part) -> View:
    """Narrow the memory in a view to what belongs to one part."""
    prefix = f"{part.name}/"
    return replace(
        view, memory={name[len(prefix) :]: tensor for name, tensor in view.memory.items() if name.startswith(prefix)}
    )


def _join(memories: Iterable[tuple[Part, Tensors]]) -> Tensors:
    return {f"{part.name}/{name}": tensor for part, memory in memories for name, tensor in memory.items()}

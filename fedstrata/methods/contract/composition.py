"""Several parts as one method: ``fedbn+fedprox(mu=0.01)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TypeVar

from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.checks import HOOKS, Checks, refuse_misspelt
from fedstrata.methods.contract.compatibility import defines, first_defining, objection, touched_by
from fedstrata.methods.contract.declarations import Decision, Matter, Needs
from fedstrata.methods.contract.exchange import Exchange
from fedstrata.methods.contract.part import Metrics, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import (
    Clients,
    Declared,
    LocalStep,
    Message,
    Outline,
    Phase,
    Server,
    Training,
    altered,
)
from fedstrata.spec import parse
from fedstrata.stack import Stack, Tensors, under

View = TypeVar("View", bound=Clients | Server)
ModelAndState = tuple[Tensors, Stack]
"""A model, and the memory of all parts, each in a group of its name."""


def _refuse_no_method(given: object) -> None:
    """Say what to write instead of what is neither the text of a method nor one of its parts."""
    if isinstance(given, str | Part):
        return
    if isinstance(given, type):
        raise FedStrataError(f"{given.__name__} is a class; give an object of it as the method: {given.__name__}().")
    if isinstance(given, list | tuple):
        raise FedStrataError(
            "A method is not a list: join its parts with '+', such as method='fedbn+lips'; to run one method after "
            "another, use fedstrata.compare([...])."
        )
    raise FedStrataError(
        f"{type(given).__name__} is no method; give a text such as 'fedprox(mu=0.01)', or an object of a class that is "
        "derived from fedstrata.Part."
    )


@dataclass(frozen=True)
class Method:
    """A method as the engines see it: every hook runs through all parts, each with its own memory.

    ``text`` is how the method was written; two methods with the same parts are the same method.
    """

    text: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            refuse_misspelt(type(part))  # type: ignore[arg-type]
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
        _refuse_no_method(given)
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

    # What the parts say of themselves ---------------------------------------------------------------------------------

    @cached_property
    def needs(self) -> Needs:
        """All that the parts need."""
        return Needs.join(part.needs for part in self.parts)

    def taking(self, matter: Matter) -> Part | None:
        """Find a part that takes something away."""
        return next((part for part in self.parts if matter in touched_by(part).takes_away), None)

    def _refusal(self, *matters: Matter) -> str | None:
        """Say which part takes one of some things away, if one does."""
        takers = ((self.taking(matter), matter) for matter in matters)
        return next((f"'{part.name}' {matter.taken_away}" for part, matter in takers if part is not None), None)

    @property
    def plans_ahead(self) -> list[str]:
        """What depends on how many rounds there are in all, in a sentence of each part that says so."""
        told = {part.name: part.plans_ahead for part in self.parts}
        return [f"'{name}' would have begun otherwise, because {why}" for name, why in told.items() if why]

    @cached_property
    def personalises(self) -> bool:
        """Whether a client may use another model than the one that the server sends."""
        return self.taking(Matter.ONE_MODEL) is not None

    @cached_property
    def objection_to_summing(self) -> str | None:
        """Why replies cannot be added up as they come, one by one, if they cannot."""
        return self._refusal(Matter.AVERAGE, Matter.SUMS, Matter.MEAN, Matter.OWN_WEIGHT)

    @cached_property
    def objection_to_secure_aggregation(self) -> str | None:
        """Why the server cannot do with the sum of all replies alone, if it cannot."""
        return self._refusal(Matter.SAME_ENTRIES) or self.objection_to_summing

    @property
    def objection_to_real_sites(self) -> str | None:
        """Why it runs in simulation only, if it does."""
        reasons = ((part, part.facts.not_on_network) for part in self.parts)
        return next((f"'{part.name}' cannot run on real sites: {why}" for part, why in reasons if why), None)

    @property
    def objection_to_joining(self) -> str | None:
        """Why clients cannot join later, if they cannot."""
        return self._refusal(Matter.JOINING)

    @property
    def objection_to_rounding(self) -> str | None:
        """Why uploads cannot travel in a narrower type, if they cannot."""
        relying = (part for part in self.parts if Matter.EXACT_UPLOADS in touched_by(part).relies_on)
        return next((f"'{part.name}' {Matter.EXACT_UPLOADS.relied_on}" for part in relying), None)

    @property
    def answering_for_privacy(self) -> str | None:
        """The part that keeps an account of what the uploads tell of a client, if there is one."""
        return next((part.name for part in self.parts if _decides(part, Decision.PRIVACY)), None)

    @cached_property
    def merges_by_mean(self) -> bool:
        """Whether the merged model is the weighted mean of the replies."""
        return self.taking(Matter.MEAN) is None

    def notes(self, outline: Outline) -> list[str]:
        """Collect what the parts say about an experiment."""
        if self.needs.features and outline.layers.head is None:
            part = next(part for part in self.parts if part.needs.features)
            raise FedStrataError(
                f"'{part.name}' needs the inputs of a linear head, and the model does not end in a linear layer; "
                "choose another model or method."
            )
        return [note for part in self.parts for note in part.notes(outline)]

    # Before the first round -------------------------------------------------------------------------------------------

    def personal(self, layers: LayerMap) -> frozenset[str]:
        """All names that never leave a client."""
        return frozenset(name for part in self.parts for name in part.keeps(layers).personal)

    def resident(self, layers: LayerMap) -> frozenset[str]:
        """All names that a client keeps between rounds."""
        kept = frozenset(name for part in self.parts for name in part.keeps(layers).resident)
        return kept | self.personal(layers)

    def initial(self, layers: LayerMap, model: Tensors, seed: int) -> Tensors:
        """Let every part replace the common initial model."""
        for part in self._defining("initial"):
            given, model = model, part.initial(layers, model, seed)
            self._checks.tensors(part, "initial", model, given, whole=True)
        return model

    def client_memory(self, clients: Clients, model: Tensors) -> Stack:
        """Collect the parts' first memories."""
        return _joined((part, part.client_memory(clients, model)) for part in self.parts)

    def server_memory(self, server: Server) -> Stack:
        """Collect the parts' first memories."""
        return _joined((part, part.server_memory(server)) for part in self.parts)

    def exchanges_before(self, round: int, rounds: int, joining: bool = False) -> list[PartExchange]:
        """List the exchanges of the parts with clients before a round, in their order."""
        return [
            PartExchange(part, exchange)
            for part in self.parts
            for exchange in part.exchanges()
            for _ in range(exchange.due(round, rounds, joining))
        ]

    # The clients' side of a round -------------------------------------------------------------------------------------

    def receive(self, clients: Clients, message: Message, model: Tensors) -> ModelAndState:
        """Put the client's model together from a message."""
        part = first_defining(self.parts, "receive")
        returned = part.receive(_own_clients(clients, part), message, model)
        self._checks.model_and_memory(part, "receive", returned, model, whole=True)
        model, memory = returned
        return model, clients.memory | under(part.name, memory)

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndState:
        """Let every part begin."""
        memories = clients.memory
        for part in self._defining("start"):
            returned = part.start(_own_clients(clients, part), message, model)
            self._checks.model_and_memory(part, "start", returned, model, whole=True)
            model, memory = returned
            memories |= under(part.name, memory)
        return model, memories

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Return the phases of local training."""
        part = first_defining(self.parts, "phases")
        return part.phases(_own_clients(clients, part))

    def before_phase(self, clients: Clients, phase: Phase, model: Tensors) -> ModelAndState:
        """Do what comes before a phase."""
        if phase.before is None:
            return model, clients.memory
        part = first_defining(self.parts, "phases")
        model, memory = phase.before(_own_clients(clients, part), model)
        return model, clients.memory | under(part.name, memory)

    def second_model(self, phase: Phase) -> str | None:
        """Name the group of the clients' memory with the second model that a phase trains, if it trains one."""
        owner = first_defining(self.parts, "phases")
        return None if phase.model is None else f"{owner.name}/{phase.model}"

    def learned(self, memory: Stack) -> list[str]:
        """Name what is trained beside the model, as it is named in the clients' memory."""
        groups = tuple(f"{part.name}/{group}/" for part in self.parts for group in part.needs.learns)
        return [name for name in memory if name.startswith(groups)]

    def _concerned(self, phase: Phase, hook: str) -> Sequence[Part]:
        """Choose the parts that decide on the loss and the gradients of a phase.

        A second model is the business of the part that keeps it: terms that hold clients near the shared model, or
        correct their drift from it, are not meant for it.
        """
        if phase.model is None:
            return self._defining(hook)
        return (first_defining(self.parts, "phases"),)

    def effective(self, clients: Clients, parameters: Tensors, step: Tensor | None) -> Tensors:
        """Let every part compute the weights with which the model runs."""
        for part in self._defining("effective"):
            given, parameters = parameters, part.effective(_own_clients(clients, part), parameters, step)
            self._checks.tensors(part, "effective", parameters, given, whole=True)
        return parameters

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Compute each client's loss ``[K]``: the experiment's, or what a part decides, and the others' terms."""
        for part in self._concerned(step.phase, "loss"):
            loss = part.loss(_own_clients(clients, part), step, loss)
            self._checks.numbers(part, "loss", loss, len(clients.ids))
        return loss

    def gradients(self, clients: Clients, step: LocalStep, gradients: Tensors) -> Tensors:
        """Let every part change the gradients."""
        for part in self._concerned(step.phase, "gradients"):
            given, gradients = gradients, part.gradients(_own_clients(clients, part), step, gradients)
            self._checks.tensors(part, "gradients", gradients, given, whole=False)
        return gradients

    def project(self, clients: Clients, step: LocalStep, parameters: Tensors) -> ModelAndState:
        """Let every part change the parameters after a step; return them, and what changed in the memory."""
        changed = Stack()
        for part in self._defining("project"):
            own = _own_clients(clients, part)
            returned = part.project(own, step, parameters)
            self._checks.model_and_memory(part, "project", returned, parameters, whole=True)
            parameters, memory = returned
            new = {name: tensor for name, tensor in memory.items() if own.memory.get(name) is not tensor}
            changed |= under(part.name, new)
        return parameters, changed

    def finish(self, clients: Clients, training: Training) -> ModelAndState:
        """Let every part change the trained model, and remember what it needs."""
        memories = clients.memory
        for part in self._defining("finish"):
            returned = part.finish(_own_clients(clients, part), training)
            self._checks.model_and_memory(part, "finish", returned, training.trained, whole=True)
            model, memory = returned
            training = altered(training, trained=model)
            memories |= under(part.name, memory)
        return training.trained, memories

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Let every part change what leaves the client."""
        for part in self._defining("upload"):
            message = part.upload(_own_clients(clients, part), training, message)
            self._checks.message(part, "upload", message, (1, len(clients.ids)))
        return message

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Let parts choose the model that each client uses, then turn it into weights."""
        for part in self._defining("deployed"):
            given, model = model, part.deployed(_own_clients(clients, part), model)
            self._checks.tensors(part, "deployed", model, given, whole=True)
        return self.effective(clients, model, None)

    @cached_property
    def decides_loss(self) -> Part | None:
        """The part that puts a loss of its own in the place of the experiment's, if there is one."""
        return next((part for part in self.parts if _decides(part, Decision.LOSS)), None)

    @cached_property
    def adaptation(self) -> Phase | None:
        """The final adaptation, if there is one."""
        return first_defining(self.parts, "adaptation").adaptation()

    # The server's side of a round -------------------------------------------------------------------------------------

    def select(self, server: Server, count: int) -> tuple[int, ...]:
        """Choose the participants of a round."""
        part = first_defining(self.parts, "select")
        return part.select(_own(server, part), count)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Let every part change what the server sends."""
        for part in self._defining("broadcast"):
            message = part.broadcast(_own(server, part), message)
            self._checks.message(part, "broadcast", message, (1, len(server.participants)))
        return message

    def weigh(self, declared: Declared) -> Tensor:
        """Give each participant its weight ``[K]``."""
        part = first_defining(self.parts, "weigh")
        weights = part.weigh(declared)
        self._checks.numbers(part, "weigh", weights, len(declared.sizes))
        return weights

    def aggregate(self, server: Server, replies: Message) -> ModelAndState:
        """Weigh and merge all replies of a round, and advance."""
        replies = self._admitted(server, replies)
        merger = first_defining(self.parts, "merge")
        weights = self.weigh(Declared(server.sizes, server.label_counts))
        merged = merger.merge(_own(server, merger), replies, weights / weights.sum())
        self._checks.tensors(merger, "merge", merged, server.model, whole=False)
        return self.advance(server, merged, replies)

    def _admitted(self, server: Server, replies: Message) -> Message:
        for part in self._defining("admit"):
            replies = part.admit(_own(server, part), replies)
            self._checks.message(part, "admit", replies, (1, len(server.participants)))
        return replies

    def advance(self, server: Server, merged: Tensors, replies: Message) -> ModelAndState:
        """Go from the merged model to the new one and the server's new memory.

        Without ``replies``, an empty message, nothing can look at them (see :attr:`objection_to_summing`).
        """
        stepper, refiners = first_defining(self.parts, "server_step"), self._defining("refine")
        new, server = self._refined(server, merged, replies, [part for part in refiners if part.refines_merged])
        returned = stepper.server_step(_own(server, stepper), new)
        self._checks.model_and_memory(stepper, "server_step", returned, new, whole=True)
        new, memory = returned
        server = _remembering(server, stepper, memory)
        new, server = self._refined(server, new, replies, [part for part in refiners if not part.refines_merged])
        return new, server.memory

    def _refined(
        self, server: Server, model: Tensors, replies: Message, parts: Sequence[Part]
    ) -> tuple[Tensors, Server]:
        for part in parts:
            returned = part.refine(_own(server, part), model, replies)
            self._checks.model_and_memory(part, "refine", returned, server.model, whole=False)
            model, memory = returned
            server = _remembering(server, part, memory)
        return model, server

    def metrics(self, server: Server) -> Metrics:
        """Collect the parts' numbers."""
        return {
            name: value
            for part in self._defining("metrics")
            for name, value in part.metrics(_own(server, part)).items()
        }

    def remarks(self, server: Server) -> list[str]:
        """Collect what the parts say after the last round."""
        return [remark for part in self._defining("remarks") for remark in part.remarks(_own(server, part))]

    # What both sides know ---------------------------------------------------------------------------------------------

    def masks_known(self, view: Clients | Server, upload: bool) -> Tensors:
        """Collect the masks that both sides of a link hold."""
        return {
            name: mask
            for part in self._defining("masks_known")
            for name, mask in part.masks_known(_own(view, part), upload).items()
        }

    @cached_property
    def _checks(self) -> Checks:
        return Checks()

    def _defining(self, hook: str) -> Sequence[Part]:
        return self._parts_defining[hook]

    @cached_property
    def _parts_defining(self) -> dict[str, tuple[Part, ...]]:
        """The parts with each hook, in order: who decides the loss comes first, who answers for privacy sends last, and
        lies are told before anybody looks at them.
        """
        found = {hook: tuple(part for part in self.parts if defines(part, hook)) for hook in HOOKS}
        loss = sorted(found["loss"], key=lambda part: not _decides(part, Decision.LOSS))
        upload = sorted(found["upload"], key=lambda part: _decides(part, Decision.PRIVACY))
        admit = sorted(found["admit"], key=lambda part: not _decides(part, Decision.LIES))
        return {**found, "loss": tuple(loss), "upload": tuple(upload), "admit": tuple(admit)}


@dataclass(frozen=True)
class PartExchange:
    """One part's exchange before a round, as the engines see it: each side with the memory of that part."""

    part: Part
    exchange: Exchange

    def asks(self, server: Server) -> Sequence[int]:
        """Choose the clients that are asked."""
        return self.exchange.asks(_own(server, self.part))

    def survey(self, clients: Clients, model: Tensors) -> Message:
        """Answer at the clients."""
        return self.exchange.survey(_own_clients(clients, self.part), model)

    def conclude(self, server: Server, replies: Message) -> ModelAndState:
        """Conclude at the server."""
        model, memory = self.exchange.conclude(_own(server, self.part), replies)
        return model, _remembering(server, self.part, memory).memory

    def announce(self, server: Server) -> Message:
        """Announce to all clients."""
        return self.exchange.announce(_own(server, self.part))

    def adopt(self, clients: Clients, announcement: Message) -> Stack:
        """Take the announcement in at the clients."""
        memory = self.exchange.adopt(_own_clients(clients, self.part), announcement)
        return clients.memory | under(self.part.name, memory)


def _decides(part: Part, decision: Decision) -> bool:
    return part.touches is not None and decision in part.touches.decides


def _own(view: View, part: Part) -> View:
    """Narrow the memory in a view to what belongs to one part."""
    return altered(view, memory=view.memory.group(part.name))


def _own_clients(clients: Clients, part: Part) -> Clients:
    """Narrow the memory in a view to what belongs to one part; what it probes with stays whole."""
    return altered(clients, memory=clients.memory.group(part.name), everybody=clients.memory)


def _remembering(server: Server, part: Part, memory: Tensors) -> Server:
    """Put a part's new memory in the place of its old one."""
    return altered(server, memory=server.memory.without(part.name) | under(part.name, memory))


def _joined(memories: Iterable[tuple[Part, Tensors]]) -> Stack:
    return Stack({name: tensor for part, memory in memories for name, tensor in under(part.name, memory).items()})

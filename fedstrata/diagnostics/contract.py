"""What a diagnostic is: what it needs, what it keeps from round to round, and the numbers that it gives.

A diagnostic looks on and changes nothing: a run with it has the same numbers as a run without.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar
from zlib import crc32

from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.composition import Method
from fedstrata.methods.contract.views import Message, Probe
from fedstrata.spec import Registry, Spec
from fedstrata.stack import Stack, Tensors

WHOLE_MODEL = ""
"""The layer under which numbers of all layers together stand."""


class Need(Enum):
    """What a diagnostic looks at beyond the server's model before and after a round, and whether it leaves a site."""

    UPLOADS = "the uploads of single clients"
    """At real sites the server sees them, but for secure aggregation."""
    MODELS = "the clients' models before and after local training"
    """They stay at a site."""
    DATA = "the clients' samples"
    """They stay at a site."""


@dataclass(frozen=True)
class Quantity:
    """What a number is, for axes, menus and legends.

    ``explanation`` is a sentence for a newcomer that says what a high and a low value mean. ``low`` and ``high`` bound
    it where it has bounds. ``centre`` is the value at which the meaning turns (0 of a cosine between updates), for
    scales of two colours. ``pairs`` says that the columns of ``[K, K]`` are the participants, not classes or bins.
    """

    title: str
    explanation: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    centre: float | None = None
    logarithmic: bool = False
    pairs: bool = False


@dataclass(frozen=True)
class Seen:
    """What a diagnostic sees of a round. Stacks ``[K, ...]`` are in the order of the participants.

    What nobody asked for is empty: ``uploads`` come with :attr:`Need.UPLOADS`; ``received``, ``started`` and
    ``trained`` (a client's model as it came, as training began, and as it ended) with :attr:`Need.MODELS`; ``probe``
    answers questions to the participants' samples, with :attr:`Need.DATA`.
    """

    round: int
    rounds: int
    layers: LayerMap
    before: Tensors
    after: Tensors
    travelled: frozenset[str]
    """The names of the model's tensors that were sent to clients."""
    participants: Sequence[int]
    sizes: Tensor
    """How many samples each participant declared ``[K]``."""
    label_counts: Tensor
    """How many of each class ``[K, classes]``."""
    method_metrics: Mapping[str, float | Mapping[str, float]] = field(default_factory=dict)
    """What the method tells of itself in this round, such as the ``gamma`` of ``lws``, by layer where it is a dict."""
    uploads: Message = field(default_factory=Message)
    received: Tensors = field(default_factory=dict)
    started: Tensors = field(default_factory=dict)
    trained: Tensors = field(default_factory=dict)
    probe: Probe | None = None
    client_memory: Stack = field(default_factory=Stack)
    """What the method keeps at the participants after the round, such as masks; with :attr:`Need.MODELS`."""
    server_memory: Stack = field(default_factory=Stack)
    tested: Mapping[int, float] = field(default_factory=dict)
    """The accuracy on its own test samples of every client that was tested after the round, by its number: with the
    model that is the headline of the run. Empty where the round was not tested."""
    initial: Tensors = field(default_factory=dict)
    """The common initial model, also of what clients keep to themselves."""

    @property
    def last(self) -> bool:
        """Whether no round follows."""
        return self.round == self.rounds

    def only(self, needs: Collection[Need]) -> Seen:
        """Show what somebody asked for, and leave out what others did."""
        nothing: dict[str, Any] = {}
        if Need.UPLOADS not in needs:
            nothing |= {"uploads": Message()}
        if Need.MODELS not in needs:
            nothing |= {"received": {}, "started": {}, "trained": {}, "client_memory": Stack()}
        if Need.DATA not in needs:
            nothing |= {"probe": None}
        return replace(self, **nothing)


@dataclass(frozen=True)
class Measured:
    """The numbers of one diagnostic in one round; each name is one of its ``quantities``.

    ``layers``: quantity, layer, number (a tensor without axes, or a float). ``clients``: quantity, and a number for
    each participant ``[K]``. ``clients_in_layers``: quantity, layer (:data:`WHOLE_MODEL` for all together), and
    ``[K]``, or ``[K, M]`` where a client has several numbers: one for each participant (a matrix), each class, each
    bin. ``in_layers``: the same of no single client, ``[M]``, such as the bins of a histogram over all. NaN stands for
    what is not defined, and is not stored.
    """

    of_round: Mapping[str, Tensor | float] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, Tensor | float]] = field(default_factory=dict)
    clients: Mapping[str, Tensor] = field(default_factory=dict)
    clients_in_layers: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    in_layers: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnostic(Spec):
    """Something to measure in a run: a frozen dataclass whose fields are its parameters."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    quantities: ClassVar[Mapping[str, Quantity]] = {}
    afterwards: ClassVar[bool] = False
    """Whether what a finished run keeps says it too: ``before`` is then the initial model, which clients ``received``
    and ``started`` from, ``after`` the last one of the server, and ``trained`` what each client uses in the end."""

    def unfit(self, method: Method, layers: LayerMap) -> str | None:
        """Say why it cannot be computed of a method or a model, though all that it needs is there; none: it can."""
        return None

    def due(self, round: int, rounds: int) -> bool:
        """Tell whether it is computed in a round; :meth:`update` is called in every round."""
        return True

    def update(self, seen: Seen, memory: Stack) -> Stack:
        """Return what is kept from now on, such as a reference; it is saved in checkpoints. Called first."""
        return memory

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Measure; ``memory`` is what :meth:`update` has just returned."""
        raise NotImplementedError

    def refuse_unexplained(self, measured: Measured) -> None:
        """Refuse numbers that stand under names which ``quantities`` does not explain."""
        tables = (measured.of_round, measured.layers, measured.clients, measured.clients_in_layers, measured.in_layers)
        names = {name for table in tables for name in table}
        for name in sorted(names - self.quantities.keys()):
            raise FedStrataError(
                f"The diagnostic '{self.name}' measures '{name}', which its 'quantities' do not explain; add it there."
            )

    def draw(self, number: int = 0) -> int:
        """Number a draw of a :class:`Probe` so that nobody else in the run draws the same."""
        return crc32(f"diagnose/{self.name}/{number}".encode())

    def looks(self, round: int, rounds: int) -> bool:
        """Tell whether it looks at a round at all: to measure, or to keep something of it."""
        return type(self).update is not Diagnostic.update or self.due(round, rounds)


diagnostics: Registry[Diagnostic] = Registry("diagnostic")

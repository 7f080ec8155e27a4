"""What a diagnostic is: what it needs, what it keeps from round to round, and the numbers that it gives.

A diagnostic looks on and changes nothing: a run with it has the same numbers as a run without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from torch import Tensor

from fedstrata.layers import LayerMap
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

    @property
    def last(self) -> bool:
        """Whether no round follows."""
        return self.round == self.rounds


@dataclass(frozen=True)
class Measured:
    """The numbers of one diagnostic in one round; each name is one of its ``quantities``.

    ``layers``: quantity, layer, number (a tensor without axes, or a float). ``clients``: quantity, and a number for
    each participant ``[K]``. ``clients_in_layers``: quantity, layer (:data:`WHOLE_MODEL` for all together), and
    ``[K]``, or ``[K, M]`` where a client has several numbers: one for each participant (a matrix), each class, each
    bin. NaN stands for what is not defined, and is not stored.
    """

    of_round: Mapping[str, Tensor | float] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, Tensor | float]] = field(default_factory=dict)
    clients: Mapping[str, Tensor] = field(default_factory=dict)
    clients_in_layers: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnostic(Spec):
    """Something to measure in a run: a frozen dataclass whose fields are its parameters."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    quantities: ClassVar[Mapping[str, Quantity]] = {}

    def due(self, round: int, rounds: int) -> bool:
        """Tell whether it is computed in a round; :meth:`update` is called in every round."""
        return True

    def update(self, seen: Seen, memory: Stack) -> Stack:
        """Return what is kept from now on, such as a reference; it is saved in checkpoints. Called first."""
        return memory

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Measure; ``memory`` is what :meth:`update` has just returned."""
        raise NotImplementedError


diagnostics: Registry[Diagnostic] = Registry("diagnostic")

"""What a part says of itself: facts for people, what it needs of the engines, and what it touches.

From the last follows which parts can stand together in one method, and what a method can run under: sums of replies,
secure aggregation, clients that join later, values that are rounded on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

FAMILIES = (
    "averaging",
    "personal layers and models",
    "local objective",
    "aggregation",
    "layers",
    "sparse",
    "decentralised",
    "privacy",
    "robust",
)
"""The families of the methods that come with the package, in the order in which they are listed."""


@dataclass(frozen=True)
class Facts:
    """What is true of a part, for listings and checks; ``not_on_network`` says why it cannot run there, if so."""

    family: str
    paper: str
    link: str = ""
    not_on_network: str | None = None


@dataclass(frozen=True)
class Needs:
    """What a part asks of the engines; nothing is computed that nobody needs."""

    features: bool = False
    """The inputs of the linear head, which the model must have, in :class:`LocalStep` and :class:`Probe`."""
    last_gradients: bool = False
    """The gradients of the last local step, in :class:`Training`."""
    mean_gradients: bool = False
    """The mean of the gradients over all local steps, before any hook changed them, in :class:`Training`."""
    previous: bool = False
    """Each client's own model as its last training left it, in :class:`Clients`."""
    learns: tuple[str, ...] = ()
    """The groups of the part's client memory that are trained like parameters."""
    replies: bool = False
    """The replies of single clients in :meth:`Part.refine`, so that they cannot be added up as they come."""
    relays: int = 0
    """How many other clients' models the server sends each participant, whoever else takes part: they are gathered for
    as many participants at a time as are trained at once."""
    proxy: int = 0
    """Labelled samples at the server, taken out of the test set."""
    held_out: float = 0.0
    """The fraction of its training samples that each client holds out, to judge models on."""
    samples_per_epoch: int | None = None
    """An epoch of this size: large clients take a part of their samples, small ones repeat some."""
    operations: Mapping[Callable[..., Tensor], Callable[..., Tensor]] = field(default_factory=dict)
    """Torch functions of the model, such as ``conv2d``, that are computed in another way during local training; what
    stands in the place of a function is called with the function itself, and then its arguments, for one client."""

    @classmethod
    def join(cls, needs: Iterable[Needs]) -> Needs:
        """Ask for all that several parts need; of numbers, the largest. What each of them learns stays its own."""
        every = list(needs)
        return cls(
            features=any(one.features for one in every),
            last_gradients=any(one.last_gradients for one in every),
            mean_gradients=any(one.mean_gradients for one in every),
            previous=any(one.previous for one in every),
            replies=any(one.replies for one in every),
            relays=max(one.relays for one in every),
            proxy=max(one.proxy for one in every),
            held_out=max(one.held_out for one in every),
            samples_per_epoch=next((one.samples_per_epoch for one in every if one.samples_per_epoch), None),
            operations={function: other for one in every for function, other in one.operations.items()},
        )


class Decision(Enum):
    """What only one part of a method can do, as it is said of the part."""

    PARTICIPANTS = "chooses the participants"
    EPOCH = "fixes the samples of an epoch"
    RECEIVED = "puts a client's model together from what others sent"
    LOSS = "decides the local loss"
    PHASES = "divides local training into phases"
    ADAPTATION = "adds a final adaptation"
    SHARES = "decides the shares of the clients"
    MERGING = "decides how replies are merged"
    SERVER_STEP = "decides the server's step"
    TRAVEL = "decides which layers travel"
    WEIGHTS = "puts weights to values of its own"
    USE = "decides which model a client uses in the end"
    HEAD = "decides what becomes of the head"
    GAPS = "decides why a weight was not sent"
    MIXTURE = "mixes the clients' models anew for every client"
    PRIVACY = "keeps an account of privacy"
    LIES = "lets clients lie"


class Matter(Enum):
    """What a part may rely on, and another may take away: how the first is said of a part, and how the second."""

    SHARING = "works on what clients share", "shares nothing"
    AVERAGE = "works on the average of all clients", "lets no client go on with the average of all"
    ALL_LAYERS = "needs all shared layers of all participants", "decides which layers travel"
    ALL_SENT = "needs every layer in every upload", "leaves layers out of uploads"
    SHARED_HEAD = "works on a head that clients share", "keeps the head at each client"
    SHARED_NORMS = "works on norm layers that clients share", "keeps norm layers at each client"
    PLAIN_MESSAGES = "mixes clients' models as they are", "changes what travels"
    SAME_ENTRIES = (
        "bounds what a client can change, where all send the same",
        "lets each client send entries of its own",
    )
    WEIGHTS = "works on the weights of the model", "does not train weights"
    SHARED_WEIGHTS = "works on weights that clients share", "shares masks instead of weights"
    WHOLE_MODEL = "runs the whole model at the server", "leaves the server no whole model to run"
    ONE_MODEL = "gives everybody the same model", "gives each client a model of its own"
    ONLY_UPDATES = "covers nothing but the clients' updates", "lets the server see more of single clients"
    TRAINED_IS_SENT = "corrects the drift of the model in training", "sends another model than the one in training"
    FREE_STEPS = (
        "counts the gradients in a client's way, which only its own 'mu' may pull back",
        "pulls every step back to the model received",
    )
    UNMASKED_HEAD = "leaves the head as it was initialised", "masks weights of the head too"
    SUMS = "only adds replies up", "looks at the replies of single clients"
    MEAN = "goes on from the mean of the replies", "merges replies in a way of its own"
    OWN_WEIGHT = "weighs every client by itself", "weighs a client by who else takes part"
    JOINING = "lets clients join later", "counts the models of all clients from the first round on"
    NO_SINGLE_REPLY = "keeps single replies from deciding", "goes by what every single client sent, liars too"
    EXACT_UPLOADS = "bounds the length of an update, beyond which rounding could carry it", "rounds uploads"

    @property
    def relied_on(self) -> str:
        """How it is said of a part that relies on it."""
        return self.value[0]

    @property
    def taken_away(self) -> str:
        """How it is said of a part that takes it away."""
        return self.value[1]


UNDECLARED = frozenset(
    (
        Matter.SHARING, Matter.AVERAGE, Matter.ALL_LAYERS, Matter.SHARED_HEAD, Matter.SHARED_NORMS, Matter.WEIGHTS,
        Matter.SHARED_WEIGHTS,
    )
)  # fmt: skip
"""What a part that says nothing of itself is taken to rely on, so that no composition silently does nothing."""


@dataclass(frozen=True)
class Touches:
    """What a part decides alone, what it relies on, and what is no longer there beside it.

    Two parts fit together if they decide nothing both, and neither takes away what the other relies on. Much of it
    follows from the hooks that a part defines (:mod:`fedstrata.methods.contract.compatibility`) and need not be said.
    """

    decides: tuple[Decision, ...] = ()
    relies_on: tuple[Matter, ...] = ()
    takes_away: tuple[Matter, ...] = ()

    def also(
        self,
        decides: tuple[Decision, ...] = (),
        relies_on: tuple[Matter, ...] = (),
        takes_away: tuple[Matter, ...] = (),
    ) -> Touches:
        """Touch more."""
        return Touches(self.decides + decides, self.relies_on + relies_on, self.takes_away + takes_away)

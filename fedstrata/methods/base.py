"""The contract between a method and the engines.

A method is a composition of **parts**. A part is a frozen dataclass whose fields are its hyper-parameters and whose
methods are hooks: the points of a round that it touches. Hooks take values and return values; they keep nothing.

**Client hooks** see only what a client has: the broadcast, its own slice of the weights, its own memory, facts about
its own data. **Server hooks** see the uploads, the server's memory, and what clients declared. Between the two there is
only a :class:`Message`. So the same part runs in simulation, where a hook serves K clients at once (every tensor has a
leading client axis ``[K, ...]``), and at a real site, where K = 1.

A hook that a part does not define behaves as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedstrata.layers import LayerMap
from fedstrata.losses import cross_entropy
from fedstrata.rng import client_keys, key, numpy_generator
from fedstrata.spec import Spec
from fedstrata.stack import Tensors, concatenate, take, weighted_mean


@dataclass(frozen=True)
class Message:
    """All that ever travels between a client and the server.

    Every tensor has a leading axis: K, one slice per client, or 1, the same for everybody. ``masks`` says which entries
    of a tensor are sent (it broadcasts against the tensor); entries outside are zero and cost nothing. ``numbers``
    holds one value per client.
    """

    tensors: Tensors = field(default_factory=dict)
    masks: Tensors = field(default_factory=dict)
    numbers: Tensors = field(default_factory=dict)

    def rows(self, rows: Tensor | None) -> Message:
        """Pick the slices of some clients; what is the same for everybody stays."""

        def pick(tensors: Tensors) -> Tensors:
            return {
                name: tensor if tensor.shape[0] == 1 or rows is None else tensor.index_select(0, rows)
                for name, tensor in tensors.items()
            }

        return Message(pick(self.tensors), pick(self.masks), pick(self.numbers))

    def without(self, names: Collection[str]) -> Message:
        """Leave some tensors out, with their masks."""

        def rest(tensors: Tensors) -> Tensors:
            return {name: tensor for name, tensor in tensors.items() if name not in names}

        return Message(rest(self.tensors), rest(self.masks), self.numbers)

    @property
    def common(self) -> bool:
        """Whether it is the same for everybody."""
        everything = (*self.tensors.values(), *self.masks.values(), *self.numbers.values())
        return all(tensor.shape[0] == 1 for tensor in everything)

    @classmethod
    def join(cls, messages: Sequence[Message]) -> Message:
        """Put the messages of several groups of clients together, in their order."""
        if len(messages) == 1:
            return messages[0]
        return cls(
            *(concatenate([getattr(message, kind) for message in messages]) for kind in ("tensors", "masks", "numbers"))
        )


@dataclass(frozen=True)
class Clients:
    """What a client hook may see of the K clients that it serves at once.

    ``epochs`` are the local epochs that the experiment asks for. ``shared`` are the names that travel. ``initial`` is
    the common initial model, without a client axis: everybody in a run knows it.
    """

    round: int
    rounds: int
    epochs: int
    layers: LayerMap
    ids: tuple[int, ...]
    seed: int
    sizes: Tensor
    label_counts: Tensor
    shared: frozenset[str]
    memory: Tensors = field(default_factory=dict)
    initial: Tensors = field(default_factory=dict)

    def rows(self, rows: Tensor | None) -> Clients:
        """Narrow the view to some of the clients."""
        if rows is None:
            return self
        return replace(
            self,
            ids=tuple(self.ids[row] for row in rows.tolist()),
            sizes=self.sizes[rows],
            label_counts=self.label_counts[rows],
            memory=take(self.memory, rows),
        )

    def keys(self, purpose: str) -> Tensor:
        """One key per client for this round's draws: ``[K, 2]``."""
        return client_keys(self.seed, self.round, self.ids, purpose, self.sizes.device)


@dataclass(frozen=True)
class Server:
    """What a server hook may see: its own model and memory, and what the K participants declared about their data.

    ``proxy`` is the server's own small labelled set, where a part asks for one (:meth:`Part.proxy_samples`).
    ``testing`` says that what is sent will be tested, not trained.
    """

    round: int
    rounds: int
    layers: LayerMap
    seed: int
    clients: int
    participants: tuple[int, ...]
    sizes: Tensor
    label_counts: Tensor
    model: Tensors
    memory: Tensors = field(default_factory=dict)
    proxy: Proxy | None = None
    testing: bool = False

    def key(self, purpose: str) -> tuple[int, int]:
        """The key of this round's draws at the server."""
        return key(self.seed, self.round, "server", purpose)


class Proxy(Protocol):
    """The server's own labelled samples."""

    def loss(self, parameters: Tensors, buffers: Tensors, step: int) -> tuple[Tensor, Tensors]:
        """Return the mean loss ``[K]`` of K models on all samples, open to autograd, and their buffers after the pass.

        Norm layers use the statistics of the samples and update the running ones; a buffer that is not given is what it
        was at the beginning. ``step`` numbers the draws of dropout.
        """
        ...


@dataclass(frozen=True)
class Phase:
    """A stretch of local training.

    ``trains`` names the parameters that move (none: all), ``epochs`` or ``steps`` say for how long (none: as the
    experiment says). ``model`` is the second model of the client that is trained (see :attr:`Part.second_models`)
    instead of the one received. ``repeats`` takes several steps on each batch. ``continues`` goes on with the
    optimiser's state of the phase before. ``rate`` multiplies the learning rate. ``name`` lets hooks tell phases apart.

    ``span`` does only a stretch of that work, such as its first half ``(0, 0.5)``: phases whose spans follow each
    other, and that continue, do together exactly what one phase would, on the same batches.
    """

    trains: Callable[[LayerMap], Iterable[str]] | None = None
    epochs: int | None = None
    steps: int | None = None
    model: str | None = None
    repeats: int = 1
    continues: bool = False
    rate: float = 1.0
    name: str = ""
    span: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Step:
    """One local step of K clients, as hooks see it.

    ``received`` are the weights with which the round began, before any perturbation. ``parameters`` hold the model's
    and, under ``part/name``, what parts learn beside it (:meth:`Part.learns`). ``features`` is the input of the head
    ``[K, B, ...]``, where a part wants it. ``number`` counts the steps of a phase, ``repeat`` those on one batch.
    ``forward`` runs other parameters on the same batch, open to autograd. ``predict`` runs another whole model,
    buffers included, in evaluation mode and without gradients, and returns its outputs and features.
    """

    parameters: Tensors
    received: Tensors
    inputs: Tensor
    labels: Tensor
    outputs: Tensor
    learning_rate: float
    forward: Callable[[Tensors], Tensor]
    predict: Callable[[Tensors], tuple[Tensor, Tensor]]
    features: Tensor | None = None
    phase: Phase = Phase()
    number: int = 0
    repeat: int = 0


class Probe(Protocol):
    """What a client can find out about a model with its own data, beside training."""

    def gradients(self, model: Tensors, batch_size: int, batches: int | None = 1, balanced: bool = False) -> Tensors:
        """Return the gradients of the mean loss on some minibatches, balanced over the client's classes if asked.

        Without a number of batches it is the mean over all samples of the client.
        """
        ...

    def fisher(self, model: Tensors, names: Sequence[str], batch_size: int, batches: int, kind: str) -> Tensors:
        """Estimate the diagonal Fisher information of some parameters on minibatches, in evaluation mode.

        ``kind`` is ``sample`` (the mean of the squared gradients of single samples), ``sampled-label`` (the same with
        labels drawn from the model's own predictions) or ``batch`` (the squared gradient of each batch's mean loss).
        """
        ...

    def train(
        self,
        model: Tensors,
        epochs: int,
        span: tuple[float, float] = (0.0, 1.0),
        memory: Tensors | None = None,
    ) -> Tensors:
        """Return the model after some epochs of local training, or a stretch of them (see :class:`Phase`).

        ``memory`` replaces entries of the client's memory meanwhile, under ``part/name``.
        """
        ...

    def test(self, model: Tensors, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return accuracy and mean loss, ``[K]`` each, on the client's training samples, or on those that it holds out
        (:meth:`Part.held_out`).
        """
        ...


@dataclass(frozen=True)
class Training:
    """What local training did.

    Its start and its end, the model after each phase, the gradients of the last step and the mean over all steps (if a
    part wants them), how many steps each client made ``[K]``, how many steps' worth of gradients the optimiser made of
    them (:meth:`fedstrata.optimisers.Optimiser.effective_steps`), the learning rate, and a probe of the client's own
    data.
    """

    start: Tensors
    trained: Tensors
    gradients: Tensors
    mean_gradients: Tensors
    after_phase: tuple[Tensors, ...]
    steps: Tensor
    effective_steps: Tensor
    learning_rate: float
    probe: Probe


FAMILIES = (
    "averaging",
    "personal layers and models",
    "local objective",
    "aggregation",
    "layers",
    "sparse",
    "decentralised",
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
class Part(Spec):
    """One component of a method; the hooks below are FedAvg."""

    facts: ClassVar[Facts]
    claims: ClassVar[tuple[str, ...]] = ()
    """What only one part of a method can do, beside the exclusive hooks, as it is said of the part."""
    shares: ClassVar[bool] = True
    """Whether anything leaves the clients; if not, nothing can work on what they share."""
    only_on_shared: ClassVar[bool] = False
    """Whether all that it does concerns what clients share, so that without that it would silently do nothing."""
    averages: ClassVar[bool] = True
    """Whether clients go on with an average of all; if not, nothing can work on that average."""

    def parts(self) -> tuple[Part, ...]:
        """The parts that this name stands for: itself, or several for a named composition."""
        return (self,)

    def objects_to(self, other: Part) -> str | None:
        """Tell why another part cannot stand beside this one, if it cannot, where no claim says so."""
        return None

    second_models: ClassVar[tuple[str, ...]] = ()
    """Names of whole models that each client keeps beside the shared one, in its memory under ``model/tensor``; they
    start at the common initial model, and a :class:`Phase` trains them."""

    deploys_alike: ClassVar[bool] = False
    """Whether :meth:`deployed` gives every client the same model."""

    def notes(self, layers: LayerMap) -> Iterable[str]:
        """Say where the method degenerates on a model, in sentences."""
        return ()

    def personal(self, layers: LayerMap) -> Iterable[str]:
        """Name the parameters and buffers that never leave a client."""
        return ()

    def resident(self, layers: LayerMap) -> Iterable[str]:
        """Name further ones that a client keeps between rounds, because they do not travel in every round."""
        return ()

    def initial(self, layers: LayerMap, model: Tensors, seed: int) -> Tensors:
        """Replace the common initial model, where a method trains something else than weights."""
        return model

    def proxy_samples(self) -> int:
        """Tell how many labelled samples the server needs for itself; they are taken out of the test set."""
        return 0

    def held_out(self) -> float:
        """Tell which fraction of its training samples each client holds out, to judge models on."""
        return 0.0

    def samples_per_epoch(self) -> int | None:
        """Fix the samples of a local epoch: large clients take a part of theirs, small ones repeat (exclusive)."""
        return None

    def masks_known(self, view: Clients | Server, upload: bool) -> Tensors:
        """Tell which masks both sides of a link hold before a message travels down or up it, by the tensors' names.

        A message under such a mask names it instead of sending it. Clients answer for themselves, ``[K, ...]``, the
        server for the participants, with a leading axis of K or 1; the answers must agree.
        """
        return {}

    # Client hooks -----------------------------------------------------------------------------------------------------

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Prepare what each client remembers, as stacks; ``model`` is the common initial model as a stack."""
        return {}

    def receive(self, clients: Clients, message: Message, model: Tensors, probe: Probe) -> tuple[Tensors, Tensors]:
        """Put the client's model together from a message that holds more than the model (exclusive).

        ``model`` has what the message and the client's own tensors give under their names. Return the model that the
        client goes on with, and the client's new memory.
        """
        return model, clients.memory

    def begin(self, clients: Clients, received: Tensors, message: Message) -> Tensors:
        """Look at what was received, at the start of a round, and return the client's new memory."""
        return clients.memory

    def perturb(self, clients: Clients, start: Tensors) -> Tensors:
        """Change the weights with which local training starts."""
        return start

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Divide local training into phases (exclusive)."""
        return (Phase(),)

    def between_phases(self, clients: Clients, number: int, model: Tensors, probe: Probe) -> tuple[Tensors, Tensors]:
        """Change the model and the client's memory after phase ``number`` (from 0), before the next one begins."""
        return model, clients.memory

    def learns(self, layers: LayerMap) -> Iterable[str]:
        """Name what is trained beside the model, among the part's own client memory."""
        return ()

    def effective(self, clients: Clients, parameters: Tensors, step: int) -> Tensors:
        """Compute the weights with which the model runs from the parameters that are trained, open to autograd."""
        return parameters

    def operations(self) -> dict[Callable[..., Tensor], Callable[..., Tensor]]:
        """Compute some torch functions of the model, such as ``conv2d``, in another way during local training.

        What stands in the place of a function is called with the function itself, and then its arguments, for one
        client.
        """
        return {}

    def wants_features(self) -> bool:
        """Tell whether hooks need the input of the model's head (``step.features``)."""
        return False

    def base_loss(self, clients: Clients, step: Step) -> Tensor:
        """Compute each client's loss ``[K]`` itself (exclusive): the mean cross entropy."""
        return cross_entropy(step.outputs, step.labels).mean(1)

    def loss(self, clients: Clients, step: Step) -> Tensor | None:
        """Add a term ``[K]`` to each client's loss."""
        return None

    def gradients(self, clients: Clients, step: Step, gradients: Tensors) -> Tensors:
        """Change the gradients before the optimiser sees them."""
        return gradients

    def project(self, clients: Clients, step: Step, parameters: Tensors) -> Tensors:
        """Change the parameters after the optimiser's step."""
        return parameters

    def wants_gradients(self) -> bool:
        """Tell whether :meth:`remember` needs the gradients of the last local step."""
        return False

    def wants_mean_gradients(self) -> bool:
        """Tell whether hooks need the mean of the gradients over all local steps, before any hook changed them."""
        return False

    def settle(self, clients: Clients, start: Tensors, trained: Tensors) -> Tensors:
        """Change the trained model, before it is remembered, kept and sent."""
        return trained

    def remember(self, clients: Clients, training: Training) -> Tensors:
        """Return the client's new memory after local training."""
        return clients.memory

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Change what leaves the client; the message already holds the shared tensors."""
        return message

    def adaptation(self) -> Phase | None:
        """After the last round, let every client train once more for itself (exclusive)."""
        return None

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Turn what training works on into the model that a client uses, and that is tested."""
        return model

    # Server hooks -----------------------------------------------------------------------------------------------------

    def server_memory(self, server: Server) -> Tensors:
        """Prepare what the server remembers."""
        return {}

    def select(self, server: Server, count: int) -> tuple[int, ...]:
        """Choose this many participants of a round (exclusive): uniformly, the same for every method under one seed."""
        if count == server.clients:
            return tuple(range(count))
        chosen = numpy_generator(server.seed, server.round, "select").choice(server.clients, size=count, replace=False)
        return tuple(sorted(int(client) for client in chosen))

    def broadcast(self, server: Server, message: Message) -> Message:
        """Change what the server sends; the message already holds the shared tensors of its model."""
        return message

    def weigh(self, server: Server, replies: Message) -> Tensor:
        r"""Give each participant its share ``[K]`` of the merged model (exclusive): :math:`p_k = n_k / \sum_j n_j`."""
        sizes = server.sizes.to(torch.float64)
        return sizes / sizes.sum()

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        r"""Merge the replies (exclusive): :math:`\hat w = \sum_k p_k w_k` over the clients that sent an entry."""
        return {
            name: weighted_mean(tensor, shares, replies.masks.get(name), server.model[name])
            for name, tensor in replies.tensors.items()
            if name in server.model
        }

    def step(self, server: Server, merged: Tensors) -> tuple[Tensors, Tensors]:
        """Turn the merged model into the new one, and return it with the server's new memory (exclusive)."""
        return merged, server.memory

    def refine(self, server: Server, replies: Message, shares: Tensor, new: Tensors) -> tuple[Tensors, Tensors]:
        """Change the new global model last, for instance shrink its layers; return it and the server's new memory."""
        return new, server.memory

    def layer_metrics(self, server: Server) -> dict[str, dict[str, float]]:
        """Tell numbers of layers worth keeping: from the name of a metric to layers to values."""
        return {}

    # An exchange of its own, before a round: the server asks, clients answer, the server announces --------------------

    def exchanges_before(self, round: int, rounds: int) -> int:
        """Tell how many exchanges with clients come before a round, such as a saliency round."""
        return 0

    def exchanges_on_joining(self) -> int:
        """Tell how many exchanges come before a round in which new clients join."""
        return 0

    def asks(self, server: Server) -> Sequence[int]:
        """Choose the clients that are asked; all hear the announcement."""
        return range(server.clients)

    def survey(self, clients: Clients, model: Tensors, probe: Probe) -> Message:
        """Answer the server's question, at a client that has just received the current model."""
        return Message()

    def conclude(self, server: Server, replies: Message) -> tuple[Tensors, Tensors]:
        """Draw the server's conclusion: the model and the server's memory from now on."""
        return server.model, server.memory

    def announce(self, server: Server) -> Message:
        """Tell all clients what was concluded."""
        return Message()

    def adopt(self, clients: Clients, announcement: Message) -> Tensors:
        """Return the client's memory after the announcement."""
        return clients.memory


def equal_shares(server: Server) -> Tensor:
    """Give all participants the same share ``[K]``, for methods whose authors count clients, not samples."""
    count = len(server.participants)
    return torch.full((count,), 1 / count, dtype=torch.float64, device=server.sizes.device)


EXCLUSIVE_HOOKS: dict[str, str] = {
    "select": "chooses the participants",
    "samples_per_epoch": "fixes the samples of an epoch",
    "receive": "puts a client's model together from what others sent",
    "base_loss": "decides the local loss",
    "phases": "divides local training into phases",
    "adaptation": "adds a final adaptation",
    "weigh": "decides the shares of the clients",
    "merge": "decides how replies are merged",
    "step": "decides the server's step",
}


HOOKS_ON_WHAT_IS_SHARED = ("weigh", "merge", "step", "refine", "conclude", "second_models")


def defines(part: Part, hook: str) -> bool:
    """Tell whether a part has its own version of a hook."""
    return getattr(type(part), hook) is not getattr(Part, hook)


def objection(first: Part, second: Part) -> str | None:
    """Tell why two parts cannot stand in one method, if they cannot."""
    for what in _claims(first):
        if what in _claims(second):
            return f"each of them {what}, and only one can"
    for one, other in ((first, second), (second, first)):
        if not one.shares and any(defines(other, hook) for hook in HOOKS_ON_WHAT_IS_SHARED):
            return f"'{one.name}' shares nothing, and '{other.name}' works on what clients share"
        if not one.shares and other.only_on_shared:
            return f"'{one.name}' shares nothing, and all that '{other.name}' does concerns what clients share"
        if not one.averages and any(defines(other, hook) for hook in HOOKS_ON_WHAT_IS_SHARED):
            return f"under '{one.name}' no client goes on with the average of all, and '{other.name}' works on it"
    return first.objects_to(second) or second.objects_to(first)


def _claims(part: Part) -> tuple[str, ...]:
    return (*(what for hook, what in EXCLUSIVE_HOOKS.items() if defines(part, hook)), *part.claims)


def first_defining(parts: Sequence[Part], hook: str) -> Part:
    """Find the part that owns an exclusive hook; FedAvg's behaviour where none does."""
    return next((part for part in parts if defines(part, hook)), _FEDAVG)


_FEDAVG = Part()

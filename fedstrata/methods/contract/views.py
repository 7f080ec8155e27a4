"""What hooks see of a round, and what travels.

**Client hooks** see only what a client has: the broadcast, its own slice of the weights, its own memory, facts about
its own data. **Server hooks** see what the server has: its model and memory, what clients declared, and their uploads.
Between the two there is only a :class:`Message`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedstrata.layers import LayerMap
from fedstrata.optimisers import Optimiser
from fedstrata.rng import client_keys, key, normal, unrepeatable_normal
from fedstrata.stack import Rows, Stack, Tensors, concatenate, take


@dataclass(frozen=True)
class Outline:
    """What is known of an experiment before it runs; ``participants`` are those of the round with the fewest."""

    layers: LayerMap
    rounds: int
    optimiser: Optimiser
    clients: int
    participants: int


def _nothing() -> Tensor:
    """Stand for a tensor that no part needs."""
    return torch.empty(0)


View = TypeVar("View")


def altered(view: View, **fields: Any) -> View:
    """Copy a view with other values in some fields.

    Unlike ``dataclasses.replace`` it reads nothing that it copies: views are made many times in every step.
    """
    copy: View = object.__new__(type(view))
    copy.__dict__.update(view.__dict__)
    copy.__dict__.update(fields)
    return copy


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

    def plus(self, tensors: Mapping[str, Tensor]) -> Message:
        """Send further tensors, or others in the place of some."""
        return replace(self, tensors={**self.tensors, **tensors})

    def group(self, name: str) -> Stack:
        """Take the tensors that stand in a group."""
        return Stack(self.tensors).group(name)

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
class Declared:
    """What some clients told the server about their data, before the first round: all that their weights depend on."""

    sizes: Tensor
    label_counts: Tensor

    def rows(self, rows: Tensor) -> Declared:
        """Pick some clients."""
        return Declared(self.sizes[rows], self.label_counts[rows])


@dataclass(frozen=True)
class Clients:
    """What a client hook may see of the K clients that it serves at once.

    ``numbers`` are the ``ids`` as a tensor ``[K]`` on the device. ``epochs`` are the local epochs that the experiment
    asks for. ``shared`` are the names that travel. ``memory`` is what the part remembers. ``initial`` is the common
    initial model, without a client axis: everybody in a run knows it. ``secret`` says that nobody may be able to draw
    its noise again, as at a real site; in a simulation everybody can. ``everybody``, ``probing`` and ``drawing`` are
    for the engines: what all parts remember, how to ask a client's data, and where keys are kept that stay the same
    over a round.

    ``previous`` is each client's own model as its last local training left it, where a part needs it
    (:attr:`Needs.previous`), and the initial one before the first; ``trained`` tells who has trained before ``[K]``.
    """

    round: int
    rounds: int
    epochs: int
    layers: LayerMap
    ids: Sequence[int]
    seed: int
    sizes: Tensor
    label_counts: Tensor
    shared: frozenset[str]
    memory: Stack = field(default_factory=Stack)
    initial: Tensors = field(default_factory=dict)
    previous: Stack = field(default_factory=Stack)
    trained: Tensor = field(default_factory=_nothing)
    secret: bool = field(default=False, repr=False)
    everybody: Stack = field(default_factory=Stack, repr=False)
    probing: Callable[[Clients], Probe] | None = field(default=None, repr=False)
    drawing: Callable[[str], Tensor] | None = field(default=None, repr=False)
    numbers: Tensor = field(default_factory=_nothing, repr=False)

    def rows(self, rows: Rows, members: Sequence[int] | np.ndarray | None = None) -> Clients:
        """Narrow the view to some of the clients; ``members`` are the same rows, where they are known on the host."""
        if rows is None:
            return self
        drawing = self.drawing
        if members is None:
            members = rows.tolist() if isinstance(rows, Tensor) else range(len(self.ids))[rows]
        return altered(
            self,
            ids=self.ids_of(members),
            drawing=None if drawing is None else lambda purpose: drawing(purpose)[rows],
            numbers=self.numbers[rows] if len(self.numbers) else self.numbers,
            sizes=self.sizes[rows],
            label_counts=self.label_counts[rows],
            memory=take(self.memory, rows),
            everybody=take(self.everybody, rows),
            previous=take(self.previous, rows),
            trained=self.trained[rows] if len(self.trained) else self.trained,
        )

    def ids_of(self, members: Sequence[int] | np.ndarray | None) -> Sequence[int]:
        """Tell the numbers of those of the clients that stand in some rows (none: all)."""
        return self.ids if members is None else tuple(self.ids[row] for row in members)

    @property
    def probe(self) -> Probe:
        """What these clients can find out with their own data."""
        assert self.probing is not None
        return self.probing(altered(self, memory=self.everybody or self.memory))

    def keys(self, purpose: str) -> Tensor:
        """One key per client for this round's draws: ``[K, 2]``."""
        if self.drawing is not None:
            return self.drawing(purpose)
        return client_keys(self.seed, self.round, self.ids, purpose, self.sizes.device)

    def noise(self, purpose: str, shape: Sequence[int], stream: int = 0) -> Tensor:
        """Draw normal noise for what leaves these clients: ``[K, *shape]``, in double precision.

        At a real site it comes from the operating system and is another one at every call, so that no question of a
        server brings it back; in a simulation from the seed, for each ``stream`` of a purpose another one.
        """
        if self.secret:
            return unrepeatable_normal((len(self.ids), *shape), self.sizes.device)
        return normal(self.keys(f"{purpose}/"), shape, stream)


@dataclass(frozen=True)
class Server:
    """What a server hook may see: its own model and memory, and what the K participants declared about their data.

    ``initial`` is the common initial model, also of what clients keep to themselves.
    ``proxy`` is the server's own small labelled set, where a part needs one (:attr:`Needs.proxy`). ``testing`` says
    that what is sent will be tested, not trained. ``secret`` says that nobody may be able to draw its noise again, as
    at the server of real sites.
    """

    round: int
    rounds: int
    layers: LayerMap
    seed: int
    clients: int
    participants: Sequence[int]
    sizes: Tensor
    label_counts: Tensor
    model: Tensors
    memory: Stack = field(default_factory=Stack)
    initial: Tensors = field(default_factory=dict)
    proxy: Proxy | None = None
    testing: bool = False
    secret: bool = field(default=False, repr=False)

    def key(self, purpose: str) -> tuple[int, int]:
        """The key of this round's draws at the server."""
        return key(self.seed, self.round, "server", purpose)

    def noise(self, purpose: str, shape: Sequence[int], stream: int = 0) -> Tensor:
        """Draw normal noise for what leaves the server, in double precision; see :meth:`Clients.noise`."""
        device = self.sizes.device
        if self.secret:
            return unrepeatable_normal(shape, device)
        return normal(torch.tensor(self.key(f"{purpose}/"), device=device), shape, stream)


class Proxy(Protocol):
    """The server's own labelled samples."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def loss(self, parameters: Tensors, buffers: Tensors, step: int, rows: Tensor) -> tuple[Tensor, Tensors]:
        """Return the mean loss ``[K]`` of K models on some samples, open to autograd, and their buffers after the pass.

        The loss is the experiment's, with the class counts of these samples. ``rows`` numbers the samples. Norm layers
        use their statistics and update the running ones; a buffer that is not given is what it was at the beginning.
        ``step`` numbers the draws of dropout.
        """
        ...


ModelAndMemory = tuple[Tensors, Tensors]
"""What hooks return that change both: a model, and the memory of the part."""


@dataclass(frozen=True)
class Phase:
    """A stretch of local training.

    ``trains`` names the parameters that move (none: all), ``epochs`` or ``steps`` say for how long (none: as the
    experiment says). ``model`` is the group of the part's memory that holds a second whole model, which is trained
    instead of the one received. ``repeats`` takes several steps on each batch. ``continues`` goes on with the
    optimiser's state of the phase before. ``optimiser`` takes the place of the experiment's; the schedule changes its
    learning rate too. ``rate`` multiplies the learning rate. ``name`` lets hooks tell phases apart. ``before`` changes
    the model and the memory before the phase begins. ``stage`` names the first and the last round of the stage to which
    the phase belongs: the schedule runs over these alone (none: over all rounds).

    ``span`` does only a stretch of that work, such as its first half ``(0, 0.5)``: phases whose spans follow each
    other, and that continue, do together exactly what one phase would, on the same batches.
    """

    trains: Callable[[LayerMap], Iterable[str]] | None = None
    epochs: int | None = None
    steps: int | None = None
    model: str | None = None
    repeats: int = 1
    continues: bool = False
    optimiser: Optimiser | None = None
    rate: float = 1.0
    name: str = ""
    span: tuple[float, float] = (0.0, 1.0)
    before: Callable[[Clients, Tensors], ModelAndMemory] | None = None
    stage: tuple[int, int] | None = None


@dataclass(frozen=True)
class LocalStep:
    """One local step of K clients, as hooks see it.

    ``received`` are the weights with which the round began, before any perturbation. ``parameters`` are the model's;
    what a part learns beside them (:attr:`Needs.learns`) stands in its memory. ``features`` is the input of the head
    ``[K, B, ...]``, where a part needs it. ``number`` counts the steps of a phase, ``repeat`` those on one batch.
    ``number`` and ``learning_rate`` change from step to step or from round to round, and are tensors without axes, on
    the device (int64, float64): a step that was recorded once is repeated with other values in them.
    ``forward`` runs other parameters on the same batch, open to autograd. ``predict`` runs another whole model,
    buffers included, in evaluation mode and without gradients, and returns its outputs and features.
    """

    parameters: Tensors
    received: Tensors
    inputs: Tensor
    labels: Tensor
    outputs: Tensor
    learning_rate: Tensor
    forward: Callable[[Tensors], Tensor]
    predict: Callable[[Tensors], tuple[Tensor, Tensor]]
    features: Tensor = field(default_factory=_nothing)
    phase: Phase = Phase()
    number: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    repeat: int = 0


class Probe(Protocol):
    """What a client can find out about a model with its own data, beside training."""

    def gradients(
        self, model: Tensors, batch_size: int, all_samples: bool = False, balanced: bool = False, draw: int = 0
    ) -> Tensors:
        """Return the gradients of the mean loss on a minibatch, balanced over the client's classes if asked.

        The loss is the experiment's. With ``all_samples`` it is the mean over all samples of the client. Another
        ``draw`` takes another minibatch.
        """
        ...

    def fisher(
        self, model: Tensors, names: Sequence[str], batch_size: int, batches: int, kind: str, draw: int = 0
    ) -> Tensors:
        """Estimate the diagonal Fisher information of some parameters on minibatches, in evaluation mode.

        ``kind`` is ``sample`` (the mean of the squared gradients of single samples), ``sampled-label`` (the same with
        labels drawn from the model's own predictions), ``sampled-logit`` (that of the logit of such a label, not of the
        loss) or ``batch`` (the squared gradient of each batch's mean loss). The loss is the cross entropy, the negative
        log-likelihood, whatever the experiment trains with. Another ``draw`` takes other batches.
        """
        ...

    def features(self, model: Tensors) -> Tensor:
        """Return the mean features, the inputs of the head, of each class of the client: ``[K, classes, features]``.

        They are those of all training samples in evaluation mode; of a class that the client lacks they are zero.
        """
        ...

    def gradient_spread(self, model: Tensors, names: Sequence[str], batch_size: int, draw: int = 0) -> Tensors:
        """Measure how the gradients of single samples of a minibatch differ, in evaluation mode: ``[K]`` by parameter.

        It is the variance over the samples, summed over the entries. The loss is the experiment's.
        """
        ...

    def curvature(
        self, model: Tensors, blocks: Mapping[str, Sequence[str]], batch_size: int, probes: int, draw: int = 0
    ) -> Tensors:
        r"""Estimate traces of the Hessian of the loss on a minibatch, in training mode: ``[K, probes]`` for each block.

        A block names the parameters by which the loss is differentiated twice. Each number is :math:`z^\top H z` with
        random signs :math:`z` (Hutchinson), whose expectation is the trace of the block. The loss is the experiment's.
        """
        ...

    def representations(self, model: Tensors, layers: Sequence[str], samples: int, draw: int = 0) -> Tensors:
        """Compare samples by what layers make of them: centred Gram matrices ``[K, n, n]``, by layer, in float64.

        The samples are the same for all K models, which may be those of the clients or a single one: training samples
        of the clients in turn, as their owners see them, in evaluation mode.
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
        """Return accuracy and mean cross entropy, ``[K]`` each, on the client's training samples, or on those that it
        holds out (:attr:`Needs.held_out`).
        """
        ...


@dataclass(frozen=True)
class Stretch:
    """Local steps of one phase that moves what is shared: their number ``[K]``, that of the steps before which the
    optimiser still remembers ``[K]``, and the optimiser with its learning rate after the schedule.
    """

    steps: Tensor
    before: Tensor
    optimiser: Optimiser
    learning_rate: float


@dataclass(frozen=True)
class Training:
    """What local training did.

    The model received, its start after any perturbation, its end, the model after each phase, the gradients of the last
    step and the mean over all steps (if a part needs them), how many steps each client made ``[K]``, those of each
    phase that moved what is shared, and the learning rate. Steps of a second model do not count.
    """

    received: Tensors
    start: Tensors
    trained: Tensors
    gradients: Tensors
    mean_gradients: Tensors
    after_phase: tuple[Tensors, ...]
    steps: Tensor
    stretches: tuple[Stretch, ...]
    learning_rate: float

    def effective_steps(self, strength: float = 0.0) -> Tensor:
        """Tell how many steps' worth of gradients the optimisers made of all steps ``[K]``
        (:meth:`fedstrata.optimisers.Optimiser.effective_steps`), beside a proximal term of some strength.
        """
        effective = torch.zeros_like(self.steps, dtype=torch.float64)
        for one in self.stretches:
            effective += one.optimiser.effective_steps(one.steps, one.before, strength * one.learning_rate)
        return effective

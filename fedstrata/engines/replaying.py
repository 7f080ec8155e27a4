"""Doing again what was done before, without the Python that did it: steps of training are recorded once and replayed.

A step is a function of tensors that stay where they are: it reads its places, writes its places, and has no other
effect. The first steps of a kind run in Python, and what they do is written down, until two did the same with the same
numbers. Then there is a record: on a CPU the list of operations that PyTorch carried out, on a GPU a CUDA graph. From
then on the record is replayed over whatever stands in the places, which gives the same bits, because the same
operations run in the same order, but costs none of the time of hooks, ``vmap`` and autograd.

A record holds only what a step did on that one occasion, so whatever changes from step to step must be in a place:

- The number of the step and the learning rate are tensors.
- Keys of draws (:meth:`Clients.keys`) are tensors that every round fills anew.
- The round and the clients' numbers are Python objects, which hooks may look at. While a step is recorded they are
  stand-ins that note what was made of them: ``clients.round > 5`` makes the record one for rounds in which that is so.
  In other rounds the step is recorded afresh.
- What looks at values on the host (``.item()``, ``if`` over a tensor, ``torch.tensor([...])``) cannot be recorded. Then
  the step runs in Python every time, and a warning names the hook.
"""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from fedstrata.engines.recording import Recording
from fedstrata.engines.streams import side_stream
from fedstrata.engines.watching import Conditions, HostWatch, WatchedClients, bringing_once, noticing_waits
from fedstrata.errors import FedStrataWarning
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.views import Clients
from fedstrata.rng import client_keys
from fedstrata.stack import Stack, copy_, expanded_axes, narrow

_RECORDS = {"cpu": 256, "cuda": 64}
"""For how many kinds of steps, such as those of groups of clients and sizes of batches, there are records. A hundred
unequal clients have 84; on a CPU a record is a list of operations and takes little.
"""
_CHANCES = 4
"""How often a record may turn out to be one for other rounds before it is no longer made."""
_CHANGING = "what a hook makes of the round or of the clients' numbers changes all the time"


# Places ---------------------------------------------------------------------------------------------------------------


def hold(stack: Mapping[str, Tensor]) -> Stack:
    """Copy tensors into places of their own; what is the same for all clients, and expanded, stays so."""
    return Stack({name: narrow(tensor).clone().expand(tensor.shape) for name, tensor in stack.items()})


def fill_(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values into places that were made for such values."""
    given = {name: value if places[name].is_contiguous() else narrow(value) for name, value in values.items()}
    copy_({name: narrow(places[name]) for name in given}, given)


def shape_of(stack: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Tell all that two stacks must have in common for the same places to do for both."""
    return tuple((name, tensor.shape, tensor.dtype, expanded_axes(tensor)) for name, tensor in stack.items())


class KeyRing:
    """The keys that the hooks of some clients draw with in a round, each made once, in a place of its own."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._held: dict[str, Tensor] = {}
        self.recorded: Conditions | None = None

    def __call__(self, purpose: str) -> Tensor:
        """Return one key per client ``[K, 2]``."""
        if purpose not in self._held:
            if self.recorded is not None:
                self.recorded.refuse(f"draws for another purpose at each step, here '{purpose}'")
            self._held[purpose] = self._made(purpose)
        return self._held[purpose]

    def turn_(self, clients: Clients) -> None:
        """Fill the places with the keys of another round, or of other clients."""
        self._clients = clients
        for purpose, keys in self._held.items():
            keys.copy_(self._made(purpose))

    def _made(self, purpose: str) -> Tensor:
        clients = self._clients
        return client_keys(clients.seed, clients.round, clients.ids, purpose, clients.sizes.device)


bringing_once(cast(FunctionType, KeyRing._made))


# Records --------------------------------------------------------------------------------------------------------------


class Record(Protocol):
    """A step that was recorded; ``spoilt`` tells why it must not be replayed."""

    @property
    def spoilt(self) -> str | None:
        """Why it must not be replayed, in words."""
        ...

    def replay(self) -> None:
        """Do it again, on what stands in the places now."""
        ...


class Graph:
    """A CUDA graph; all graphs of a process share one pool of memory, and a stream, since one runs after the other."""

    spoilt = None
    _alive: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()

    def __init__(self, run: Callable[[], None], device: torch.device) -> None:
        gc.collect()
        pool = next((graph._graph.pool() for graph in Graph._alive), None)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what the step needs comes from the pool from now on
        self._graph: Any = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(device)
        stream = side_stream(before.device.index)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            self._graph.capture_begin(pool=pool)
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        before.wait_stream(stream)
        Graph._alive.add(self)

    def replay(self) -> None:
        """Launch all of it at once."""
        self._graph.replay()


@dataclass
class _Known:
    """What is known of steps of one kind, such as those of k clients with batches of b samples.

    ``tried`` is what was written down of one that ran in Python, and in which rounds another should do the same; once
    one did, the kind is ``settled``. ``tries`` counts those that were written down, and ``replayed`` tells whether one
    was replayed.
    """

    tried: tuple[Conditions, Recording] | None = None
    tries: int = 0
    settled: bool = False
    replayed: bool = False
    records: list[tuple[Conditions, Record]] = field(default_factory=list)


Step = Callable[[Clients], None]
"""A step of clients as hooks see them, which reads and writes places."""


class Replayer:
    """Runs steps on the same places: the first of each kind in Python, the later ones from records."""

    def __init__(self, device: torch.device, tells: bool = True) -> None:
        self.device = device
        self.tells = tells
        self.obstacle: str | None = None
        self.replayed = 0
        self._known: OrderedDict[Any, _Known] = OrderedDict()

    def run(
        self, kind: Any, clients: Clients, members: Sequence[int] | np.ndarray | None, step: Step, ring: KeyRing
    ) -> None:
        """Do a step of these members of some clients (none: all of them); all steps of a kind must use the same places.

        ``ring`` has the keys with which its hooks draw.
        """
        if self.obstacle is not None:
            step(clients)
            return
        known = self._known.get(kind)
        if known is None:
            self._observe(kind, clients, step)
            return
        self._known.move_to_end(kind)
        for conditions, record in known.records:
            if conditions.hold_for(clients, members):
                record.replay()
                self.replayed += 1
                known.replayed = True
                return
        conditions = Conditions()
        watched = WatchedClients.of(clients, conditions)
        ring.recorded = conditions
        made: Record | None
        try:
            if self.device.type == "cuda" and known.settled:
                made = self._captured(lambda: step(watched), conditions)
                if made is None:
                    step(clients)
                else:
                    made.replay()
            else:
                made = written = self._written(lambda: step(watched))
                if not known.settled:
                    made = self._compared(known, clients, members, conditions, written)
        finally:
            ring.recorded = None
        reason = conditions.refused or self.obstacle
        if reason is None and len(known.records) >= _CHANCES:
            reason = _CHANGING
        if reason is not None:
            self._give_up(reason)
        elif made is not None:
            known.records.append((conditions, made))

    @property
    def learning(self) -> bool:
        """Whether steps of a kind that it has met were not replayed yet, and may still be."""
        return self.obstacle is None and not all(known.replayed for known in self._known.values())

    def forget(self, kind: Any) -> None:
        """Let the records of a kind go, whose places are gone."""
        self._known.pop(kind, None)

    def _observe(self, kind: Any, clients: Clients, step: Step) -> None:
        """Do a step of a new kind in Python, and see whether it could be recorded."""
        watch, chance = HostWatch(), random.getstate()
        with watch:
            step(clients)
        if random.getstate() != chance:
            watch.note("draws from Python's own random numbers")
        if watch.found is not None:
            self._give_up(watch.found)
            return
        self._known[kind] = _Known()
        if len(self._known) > _RECORDS.get(self.device.type, 64):
            self._known.popitem(last=False)

    def _written(self, run: Callable[[], None]) -> Recording:
        """Do a step in Python, and write down what it does."""
        watch = HostWatch()
        with noticing_waits(watch) if self.device.type == "cuda" else nullcontext():
            written = Recording(run)
        self.obstacle = written.spoilt or watch.found
        return written

    def _compared(
        self,
        known: _Known,
        clients: Clients,
        members: Sequence[int] | np.ndarray | None,
        conditions: Conditions,
        written: Recording,
    ) -> Record | None:
        """Take what was written down for a record once two steps that should do the same did, with the same numbers."""
        before, known.tried = known.tried, (conditions, written)
        known.tries += 1
        if before is None or not before[0].hold_for(clients, members):
            if known.tries > _CHANCES:
                self.obstacle = _CHANGING
            return None
        if not before[1].is_like(written):
            self.obstacle = "two steps of the same kind did different things, so that something in Python decides"
        known.tried, known.settled = None, True
        return None if self.device.type == "cuda" else written

    def _captured(self, run: Callable[[], None], conditions: Conditions) -> Graph | None:
        """Capture a step, without doing it."""
        try:
            return Graph(run, self.device)
        except RuntimeError as error:
            conditions.refuse(f"cannot be captured ({str(error).splitlines()[0][:120]})")
            return None

    def _give_up(self, reason: str) -> None:
        """Say once that steps run in Python from now on, and why."""
        self.obstacle = reason
        self._known.clear()
        if not self.tells:
            return
        warnings.warn(
            f"Training steps are not recorded and replayed, and take longer: {reason}. The numbers are the same.",
            FedStrataWarning,
            stacklevel=2,
        )


class ReplayedFunction:
    """Calls of functions of tensors that do nothing but return others, recorded and replayed.

    What is given is copied into places first; so much that the copy would take more than ``most`` bytes runs in Python.
    What stands against it is not told: where a model does, its training steps tell it.
    """

    def __init__(self, device: torch.device, most: int = 2**30) -> None:
        self.replayer = Replayer(device, tells=False)
        self.most = most
        self._places: OrderedDict[Any, tuple[Stack, Stack]] = OrderedDict()

    def __call__(self, function: Callable[[Stack], Mapping[str, Tensor]], given: Stack) -> Mapping[str, Tensor]:
        """Compute the function of what is given; all functions that one of these gets must be the same."""
        if sum(narrow(tensor).nbytes for tensor in given.values()) > self.most or self.replayer.obstacle is not None:
            return function(given)
        kind = shape_of(given)
        if kind not in self._places:
            self._places[kind] = hold(given), Stack()
            if len(self._places) > _FUNCTIONS:
                self.replayer.forget(self._places.popitem(last=False)[0])
        self._places.move_to_end(kind)
        places, results = self._places[kind]
        fill_(places, given)

        def run(_: Clients) -> None:
            for name, tensor in function(places).items():
                if name in results:
                    results[name].copy_(tensor)
                else:
                    results[name] = tensor.clone()

        self.replayer.run(kind, _NOBODY, None, run, KeyRing(_NOBODY))
        return {name: tensor.clone() for name, tensor in results.items()}


_FUNCTIONS = 4
"""For how many kinds of arguments a function has places."""
_NOBODY = Clients(0, 0, 0, LayerMap(()), (), 0, torch.empty(0), torch.empty(0), frozenset())

"""The server's side of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedstrata.engines.setting import Setting
from fedstrata.methods.contract.composition import PartExchange
from fedstrata.methods.contract.views import Declared, Message, Proxy, Server
from fedstrata.stack import Stack, Tensors, clone
from fedstrata.transfer import numbers_on


@dataclass(frozen=True)
class ServerState:
    """What the server keeps between rounds: the shared part of the model, and the method's memory."""

    model: Tensors = field(default_factory=dict)
    memory: Stack = field(default_factory=Stack)


class _Told:
    """What the clients of a round declared, picked once for all the hooks that see it."""

    def __init__(self, declared: Declared) -> None:
        self._everybody = declared
        self._last: tuple[Sequence[int], Declared] = (range(len(declared.sizes)), declared)

    def by(self, participants: Sequence[int]) -> Declared:
        """Pick some clients; of all of them there is no copy."""
        if participants == range(len(self._everybody.sizes)):
            return self._everybody
        if self._last[0] != participants:
            rows = numbers_on(participants, self._everybody.sizes.device)
            self._last = participants, self._everybody.rows(rows)
        return self._last[1]


@dataclass(frozen=True)
class ServerSide:
    """What the server does; all it knows of clients is what they declared and sent.

    What they declared lies on the device.
    """

    setting: Setting
    declared: Declared
    proxy: Proxy | None = None
    told: _Told = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        device = self.setting.device
        declared = Declared(self.declared.sizes.to(device), self.declared.label_counts.to(device))
        object.__setattr__(self, "told", _Told(declared))

    def first_state(self) -> ServerState:
        """Prepare the server before the first round."""
        initial, personal = self.setting.initial, self.setting.personal
        model = clone({name: tensor for name, tensor in initial.items() if name not in personal})
        view = self.view(ServerState(model), range(self.setting.clients), 0)
        return ServerState(model, clone(self.setting.method.server_memory(view)))

    def select(self, participation: float, round: int) -> tuple[int, ...]:
        """Choose a round's participants among the clients that are there, at least one."""
        view = self._present(ServerState(), round)
        return self.setting.method.select(view, max(1, int(participation * view.clients + 0.5)))

    def _present(self, state: ServerState, round: int) -> Server:
        """See only the clients that are there in a round, as if there were no others."""
        present = self.setting.present(round)
        return replace(self.view(state, present, round), clients=len(present))

    def broadcast(self, state: ServerState, participants: Sequence[int], round: int, testing: bool = False) -> Message:
        """Build what the server sends: by default the shared tensors, the same for everybody."""
        message = Message({name: tensor.unsqueeze(0) for name, tensor in state.model.items()})
        view = replace(self.view(state, participants, round), testing=testing)
        return self.setting.method.broadcast(view, message)

    def tested(self, state: ServerState, round: int) -> Tensors:
        """Return the shared part of the model that clients are tested with after a round, where it is one for all.

        What each client gets in a version of its own, or only in part, is what the server itself goes on with.
        """
        sent = self.broadcast(state, range(min(2, self.setting.clients)), round + 1, testing=True)
        one = {name: tensor[0] for name, tensor in sent.without(sent.masks).tensors.items() if len(tensor) == 1}
        return {name: one.get(name, tensor) for name, tensor in state.model.items()}

    def masks_known(self, state: ServerState, participants: Sequence[int], round: int, upload: bool) -> Tensors:
        """Return the masks that both sides hold before the broadcast, or before the replies."""
        return self.setting.method.masks_known(self.view(state, participants, round), upload)

    def weights(self, participants: Sequence[int]) -> Tensor:
        """Give each participant its weight in the merged model ``[K]``, from what it declared."""
        return self.setting.method.weigh(self.told.by(_listed(participants)))

    def conclude(
        self, state: ServerState, exchange: PartExchange, replies: Message, round: int
    ) -> tuple[ServerState, Message]:
        """Conclude a survey of some clients: the next state, and the announcement to everybody."""
        asked = self.asked(state, exchange, round)
        model, memory = exchange.conclude(self.view(state, asked, round), replies)
        state = ServerState({**state.model, **model}, memory)
        return state, exchange.announce(self.view(state, range(self.setting.clients), round))

    def asked(self, state: ServerState, exchange: PartExchange, round: int) -> tuple[int, ...]:
        """Choose the clients that a survey asks, in their order."""
        return tuple(sorted(exchange.asks(self._present(state, round))))

    def aggregate(self, state: ServerState, participants: Sequence[int], replies: Message, round: int) -> ServerState:
        """Weigh, merge and advance: from all replies, in the order of the participants, to the next state."""
        new, memory = self.setting.method.aggregate(self.view(state, participants, round), replies)
        return ServerState({**state.model, **new}, memory)

    def advance(
        self,
        state: ServerState,
        participants: Sequence[int],
        merged: Tensors,
        round: int,
        replies: Message | None = None,
    ) -> ServerState:
        """Go from the merged model to the next state; the replies are needed where the method looks at single ones."""
        view = self.view(state, participants, round)
        new, memory = self.setting.method.advance(view, merged, replies or Message())
        return ServerState({**state.model, **new}, memory)

    def view(self, state: ServerState, participants: Sequence[int], round: int) -> Server:
        """Gather what hooks may see at the server."""
        participants = _listed(participants)
        declared = self.told.by(participants)
        return Server(
            round=round,
            rounds=self.setting.rounds,
            layers=self.setting.layers,
            seed=self.setting.seed,
            clients=self.setting.clients,
            participants=participants,
            sizes=declared.sizes,
            label_counts=declared.label_counts,
            model=state.model,
            memory=state.memory,
            initial=self.setting.initial,
            proxy=self.proxy,
            secret=self.setting.secret,
        )


def _listed(clients: Sequence[int]) -> Sequence[int]:
    """Keep clients as something that cannot change: a range of a million stays a range."""
    return clients if isinstance(clients, range) else tuple(clients)

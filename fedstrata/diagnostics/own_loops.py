"""Diagnostics in other people's training loops: models go in as state dicts, numbers come out as plain rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.diagnostics.choosing import choose, lacking
from fedstrata.diagnostics.contract import Diagnostic, Measured, Need, Seen
from fedstrata.diagnostics.inertia import layer_changes
from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.views import Message, Probe
from fedstrata.stack import Stack, Tensors, clone, repeat

Row = dict[str, Any]
"""``round``, ``metric``, ``layer``, ``client``, ``other`` and ``value``; what a number does not belong to is none."""


class Watch:
    """Looks on while somebody else trains, round by round.

    ``model`` is the network, whose weights are those before the first round, or its :class:`~fedstrata.LayerMap`;
    a network needs the ``input_shape`` of one sample. ``rounds`` is how many there will be, where that is known: some
    diagnostics measure in the last one. As in every run, each layer's ``update`` and, from the ``reference_round`` on,
    its ``cosine`` to that round are measured too.

    >>> network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> watch = Watch(network, "inertia", input_shape=(4,), reference_round=1)
    >>> moved = {name: 2 * tensor for name, tensor in network.state_dict().items()}
    >>> rows = watch.round(after=moved)
    >>> [(row["metric"], row["layer"], round(row["value"], 6)) for row in rows if row["layer"] == "0"]
    [('update', '0', 1.0), ('cosine', '0', 1.0), ('inertia.step', '0', 1.0)]
    """

    def __init__(
        self,
        model: nn.Module | LayerMap,
        diagnose: str = "inertia",
        *,
        input_shape: tuple[int, ...] | None = None,
        rounds: int | None = None,
        reference_round: int = 2,
        probe: Probe | None = None,
    ) -> None:
        if isinstance(model, nn.Module) and input_shape is None:
            raise FedStrataError(
                "The layers of a network are found by running it once: give the input_shape of one sample, such as "
                "input_shape=(3, 32, 32)."
            )
        self.layers = LayerMap.read(model, input_shape or ()) if isinstance(model, nn.Module) else model
        self.rounds = rounds
        self.reference_round = reference_round
        self.probe = probe
        missing = {} if probe else {Need.DATA: f"it looks at {Need.DATA.value}, which a probe=... would have to offer"}
        self.diagnostics: tuple[Diagnostic, ...] = choose(diagnose, lacking(missing)).diagnostics
        self.done = 0
        """How many rounds have been looked at."""
        self._memory: dict[str, Stack] = {one.name: Stack() for one in self.diagnostics}
        self._last: Tensors = clone(_tensors(model)) if isinstance(model, nn.Module) else {}
        self._reference: Tensors = {}

    def round(
        self,
        *,
        after: nn.Module | Mapping[str, Tensor],
        before: nn.Module | Mapping[str, Tensor] | None = None,
        clients: Sequence[nn.Module | Mapping[str, Tensor]] = (),
        sizes: Sequence[int] | None = None,
        participants: Sequence[int] | None = None,
        label_counts: Tensor | None = None,
        tested: Mapping[int, float] | None = None,
    ) -> list[Row]:
        """Look at a round: the server's model ``after`` it, and the ``clients``' models after their training.

        ``before`` is what the server sent, by default what it had after the round before. ``sizes`` are the clients'
        numbers of samples, by default equal; ``participants`` their numbers, by default 0, 1, 2, ...; ``tested`` are
        the accuracies of clients that were tested, by their numbers, which ``people`` looks at.
        """
        self.done += 1
        new, old = _tensors(after), self._last if before is None else _tensors(before)
        if not old:
            raise FedStrataError("Say with which model the first round began: before=....")
        seen = self._seen(old, new, [_tensors(client) for client in clients], sizes, participants, label_counts)
        seen = replace(seen, tested=tested or {})
        if self.done == self.reference_round:
            self._reference = clone(new)
        rows = list(self._always(seen))
        for one in self.diagnostics:
            self._refuse_blind(one, seen)
            shown = seen.only(one.needs)
            self._memory[one.name] = clone(one.update(shown, self._memory[one.name]))
            if one.due(seen.round, seen.rounds):
                measured = one.compute(shown, self._memory[one.name])
                one.refuse_unexplained(measured)
                rows += rows_of(one, measured, seen.round, seen.participants)
        self._last = clone(new)
        return rows

    def _seen(
        self,
        before: Tensors,
        after: Tensors,
        clients: Sequence[Tensors],
        sizes: Sequence[int] | None,
        participants: Sequence[int] | None,
        label_counts: Tensor | None,
    ) -> Seen:
        numbers = range(len(clients)) if participants is None else participants
        device = next(iter(after.values())).device
        trained = {name: torch.stack([client[name] for client in clients]) for name in (clients[0] if clients else ())}
        received = repeat({name: before[name] for name in trained if name in before}, len(clients))
        if (sizes is not None and len(sizes) != len(clients)) or len(numbers) != len(clients):
            raise FedStrataError(f"There are {len(clients)} clients; give as many sizes and participants.")
        return Seen(
            round=self.done,
            rounds=self.rounds or 0,
            layers=self.layers,
            before=before,
            after=after,
            travelled=frozenset(after),
            participants=numbers,
            sizes=torch.tensor(list(sizes) if sizes is not None else [1] * len(clients), device=device),
            label_counts=torch.zeros(len(clients), 0, device=device) if label_counts is None else label_counts,
            uploads=Message({name: tensor for name, tensor in trained.items() if name in after}),
            received=received,
            started=received,
            trained=trained,
            probe=self.probe,
        )

    def _always(self, seen: Seen) -> Iterator[Row]:
        for metric, layers in layer_changes(seen.layers, seen.before, seen.after, self._reference).items():
            for layer, value in layers.items():
                yield _row(seen.round, metric, value, layer=layer)

    def _refuse_blind(self, one: Diagnostic, seen: Seen) -> None:
        if one.needs & {Need.UPLOADS, Need.MODELS} and not seen.trained:
            raise FedStrataError(f"The diagnostic '{one.name}' looks at the clients' models; give clients=[...].")


def rows_of(one: Diagnostic, measured: Measured, round: int, participants: Sequence[int]) -> Iterator[Row]:
    """Write what was measured as plain rows, for a table of pandas or a file; NaN is left out."""
    for metric, number in measured.of_round.items():
        yield from _defined(_row(round, metric, float(number)))
    for metric, layers in measured.layers.items():
        for layer, number in layers.items():
            yield from _defined(_row(round, metric, float(number), layer=layer))
    for metric, values in measured.clients.items():
        for client, value in zip(participants, values.tolist(), strict=True):
            yield from _defined(_row(round, metric, value, client=client))
    for metric, in_layers in measured.clients_in_layers.items():
        for layer, table in in_layers.items():
            others: Sequence[int | None] = [None] if table.dim() == 1 else list(range(table.shape[1]))
            if one.quantities[metric].pairs:
                others = list(participants)
            for client, values in zip(participants, table.reshape(len(participants), -1).tolist(), strict=True):
                for other, value in zip(others, values, strict=True):
                    yield from _defined(_row(round, metric, value, layer or None, client, other))
    for metric, of_nobody in measured.in_layers.items():
        for layer, several in of_nobody.items():
            for other, value in enumerate(several.tolist()):
                yield from _defined(_row(round, metric, value, layer or None, other=other))


def _row(
    round: int, metric: str, value: float, layer: str | None = None, client: int | None = None, other: int | None = None
) -> Row:
    return {"round": round, "metric": metric, "layer": layer, "client": client, "other": other, "value": value}


def _defined(row: Row) -> Iterator[Row]:
    if row["value"] == row["value"]:
        yield row


def _tensors(model: nn.Module | Mapping[str, Tensor]) -> Tensors:
    """Take the tensors of a model as they are now, cut off from autograd."""
    state = model.state_dict() if isinstance(model, nn.Module) else model
    return {name: tensor.detach() for name, tensor in state.items()}

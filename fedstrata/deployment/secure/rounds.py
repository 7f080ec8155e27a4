"""Rounds in which the server sees only the sum of the sites' uploads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedstrata.deployment.checks import RefusedReply, check_weights, odd_ones_out
from fedstrata.deployment.declarations import with_declarations
from fedstrata.deployment.facts import cost_from_facts, number_in, read_scores
from fedstrata.deployment.protocol import Reply, Request
from fedstrata.deployment.secure.server import Asked, Gathered, SecureAggregation
from fedstrata.deployment.secure.sums import Entries, count_numbers, ranges_of, read_entries, read_sum
from fedstrata.engines.collecting import RunningMean
from fedstrata.engines.engine import RoundReport
from fedstrata.engines.evaluation import Scores
from fedstrata.engines.server import ServerSide, ServerState
from fedstrata.errors import FedStrataError
from fedstrata.flops import Cost
from fedstrata.methods.contract.views import Message
from fedstrata.stack import Tensors
from fedstrata.wire import bytes_sent

_TOLD = ("loss", "flops", "sparse_flops", "scores", "entries")
"""What is used of what sites tell after training, and kept until the round is over."""


@dataclass
class SecureRounds:
    """Runs rounds with secure aggregation: the sites train, and then their uploads are added up under masks.

    ``refused`` counts the sums in a row that were not used.
    """

    aggregation: SecureAggregation
    refused: int = 0

    def run(
        self,
        side: ServerSide,
        state: ServerState,
        round: int,
        asked: Mapping[int, Request],
        evaluate: bool,
        sent: frozenset[str],
    ) -> tuple[ServerState, RoundReport]:
        """Run one round; one whose uploads were collected before the server was stopped is only finished."""
        aggregation = self.aggregation
        up, down = aggregation.bytes_up, aggregation.bytes_down
        masks = side.masks_known(state, list(asked)[:1], round, upload=True)
        gathered = aggregation.saved(round)
        if gathered is None:
            gathered = aggregation.gather(self._train(side, state, round, asked, masks, evaluate))
        opened = aggregation.open(gathered)
        side = with_declarations(side, aggregation.federation.declarations)
        after = self._advanced(side, state, opened, masks)
        said = {site: opened.asked.facts[site] for site in opened.present}
        scores = [_scores(side, site, facts, evaluate) for site, facts in said.items()]
        return after, RoundReport(
            participants=tuple(opened.present),
            sent=sent,
            loss=torch.tensor([number_in(facts, "loss") for facts in said.values()], dtype=torch.float64),
            cost=Cost.join([cost_from_facts(facts) for facts in said.values()]),
            up=aggregation.bytes_up - up,
            down=aggregation.bytes_down - down + bytes_sent(len(request.payload) for request in asked.values()),
            before=Scores.join(scores) if evaluate else None,
        )

    def _train(
        self,
        side: ServerSide,
        state: ServerState,
        round: int,
        asked: Mapping[int, Request],
        masks: Tensors,
        evaluate: bool,
    ) -> Asked:
        """Let sites train, and prepare to add up what those learned who will send the same entries as most."""
        federation = self.aggregation.federation

        def read(site: int, reply: Reply) -> tuple[Entries, Mapping[str, Any]]:
            number_in(reply.facts, "loss")
            cost_from_facts(reply.facts)
            _scores(side, site, reply.facts, evaluate)
            told = {name: reply.facts[name] for name in _TOLD if name in reply.facts}
            return read_entries(reply.facts.get("entries"), state.model, masks), told

        answers = federation.ask(asked, read)
        for site, reason in odd_ones_out({site: entries for site, (entries, _) in answers.items()}).items():
            federation.refuse(site, reason)
            del answers[site]
        federation.require(asked, len(answers))
        side = with_declarations(side, federation.declarations)
        entries, _ = next(iter(answers.values()))
        sent = {entry.name: state.model[entry.name] for entry in entries}
        return Asked(
            round,
            {site: facts for site, (_, facts) in answers.items()},
            dict(zip(answers, side.weights(list(answers)).tolist(), strict=True)),
            ranges_of(sent, federation.rules.secure_clip, side.setting.layers.buffer_names),
            count_numbers(entries, masks),
        )

    def _advanced(self, side: ServerSide, state: ServerState, opened: Gathered, masks: Tensors) -> ServerState:
        """Go on from the mean of the uploads, or where that cannot be right from where the round began."""
        federation, round = self.aggregation.federation, opened.asked.round
        try:
            merged = self._merged(side, state, opened, masks)
        except RefusedReply as refusal:
            self.refused += 1
            text = (
                f"The sum of the uploads of round {round} is refused: {refusal}. Under secure aggregation nobody can "
                "tell whose fault that is"
            )
            if self.refused >= federation.rules.max_refusals:
                raise FedStrataError(
                    f"{text}. It was so {self.refused} times in a row; the rounds so far are saved."
                ) from None
            federation.log(f"{text}; the model stays as it was")
            return state
        self.refused = 0
        return side.advance(state, opened.present, merged, round)

    def _merged(self, side: ServerSide, state: ServerState, opened: Gathered, masks: Tensors) -> Tensors:
        """Read the mean out of the sum, and check it as a reply is checked elsewhere."""
        federation, asked = self.aggregation.federation, opened.asked
        entries = read_entries(asked.facts[opened.present[0]].get("entries"), state.model, masks)
        scale = self.aggregation.scale(asked)
        mean, clipped = read_sum(opened.total, entries, masks, scale, len(opened.present), opened.weight)
        if clipped:
            federation.log(f"round {asked.round}: {clipped} entries were clipped; if that goes on, raise secure_clip")
        device = side.setting.device
        running = RunningMean()
        running.add(
            Message(
                {name: tensor.to(device) for name, tensor in mean.items()},
                {entry.name: masks[entry.name] for entry in entries if entry.mask is not None},
            ),
            torch.ones((), dtype=torch.float64, device=device),
        )
        merged = running.mean(state.model)
        check_weights(Message({name: t[None] for name, t in merged.items()}), state.model, federation.rules.norm_limit)
        return merged


def _scores(side: ServerSide, site: int, facts: Mapping[str, Any], evaluate: bool) -> Scores:
    return read_scores(side, site, facts.get("scores") if evaluate else {})

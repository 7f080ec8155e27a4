"""Which parts can stand together in one method, and who decides what only one can."""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.methods.contract.declarations import UNDECLARED, Decision, Matter, Touches
from fedstrata.methods.contract.part import Part

EXCLUSIVE_HOOKS: dict[str, Decision] = {
    "select": Decision.PARTICIPANTS,
    "receive": Decision.RECEIVED,
    "phases": Decision.PHASES,
    "adaptation": Decision.ADAPTATION,
    "weigh": Decision.SHARES,
    "merge": Decision.MERGING,
    "server_step": Decision.SERVER_STEP,
}
"""The hooks of which a method has one, and what that one decides."""

HOOKS_ON_WHAT_IS_SHARED = ("admit", "weigh", "merge", "server_step", "refine", "exchanges")


def defines(part: Part, *hooks: str) -> bool:
    """Tell whether a part has its own version of any of some hooks."""
    return any(getattr(type(part), hook) is not getattr(Part, hook) for hook in hooks)


def touched_by(part: Part) -> Touches:
    """Tell what a part touches: what it says, and what follows from its hooks and needs."""
    needs, said = part.needs, part.touches or Touches(relies_on=tuple(UNDECLARED))
    looks = needs.replies or defines(part, "admit", "merge")
    decides = {
        **{decision: defines(part, hook) for hook, decision in EXCLUSIVE_HOOKS.items()},
        Decision.EPOCH: needs.samples_per_epoch is not None,
    }
    on_shared = defines(part, *HOOKS_ON_WHAT_IS_SHARED)
    relies_on = {
        Matter.SHARING: on_shared,
        Matter.AVERAGE: on_shared and Matter.AVERAGE not in said.takes_away,
        Matter.SHARED_WEIGHTS: on_shared and Matter.SHARED_WEIGHTS not in said.takes_away,
        Matter.WEIGHTS: bool(needs.learns),
    }
    takes_away = {
        Matter.PLAIN_MESSAGES: defines(part, "upload", "broadcast"),
        Matter.ALL_LAYERS: Decision.TRAVEL in said.decides,
        Matter.ALL_SENT: Decision.TRAVEL in said.decides and defines(part, "upload"),
        Matter.WHOLE_MODEL: defines(part, "keeps", "receive", "effective"),
        Matter.ONE_MODEL: defines(part, "deployed"),
        Matter.ONLY_UPDATES: looks or defines(part, "exchanges"),
        Matter.SUMS: needs.replies or defines(part, "admit"),
        Matter.MEAN: defines(part, "admit", "merge"),
        Matter.NO_SINGLE_REPLY: needs.replies,
    }
    return said.also(
        tuple(decision for decision, so in decides.items() if so),
        tuple(matter for matter, so in relies_on.items() if so),
        tuple(matter for matter, so in takes_away.items() if so),
    )


def objection(first: Part, second: Part) -> str | None:
    """Tell why two parts cannot stand in one method, if they cannot."""
    touches = {first: touched_by(first), second: touched_by(second)}
    for decision in touches[first].decides:
        if decision in touches[second].decides:
            return f"each of them {decision.value}, and only one can"
    for relying, other in ((first, second), (second, first)):
        for matter in Matter:
            if matter in touches[relying].relies_on and matter in touches[other].takes_away:
                if relying.touches is None:
                    return (
                        f"'{other.name}' {matter.taken_away}, and '{relying.name}' does not say whether it "
                        f"{matter.relied_on} (declare its 'touches')"
                    )
                return f"'{other.name}' {matter.taken_away}, and '{relying.name}' {matter.relied_on}"
    return None


def first_defining(parts: Sequence[Part], hook: str) -> Part:
    """Find the part that owns an exclusive hook; FedAvg's behaviour where none does."""
    return next((part for part in parts if defines(part, hook)), _FEDAVG)


_FEDAVG = Part()

"""Which parts can stand together in one method, and who decides what only one can."""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.methods.contract.part import Part

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


HOOKS_ON_WHAT_IS_SHARED = ("weigh", "merge", "adjust", "step", "examine", "refine", "conclude", "second_models")


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

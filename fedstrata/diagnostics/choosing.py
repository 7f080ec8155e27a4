"""Which diagnostics a run computes: named in a text, or all that can be computed there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedstrata.diagnostics.contract import Diagnostic, Need, diagnostics
from fedstrata.errors import FedStrataError
from fedstrata.spec import parse, split_outside

ALL = "all"
"""The word for every diagnostic that can be computed."""

Objection = Callable[[Diagnostic], str | None]
"""Says why a diagnostic cannot be computed somewhere, if so."""


@dataclass(frozen=True)
class Chosen:
    """The diagnostics of a run, and those that are left out, with the reasons."""

    diagnostics: tuple[Diagnostic, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def word(self) -> str | None:
        """Say which ones are left out and why, if any are."""
        told = "; ".join(f"{', '.join(names)}, because {reason}" for reason, names in by_reason(self.left_out).items())
        return f"These diagnostics are left out: {told}." if told else None


def by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    """Put together what is left out for the same reason.

    >>> by_reason({"norms": "it is late", "drift": "it is dark", "inertia": "it is late"})
    {'it is late': ['norms', 'inertia'], 'it is dark': ['drift']}
    """
    return {reason: [name for name in left_out if left_out[name] == reason] for reason in left_out.values()}


def choose(
    text: str | None,
    objection: Objection = lambda diagnostic: None,
    misfit: Objection = lambda diagnostic: None,
) -> Chosen:
    """Read which diagnostics are asked for: ``inertia+norms``, ``inertia, norms(every=5)``, ``all``.

    One that is named and cannot be computed is refused; ``all`` leaves it out, with a reason. One that has nothing to
    measure with a method or a model (``misfit``) is left out, named or not: others are compared under the same text.

    >>> [str(one) for one in choose("inertia, norms(every=5)").diagnostics]
    ['inertia', 'norms(every=5)']
    """
    if text is None:
        return Chosen()
    calls = [call for piece in split_outside(text, ",") for call in parse(piece, diagnostics.kind)]
    named: dict[str, Diagnostic] = {}
    for call in calls:
        if call.name == ALL:
            if call.positional or call.keywords:
                raise FedStrataError(f"'{ALL}' takes no parameters; name the diagnostics that should have some.")
            continue
        if call.name in named:
            raise FedStrataError(f"The diagnostic '{call.name}' is asked for twice; give it once.")
        named[call.name] = diagnostics.build(call)
        reason = objection(named[call.name])
        if reason is not None:
            raise FedStrataError(
                f"The diagnostic '{call.name}' cannot be computed here: {reason}; leave it out of 'diagnose'."
            )
    left_out = {name: reason for name, one in named.items() if (reason := misfit(one)) is not None}
    if any(call.name == ALL for call in calls):
        for name in diagnostics.names():
            one = named.get(name) or diagnostics.get(name)()
            reason = objection(one) or misfit(one)
            if reason is None:
                named[name] = one
            else:
                left_out[name] = reason
    return Chosen(tuple(one for name, one in named.items() if name not in left_out), left_out)


def lacking(missing: Mapping[Need, str]) -> Objection:
    """Object to diagnostics that need what cannot be seen; ``missing`` says why."""
    return lambda one: next((missing[need] for need in Need if need in one.needs and need in missing), None)

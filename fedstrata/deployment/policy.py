"""A site's policy, in a file of its own: what it says against a run, before anybody starts and while the run goes on.

The site refuses by :func:`objections` when a server greets it, and whoever plans a run asks the same beforehand
(``fedstrata policy check``). What only shows while a run goes on is in :mod:`fedstrata.deployment.allowance`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.deployment.budget import Terms
from fedstrata.deployment.rules import Rules, SiteRules
from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.experiment import Experiment
from fedstrata.functional import gaussian_epsilon
from fedstrata.methods import Method, methods
from fedstrata.models import models
from fedstrata.scores import metrics
from fedstrata.spec import Registry, parse, split_outside

_REGISTRIES: dict[str, Registry[Any]] = {"method": methods, "model": models, "metric": metrics}
_SLACK = 1e-6
"""Two ways to compute one epsilon may differ by this part of it."""


@dataclass(frozen=True)
class Policy:
    """A site's rules as its file says them, and the hash of that file."""

    rules: SiteRules
    source: Path
    sha256: str

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy; a key that does not exist is answered with the nearest one."""
        content = files.read_bytes(path)
        try:
            values = tomllib.loads(content.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FedStrataError(f"'{path}' is not a TOML file: {error}.") from None
        known = [field.name for field in dataclasses.fields(SiteRules)]
        for key in values:
            if key not in known:
                raise unknown_name(f"key in the policy '{path}' called", key, known)
        try:
            return cls(SiteRules(**values), path, sha256(content).hexdigest())
        except FedStrataError as error:
            raise FedStrataError(f"The policy '{path}' cannot be used: {error}") from None

    def tightened(self, flags: Mapping[str, Any]) -> SiteRules:
        """Let the flags of a command ask for more than the policy does; for less they cannot."""
        for key, value in flags.items():
            known = getattr(self.rules, key)
            looser = known is not None and (value < known if key == "min_samples" else value > known)
            if looser and not isinstance(known, bool):
                raise FedStrataError(
                    f"--{key.replace('_', '-')} {value:g} would loosen the policy '{self.source}', which says "
                    f"{known:g}; leave it out, or change the policy."
                )
        return dataclasses.replace(self.rules, **flags)


def read_rules(path: Path | None, **flags: Any) -> tuple[SiteRules, str | None]:
    """Read a site's rules from its policy, where it has one, and from the flags that are not none.

    The hash of the policy is returned too.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    if path is None:
        return SiteRules(**given), None
    policy = Policy.read(path)
    return policy.tightened(given), policy.sha256


def objections(policy: SiteRules, experiment: Experiment, method: Method, rules: Rules, sites: int | None) -> list[str]:
    """List all that a site's policy has against a run of an experiment under a server's rules, among some sites.

    Where the number of ``sites`` is not known yet, what depends on it is not looked at (:func:`unknown`).
    """
    return [
        *_not_allowed("method", str(method), policy.methods),
        *_not_allowed("model", experiment.model, policy.models),
        *_not_allowed("metric", experiment.metrics or "", policy.metrics),
        *_too_much(policy, experiment),
        *_too_open(policy, method, rules),
        *([] if sites is None else _too_few(policy, experiment, rules, sites)),
        *_too_little_privacy(policy, experiment, method),
    ]


def refuse_by_policy(policy: SiteRules, experiment: Experiment, method: Method, rules: Rules, sites: int) -> None:
    """Refuse a run with all that a site's policy has against it."""
    found = objections(policy, experiment, method, rules, sites)
    if found:
        raise FedStrataError(f"This site's policy refuses the run: {'; '.join(found)}.")


def foreseen(policy: SiteRules, experiment: Experiment, method: Method) -> list[str]:
    """List what a site would refuse on the way through a run: to spend more in it than in all its runs together.

    While a run goes on, the site's own account tells (:mod:`fedstrata.deployment.budget`), with what it spent before.
    """
    if policy.lifetime_epsilon is None:
        return []
    terms = Terms.of(method, experiment.rounds)
    return list(_beyond("lifetime_epsilon", policy.lifetime_epsilon, terms, policy.lifetime_delta))


def unknown(policy: SiteRules, sites: int | None) -> list[str]:
    """List what of a policy cannot be told before a run: what is counted while it goes on, and what needs sites."""
    limits = ("max_bytes_up", "max_bytes_up_run", "lifetime_epsilon")
    counted = [key for key in limits if getattr(policy, key) is not None]
    told = [f"{key} = {getattr(policy, key):g} is held to while the run goes on" for key in counted]
    if sites is None and policy.least_sites is not None:
        told.append(f"least_sites = {policy.least_sites} needs the number of sites; give --sites")
    return told


def _not_allowed(kind: str, text: str, allowed: Sequence[str] | None) -> Iterator[str]:
    """Object to every component in a composition that no entry of a list allows."""
    for one in () if allowed is None or not text else split_outside(text, "+"):
        if not any(_allows(entry, one, kind) for entry in allowed or ()):
            listed = ", ".join(allowed or ()) or "none"
            yield f"the {kind} '{one.strip()}' is not among those that it allows ({kind}s = {listed})"


def _allows(entry: str, given: str, kind: str) -> bool:
    """Tell whether an entry is a name or a pattern that fits, or the very component with its parameters."""
    [call] = parse(given, kind)
    return fnmatchcase(call.name, entry) or _in_short(entry, kind) == _in_short(given, kind)


def _in_short(text: str, kind: str) -> str:
    """Write a component without the parameters that have their defaults, where it is known here."""
    try:
        return str(_REGISTRIES[kind].make(text))
    except FedStrataError:
        return text.strip()


def _too_much(policy: SiteRules, experiment: Experiment) -> Iterator[str]:
    rounds, epochs, steps = experiment.rounds, experiment.epochs, experiment.steps
    if policy.max_rounds is not None and rounds > policy.max_rounds:
        yield f"{rounds} rounds are more than max_rounds = {policy.max_rounds}"
    if steps is None and policy.max_epochs is not None and epochs > policy.max_epochs:
        yield f"{epochs} local epochs are more than max_epochs = {policy.max_epochs}"
    if steps is not None and policy.max_steps is not None and steps > policy.max_steps:
        yield f"{steps} local steps are more than max_steps = {policy.max_steps}"
    if steps is not None and policy.max_steps is None and policy.max_epochs is not None:
        yield f"{steps} local steps are counted instead of epochs, of which it says nothing (max_steps)"
    if steps is None and policy.max_epochs is None and policy.max_steps is not None:
        yield f"{epochs} local epochs are counted instead of steps, of which it says nothing (max_epochs)"


def _too_open(policy: SiteRules, method: Method, rules: Rules) -> Iterator[str]:
    if policy.secure_only and not rules.secure:
        yield (
            "it takes part only in secure aggregation (secure_only), which this server does not do; its operator sets "
            "'secure = true' in the rules of the sites file"
        )
    surveying = [f"'{part.name}'" for part in method.parts if part.exchanges()]
    if surveying and not policy.surveys:
        yield f"it answers no surveys (surveys = false), and {' and '.join(surveying)} would make some"


def _too_few(policy: SiteRules, experiment: Experiment, rules: Rules, sites: int) -> Iterator[str]:
    if policy.least_sites is None:
        return
    there = int(experiment.participation * (sites - experiment.late_clients) + 0.5)
    fewest = there if rules.min_sites is None else min(there, rules.min_sites)
    if fewest < policy.least_sites:
        how = "take part in a round" if fewest == there else "are enough for a round (min_sites)"
        yield f"{fewest} of {sites} sites {how}, fewer than least_sites = {policy.least_sites}"
    elif rules.secure and policy.least_sites > rules.secure_neighbours + 1:
        yield (
            f"of a secure sum it would know {rules.secure_neighbours + 1} sites (secure_neighbours), fewer than "
            f"least_sites = {policy.least_sites}"
        )


def _too_little_privacy(policy: SiteRules, experiment: Experiment, method: Method) -> Iterator[str]:
    terms, name = Terms.of(method, experiment.rounds), method.answering_for_privacy
    if policy.require_dp is not None and name != policy.require_dp and (name is None or policy.require_dp != "any"):
        wanted = "central-dp or local-dp" if policy.require_dp == "any" else policy.require_dp
        yield f"it takes part only with {wanted} (require_dp), which the method lacks"
    if policy.max_epsilon is not None:
        yield from _beyond("max_epsilon", policy.max_epsilon, terms, None if terms is None else terms.delta)
    if policy.max_delta is not None and terms is not None and terms.delta > policy.max_delta:
        yield f"delta = {terms.delta:g} is more than max_delta = {policy.max_delta:g}"


def _beyond(key: str, limit: float, terms: Terms | None, delta: float | None) -> Iterator[str]:
    """Object to a run that would spend more than a limit if the site took part in all rounds."""
    if terms is None or delta is None:
        yield f"nothing bounds its epsilon, and {key} = {limit:g}"
    elif (spent := gaussian_epsilon(terms.noise, terms.rounds, delta)) > limit * (1 + _SLACK):
        yield f"it would spend an epsilon of {spent:.4g}, and {key} = {limit:g}"

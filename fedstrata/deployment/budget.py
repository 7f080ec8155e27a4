r"""What a site has spent of its privacy, over all runs and restarts, and what it refuses to spend.

An upload under ``local-dp`` or ``central-dp`` is a release with Gaussian noise of a multiplier z, and costs
:math:`\mu^2 = 1/z^2`; these add up over rounds and runs, and tell what :math:`\varepsilon` was spent at a
:math:`\delta` (:mod:`fedstrata.functional.privacy`). In the site's state folder lies the account, ``_privacy.json``,
which only its owner can read. A release is written there, down to the disk, before it leaves: so it counts whatever
happens then, and the site knows it after the folder of its run is gone too. Then

- a round is answered for one model that was sent, and with one answer: two answers to chosen models, or the same one
  under two noises, would tell the update;
- a run gets as many releases as it has rounds, by the terms with which it began: its part for privacy and its rounds;
- all runs together spend no more than the operator allows (``lifetime_epsilon``), and where that is said, nothing
  leaves that cannot be counted.

With ``central-dp`` the noise is the server's, and the site takes its word for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.deployment.rules import SiteRules
from fedstrata.errors import FedStrataError
from fedstrata.functional import gaussian_epsilon
from fedstrata.methods import Method
from fedstrata.methods.mechanisms.private_updates import PrivateUpdates

LEDGER_FILE = "_privacy.json"
"""No run can have this name, so that no server can put a folder into its place."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Terms:
    """By what a run promises privacy: its part, for how many rounds, the noise multiplier and the delta."""

    part: str
    rounds: int
    noise: float = field(compare=False)
    delta: float

    @classmethod
    def of(cls, method: Method, rounds: int) -> Terms | None:
        """Read the terms of a method; none where it promises nothing."""
        part = next((part for part in method.parts if isinstance(part, PrivateUpdates)), None)
        return None if part is None else cls(str(part), rounds, part.multiplier(rounds), part.delta)

    @property
    def cost(self) -> float:
        r"""What one release costs: :math:`\mu^2`."""
        return self.noise**-2

    def epsilon(self, releases: int) -> float:
        """Tell what some releases spend."""
        return gaussian_epsilon(self.noise, releases, self.delta)

    def __str__(self) -> str:
        """Name the terms for people."""
        return f"'{self.part}' for {self.rounds} round{'s' * (self.rounds != 1)}"


@dataclass(frozen=True)
class Account:
    """What left the site in one run: the digests of the models for which it answered, by their rounds."""

    terms: Terms
    releases: Mapping[int, str]

    @property
    def cost(self) -> float:
        """What all of them cost."""
        return len(self.releases) * self.terms.cost

    def to_facts(self) -> dict[str, Any]:
        """Write it as plain data."""
        return {**asdict(self.terms), "releases": {str(round): asked for round, asked in self.releases.items()}}

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Account:
        """Read what :meth:`to_facts` wrote."""
        terms = Terms(str(facts["part"]), int(facts["rounds"]), float(facts["noise"]), float(facts["delta"]))
        return cls(terms, {int(round): str(asked) for round, asked in facts["releases"].items()})


@dataclass(frozen=True)
class Budget:
    """The account of a site, in its state folder, and the most that its operator allows."""

    root: Path
    rules: SiteRules

    def accounts(self) -> dict[str, Account]:
        """Read what was spent, by the names of the runs; without a whole account nothing leaves."""
        path = self.root / LEDGER_FILE
        if not path.exists():
            return {}
        facts = files.from_json(files.read_bytes(path), path)
        try:
            return {str(run): Account.read(account) for run, account in facts["runs"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FedStrataError(
                f"'{path}' is damaged: what this site has spent of its privacy cannot be read ({error!r}). Bring the "
                "file back from a backup of the same day; without it the site would spend again."
            ) from None

    def epsilon(self, further: float = 0.0) -> float:
        """Tell what all runs together have spent, with something more, at the delta for a lifetime."""
        total = sum(account.cost for account in self.accounts().values()) + further
        return gaussian_epsilon(1 / math.sqrt(total), 1, self.rules.lifetime_delta) if total else 0.0

    def open(self, run: str, method: Method, rounds: int) -> RunBudget | None:
        """Begin or go on with a run, if its terms allow that; none where nothing is promised and nothing asked for."""
        terms, known = Terms.of(method, rounds), self.accounts().get(run)
        if known is not None and terms != known.terms:
            raise FedStrataError(
                f"In the run {run} this site was promised {known.terms}, and now it is to be "
                f"{'nothing' if terms is None else terms}; what a run promises cannot change, begin another one."
            )
        if terms is None:
            if self.rules.lifetime_epsilon is not None:
                raise FedStrataError(
                    f"This site spends an epsilon of at most {self.rules.lifetime_epsilon:g} in all runs together, and "
                    f"'{method}' lets updates leave without noise, which would be without bounds; run it beside "
                    "'local-dp' or 'central-dp', or without this site."
                )
            return None
        if known is None:
            self.refuse_lifetime(terms)
        return RunBudget(self, run, terms)

    def refuse_lifetime(self, terms: Terms) -> None:
        """Refuse a release with which all runs together would spend more than the operator allows."""
        allowed, then = self.rules.lifetime_epsilon, self.epsilon(terms.cost)
        if allowed is not None and then > allowed * (1 + _ROUNDING):
            raise FedStrataError(
                f"In all runs together this site has spent an epsilon of {self.epsilon():.4g} and with one more round "
                f"of {terms} it would be {then:.4g}, at a delta of {self.rules.lifetime_delta:g}; its operator allows "
                f"{allowed:g} (lifetime_epsilon)."
            )

    def write(self, run: str, account: Account) -> None:
        """Bring the account of a run down to the disk."""
        known = {**self.accounts(), run: account}
        content = {"runs": {name: one.to_facts() for name, one in known.items()}}
        files.write_atomically(self.root / LEDGER_FILE, files.to_json(content), private=True)


@dataclass(frozen=True)
class RunBudget:
    """What a site may spend in one run, by the terms with which that began."""

    budget: Budget
    run: str
    terms: Terms

    @property
    def account(self) -> Account:
        """What was spent in this run so far."""
        return self.budget.accounts().get(self.run, Account(self.terms, {}))

    def check(self, round: int, asked: str, kept: bool) -> None:
        """Refuse what may not leave: ``asked`` names the model that came, ``kept`` tells that its answer is there."""
        account = self.account
        before = account.releases.get(round)
        if before is None:
            self._refuse_more(account)
        elif before != asked:
            raise FedStrataError(
                f"This site has answered round {round} for another model. Under '{self.terms.part}' it answers each "
                "round once: the difference of two answers would tell more than the noise hides. A server that has "
                "lost its rounds begins another run."
            )
        elif not kept:
            raise FedStrataError(
                f"This site has answered round {round}, and its answer is no longer here. Under '{self.terms.part}' "
                "it does not answer again: the mean of two answers would have less noise."
            )

    def _refuse_more(self, account: Account) -> None:
        done, terms = len(account.releases), self.terms
        if done >= terms.rounds:
            raise FedStrataError(
                f"In this run this site has spent an epsilon of {terms.epsilon(done):.4g} in {done} rounds and with "
                f"one more it would be {terms.epsilon(done + 1):.4g}, at a delta of {terms.delta:g}; {terms} allows "
                f"{terms.epsilon(terms.rounds):.4g}."
            )
        self.budget.refuse_lifetime(terms)

    def spend(self, round: int, asked: str) -> str | None:
        """Write a release down before it leaves; return what is spent now, in words, if this one is new."""
        self.check(round, asked, kept=True)
        account = self.account
        if round in account.releases:
            return None
        self.budget.write(self.run, Account(self.terms, {**account.releases, round: asked}))
        done, terms, rules = len(account.releases) + 1, self.terms, self.budget.rules
        lifetime = "" if rules.lifetime_epsilon is None else f" of {rules.lifetime_epsilon:g}"
        return (
            f"privacy: epsilon {terms.epsilon(done):.4g} of {terms.epsilon(terms.rounds):.4g} at delta "
            f"{terms.delta:g} is spent in this run, in all runs together {self.budget.epsilon():.4g}{lifetime} at "
            f"delta {rules.lifetime_delta:g}"
        )

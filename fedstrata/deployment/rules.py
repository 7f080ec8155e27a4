"""How long a server waits, for how many sites, what it refuses, and what it lets itself see."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.errors import FedStrataError
from fedstrata.scores import Metric
from fedstrata.spec import Spec, parameter

EXACT_BITS = 32
"""With at least this many bits, rounding is hardly more than that of single precision."""
FEWEST_SITES = 3
"""With fewer sites a sum hides too little: of two, each could subtract its own upload."""
FEWEST_OF_A_CLASS = 10
"""With fewer test samples of some class, a site tells nothing of single classes: that would tell of single people."""


def refuse_matrices(metrics: Iterable[Metric]) -> None:
    """Refuse metrics that count single samples of a site; server and site both insist on it."""
    for metric in metrics:
        if metric.axes > 1:
            raise FedStrataError(
                f"The metric '{metric}' counts single samples, which sites do not tell; leave it out, or take "
                "'recall:each' or 'f1:each', which they tell where they have enough samples of every class."
            )


def tells_of_classes(label_counts: Sequence[int]) -> bool:
    """Tell whether a site's test samples, by class, are enough to tell something of its single classes.

    It is all or nothing: what was told of the other classes would give away that of a small one, beside their mean.
    """
    return all(count == 0 or count >= FEWEST_OF_A_CLASS for count in label_counts)


@dataclass(frozen=True)
class SecureRules(Spec):
    """The rules of secure aggregation, which sites hear too; see :mod:`fedstrata.deployment.secure`."""

    name: ClassVar[str] = "rules"
    kind: ClassVar[str] = "rules"

    secure: bool = parameter(False, "Whether the server sees only the sum of the sites' uploads.")
    secure_neighbours: int = parameter(
        32, "How many other sites each site shares its secrets of a round with; all, if there are fewer.", low=2
    )
    secure_threshold: float = parameter(
        0.66, "This part of the shares of a secret must come together to restore it.", above=0.5, high=1
    )
    secure_clip: float = parameter(
        8.0, "Entries are clipped to this range, multiplied by the largest entry of their tensor if that is above 1.",
        above=0, high=1e6,
    )  # fmt: skip
    secure_bits: int = parameter(32, "The bits of every number that is uploaded.", choices=(16, 32, 64))

    def secure_facts(self) -> dict[str, Any] | None:
        """Tell the sites the rules of secure aggregation, if there is any."""
        if not self.secure:
            return None
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(SecureRules)}

    def shares_needed(self, holders: int) -> int:
        """Tell how many of the holders of a secret's shares must come together to restore it.

        It is more than half of them, so that a secret cannot be restored twice from different holders: each of them
        gives away a share of only one of two secrets. And it is so many that a server cannot have a sum of two opened
        by telling each of n sites something else: it would need the keys of n - 2 sites, hence as many times the shares
        that are needed, and each of the n sites calls at most n minus that number dropped.
        """
        wanted = max(2, math.ceil(self.secure_threshold * holders - 1e-9))
        return wanted if holders <= FEWEST_SITES else max(wanted, holders**2 // (2 * holders - 2) + 1)

    def largest_number(self, sites: int) -> int:
        """Tell the largest whole number that a site may upload, so that the sum of all fits twice into the bits.

        The other half of the range shows where something was added that is no upload.
        """
        return int(2 ** (self.secure_bits - 2)) // sites


@dataclass(frozen=True)
class SiteRules(Spec):
    """A site's policy: what it takes part in and lets leave, as its operator says; no server can change it.

    Lists that are none allow everything, empty ones nothing. :mod:`fedstrata.deployment.policy` holds runs to it.
    """

    name: ClassVar[str] = "rules"
    kind: ClassVar[str] = "rules"

    secure_only: bool = parameter(False, "Whether the site takes part only if the server sees nothing but sums.")
    statistics: bool = parameter(
        True,
        "Whether sums of its training samples may leave, by which 'normalise' finds mean and deviation of all.",
    )
    min_samples: int = parameter(5, "Sums of fewer training samples than this never leave the site.", low=1)
    surveys: bool = parameter(
        True, "Whether it answers surveys of a method before a round, which the server sees one by one."
    )
    methods: tuple[str, ...] | None = parameter(
        None, "The methods that it takes part in, and parts of them: names, patterns, or with just these parameters."
    )
    models: tuple[str, ...] | None = parameter(None, "The models that it trains, named like methods.")
    metrics: tuple[str, ...] | None = parameter(
        None, "What it tells of its tests beside accuracy and loss, named like methods."
    )
    max_rounds: int | None = parameter(None, "The most rounds of a run, and trainings in them.", low=1)
    max_epochs: int | None = parameter(None, "The most local epochs of a round.", low=1)
    max_steps: int | None = parameter(None, "The most local steps of a round, where steps are counted.", low=1)
    max_bytes_up: int | None = parameter(None, "The most bytes that leave in a round.", low=0)
    max_bytes_up_run: int | None = parameter(None, "The most bytes that leave in a run.", low=0)
    least_sites: int | None = parameter(None, "The fewest sites with which a round may be merged.", low=1)
    require_dp: str | None = parameter(
        None, "The differential privacy without which it takes no part.", choices=("any", "central-dp", "local-dp")
    )
    max_epsilon: float | None = parameter(None, "The most epsilon that a run may spend, at its own delta.", above=0)
    max_delta: float | None = parameter(None, "The largest delta of a run.", above=0, below=1)
    lifetime_epsilon: float | None = parameter(
        None, "The epsilon that the site spends in all runs together, none of them without noise; none: no bound.",
        above=0,
    )  # fmt: skip
    lifetime_delta: float = parameter(1e-5, "The delta at which that is counted.", above=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("methods", "models", "metrics"):
            given = getattr(self, key)
            if given is not None and not _are_words(given):
                raise FedStrataError(
                    f'{given!r} does not fit {key} of a policy: it takes a list, such as {key} = ["name"].'
                )
            object.__setattr__(self, key, None if given is None else tuple(given))


def _are_words(given: object) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(one, str) and one.strip() for one in given)


@dataclass(frozen=True)
class Rules(SecureRules):
    """What a server insists on, as the ``[rules]`` of a sites file say."""

    min_sites: int | None = parameter(
        None,
        "The number of sites with which a round goes on after the timeout; none: the run begins with all, and a round "
        "waits for all and needs more than half.",
        low=1,
    )
    round_timeout: float = parameter(600.0, "Seconds that a round waits for all of its sites.", above=0)
    max_refusals: int = parameter(3, "The number of refused replies after which a site is left out.", low=1)
    norm_limit: float = parameter(
        100.0, "A reply is refused if its norm is more than this many times that of the model that was sent.", above=0
    )
    classes: str | None = parameter(
        None,
        "The names of the classes in their order, with commas between; none: what more than half declare.",
    )
    input_shape: str | None = parameter(
        None, "The shape of a sample, such as '3 64 64'; none: what more than half declare."
    )

    accept_lost_state: bool = parameter(
        False, "Whether a site goes on that has lost what it kept to itself; the results then say so."
    )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes that all sites must have, if they are given."""
        return None if self.classes is None else tuple(name.strip() for name in self.classes.split(","))

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape that samples must have, if it is given."""
        if self.input_shape is None:
            return None
        sizes = self.input_shape.replace(",", " ").split()
        if not sizes or not all(size.isascii() and size.isdigit() and int(size) for size in sizes):
            raise FedStrataError(f"input_shape is '{self.input_shape}', and no shape; write it like '3 64 64'.")
        return tuple(map(int, sizes))

    def check(self, sites: int) -> None:
        """Refuse to wait for more sites than there are, and a shape that is none."""
        _ = self.shape
        if self.min_sites is not None and self.min_sites > sites:
            raise FedStrataError(f"min_sites is {self.min_sites}, but there are only {sites} sites; lower it.")

    def check_secure(self, participants: int) -> None:
        """Refuse secure aggregation among so few participants of a round that it could not hide or restore anything."""
        if not self.secure:
            return
        if participants < FEWEST_SITES:
            raise FedStrataError(
                f"Secure aggregation needs {FEWEST_SITES} sites in a round, and there would be {participants}; add "
                "sites, or let more of them take part."
            )
        needed = max(FEWEST_SITES, self.shares_needed(participants))
        if self.min_sites is not None and self.min_sites < needed:
            raise FedStrataError(
                f"min_sites is {self.min_sites}, but secure aggregation of {participants} sites needs {needed} of them "
                f"to the end of a round; raise min_sites{', or lower secure_threshold' * (needed > FEWEST_SITES)}."
            )
        if self.largest_number(participants) < 2**6:
            raise FedStrataError(
                f"The sum of {participants} sites does not fit into {self.secure_bits} bits; raise secure_bits."
            )

    def needed(self, asked: int, majority: bool = True) -> int:
        """Tell how many of the sites that were asked must give a usable answer.

        If nothing is said it is more than half, or without ``majority``, where something else decides, one.
        """
        if self.min_sites is None:
            return asked // 2 + 1 if majority else 1
        return min(self.min_sites, asked)

    def enough(self, answered: int, asked: int) -> bool:
        """Tell whether a question goes on without the others when the time is over."""
        return self.min_sites is not None and answered >= self.needed(asked)

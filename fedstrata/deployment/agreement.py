"""What the samples of all sites have in common: known to the server, or agreed upon by more than half of the sites.

Nobody decides it by being the first to answer. Where the server does not know it (from data of its own, from the rules,
or from the rounds so far), the declarations of all sites that answered the hello are laid side by side. What more than
half of them declare is the schema, and the others are refused by name; where no more than half agree, nobody can tell
who is right, and the run does not begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fedstrata.data.channels import Statistics
from fedstrata.deployment.checks import RefusedReply
from fedstrata.deployment.declarations import SUMS, Declaration, Schema
from fedstrata.errors import FedStrataError

H = TypeVar("H", bound=Hashable)


class NotBegun(FedStrataError):  # noqa: N818 - a verdict
    """A run that does not begin before something is put right; its sites wait for that."""


@dataclass(frozen=True)
class Agreement:
    """What is agreed on so far: the schema of samples, and by what they are normalised; none is not known yet.

    ``class_names`` and ``input_shape`` are what the rules insist on, if they do.
    """

    schema: Schema | None = None
    normalises_by: str | Statistics | None = None
    class_names: tuple[str, ...] | None = None
    input_shape: tuple[int, ...] | None = None

    def check(self, declared: Declaration) -> None:
        """Refuse what differs from what is agreed on."""
        own = declared.schema
        insisted = Schema(self.input_shape or own.input_shape, self.class_names or own.class_names, own.input_type)
        if own != replace(insisted, columns=own.columns):
            raise RefusedReply(f"its samples have {own}, and the rules say {insisted}")
        if self.schema is not None:
            _check_schema(declared.schema, self.schema)
        if self.normalises_by is not None and declared.normalises_by != self.normalises_by:
            raise RefusedReply(
                f"its samples are normalised by {_words(declared.normalises_by)}, those of the other sites by "
                f"{_words(self.normalises_by)}; 'normalise:site' or normalise(mean='...', deviation='...') would be "
                "the same for all"
            )

    def settled(self, declarations: Mapping[int, Declaration], names: Sequence[str]) -> Agreement:
        """Complete it by what more than half of the sites declare."""
        schema = self.schema or _of_most(declarations, lambda one: one.schema, str, names, "their samples")
        like = {site: one for site, one in declarations.items() if one.schema == schema}
        by = self.normalises_by
        if by is None and like:
            by = _of_most(like, lambda one: one.normalises_by, _words, names, "what their samples are normalised by")
        return replace(self, schema=schema, normalises_by=by)


def _of_most(
    declarations: Mapping[int, Declaration],
    pick: Callable[[Declaration], H],
    describe: Callable[[H], str],
    names: Sequence[str],
    what: str,
) -> H:
    picked = {site: pick(one) for site, one in sorted(declarations.items())}
    [(usual, count)] = Counter(picked.values()).most_common(1)
    if 2 * count <= len(picked):
        told = "; ".join(f"{names[site]} declares {describe(value)[:200]}" for site, value in picked.items())
        raise NotBegun(
            f"No more than half of the sites agree on {what}, so that the run does not begin: {told}. Find out who is "
            "right, and correct the others, or say it in the rules ('classes', 'input_shape')."
        )
    return usual


def _check_schema(own: Schema, usual: Schema) -> None:
    if own.whole_numbers != usual.whole_numbers:
        one, others = ("whole", "any") if own.whole_numbers else ("any", "whole")
        raise RefusedReply(f"its inputs are {one} numbers, those of the other sites {others} numbers")
    if own == replace(usual, columns=own.columns) != usual:
        if own.whole_numbers:
            raise RefusedReply(
                "its texts have another vocabulary than those of the other sites; all must use one file, as in "
                "ag_news(vocabulary=vocabulary.txt), which dataset.vocabulary.write makes in Python"
            )
        raise RefusedReply(
            "its table has other columns or categories than those of the other sites; all must use one encoding, "
            "as in table(label=..., encoding=columns.json)"
        )
    if own != usual:
        raise RefusedReply(f"its samples have {own}, instead of {usual}")


def _words(normalises_by: str | Statistics) -> str:
    if isinstance(normalises_by, Statistics):
        return f"the constants {list(normalises_by.mean)} and {list(normalises_by.deviation)}"
    return "the statistics of all sites" if normalises_by == SUMS else normalises_by

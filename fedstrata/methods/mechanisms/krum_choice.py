"""Krum and Multi-Krum: believing those that lie where most others do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from fedstrata.errors import FedStrataError
from fedstrata.functional import krum_scores
from fedstrata.methods.contract.part import Metrics
from fedstrata.methods.contract.views import Message, Outline, Server
from fedstrata.methods.mechanisms.robust_merging import RobustMerge, updates_of
from fedstrata.methods.mechanisms.shared import equal_shares
from fedstrata.spec import parameter
from fedstrata.stack import Tensors

PAPER = "Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017"
LINK = "https://arxiv.org/abs/1703.02757"


@dataclass(frozen=True)
class KrumChoice(RobustMerge):
    r"""What Krum and Multi-Krum have in common: scores, and which clients they believe.

    A client's score is the sum of its squared distances to its :math:`n - f - 2` nearest among the n replies, over all
    shared tensors but counters together, running statistics too. With f liars there must be more than :math:`2f + 2`
    replies. A run whose rounds have fewer participants is refused; where sites drop out of a round so that too few are
    left, its model stays as it was, and the metric ``NAME.too_few`` is 1.
    """

    byzantine: int | None = parameter(
        None, "How many clients may lie (f); none: as many as the replies of a round admit.", low=0
    )

    def notes(self, outline: Outline) -> Iterator[str]:
        """Refuse too few participants, and say where none can lie."""
        there = outline.participants
        if self._too_few(there):
            raise FedStrataError(
                f"'{self}' needs more than 2 x {self.byzantine} + 2 replies to tell {self.byzantine} liars, and a "
                f"round has {there} participants; give byzantine={max(0, (there - 3) // 2)} or less, or more "
                "participants."
            )
        if self.liars(there) == 0:
            yield f"'{self}' with {there} participants withstands no liar; from five participants on it does."

    def liars(self, replies: int) -> int:
        """Tell how many of some replies may be lies."""
        return max(0, (replies - 3) // 2) if self.byzantine is None else self.byzantine

    def _too_few(self, replies: int) -> bool:
        return bool(self.byzantine) and replies <= 2 * self.liars(replies) + 2

    @abstractmethod
    def believed(self, replies: int) -> int:
        """Tell how many of some replies are believed."""

    def combined(self, server: Server, replies: Message) -> Tensors:
        """Take the mean of those with the lowest scores."""
        updates = updates_of(server, replies)
        count = len(next(iter(updates.values()))) if updates else 0
        if count == 0 or self._too_few(count):
            return {name: server.model[name] for name in replies.tensors}
        order = krum_scores(list(updates.values()), self.liars(count)).argsort(stable=True)
        chosen = order[: self.believed(count)].sort().values
        return self.mean(server, replies.rows(chosen), equal_shares(len(chosen), chosen.device))

    def metrics(self, server: Server) -> Metrics:
        """Tell where a round had too few replies."""
        return {f"{self.name}.too_few": float(self._too_few(len(server.participants)))}

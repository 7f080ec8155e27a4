"""Product reviews by domain: "Biographies, Bollywood, Boom-boxes and Blenders" (Blitzer, Dredze, Pereira, ACL 2007)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstrata.data.datasets.base import datasets, not_found, search_places
from fedstrata.data.datasets.texts import Pool, TextSource, find_parts, one_pool
from fedstrata.data.formats.texts import Texts, join_texts, read_parquet_texts
from fedstrata.errors import unknown_name
from fedstrata.spec import parameter


@datasets.register("amazon_reviews")
@dataclass(frozen=True)
class AmazonReviews(TextSource):
    """Amazon reviews: positive or negative, by domain; the domains are natural clients (``natural``).

    Read from Parquet with the columns ``text``, ``label`` (0 or 1) and ``domain``, in parts for training and testing,
    such as the 16 domains of "Adversarial Multi-task Learning for Text Classification" (Liu, Qiu, Huang, ACL 2017), of
    which two are films of other sources. FedLWS (Shi et al., ICLR 2025) trains TextCNN on reviews whose features are
    shifted, and tells neither domains, words nor length: those are ours.
    """

    length: int = parameter(256, "How many tokens of a text are kept; shorter texts are filled up.", low=1)
    domains: str | None = parameter(None, "The domains to use, joined by '+', such as books+dvd; all by default.")

    class_names = ("negative", "positive")

    def read(self, root: Path | None) -> Pool:
        """Read both parts, and of them the domains that are asked for."""
        found = self.find(root)
        parts = [self._texts(found[part]) for part in ("train", "test")]
        return one_pool(parts, join_texts(parts))

    def find(self, root: Path | None = None) -> dict[str, list[Path]]:
        """Find the files of both parts."""
        found = find_parts(self.name, root, self.name, ("train", "test"))
        found = found or find_parts("amazon_domains", root, self.name, ("train", "test"))
        if found is None or found["train"][0].suffix == ".csv":
            expected = (
                "train-*.parquet and test-*.parquet with the columns text, label and domain (or in amazon_domains)"
            )
            raise not_found(self.name, search_places(self.name, root), expected)
        return found

    def _texts(self, paths: list[Path]) -> Texts:
        texts = join_texts([read_parquet_texts(path, len(self.class_names), "domain") for path in paths])
        if self.domains is None:
            return texts
        assert texts.sites is not None
        wanted, there = self.domains.split("+"), np.unique(texts.sites).tolist()
        for domain in wanted:
            if domain not in there:
                raise unknown_name(f"domain in '{paths[0].parent}' called", domain, there)
        chosen = np.flatnonzero(np.isin(texts.sites, wanted))
        return Texts([texts.texts[row] for row in chosen.tolist()], texts.labels[chosen], texts.sites[chosen])

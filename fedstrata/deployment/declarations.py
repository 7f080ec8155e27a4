"""What sites declare about their samples, and what a server that has no samples makes of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.data import Dataset, Split
from fedstrata.data.channels import Statistics
from fedstrata.deployment.checks import RefusedReply
from fedstrata.deployment.facts import normalisation_from_facts, normalisation_to_facts, whole_numbers_in
from fedstrata.deployment.foreign_text import clean, is_clean
from fedstrata.deployment.protocol import digest
from fedstrata.engines.server import ServerSide
from fedstrata.methods import Declared

FLOATS = ("float16", "bfloat16", "float32", "float64")
INPUT_TYPES = ("uint8", "int8", "int16", "int32", "int64", "bool", *FLOATS)
"""The types that samples may have."""
NOTHING, SUMS = "nothing", "sums"
"""What samples are normalised by, if not by published constants: by nothing, or by what all sites' sums tell."""


MOST_SAMPLES = 10**9
"""So many samples a site may declare."""
MOST_CLASSES = 2**16
MOST_AXES = 8
MOST_ENTRIES = 2**28
"""So many numbers one sample may have: a gigabyte in single precision."""
_DIGEST = re.compile(r"[0-9a-f]{0,64}")


@dataclass(frozen=True)
class Schema:
    """What all sites' samples have in common."""

    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    input_type: str = "float32"
    columns: str = ""
    """A digest of the inputs that a table's columns and categories become, in their order, or of the tokens of a
    vocabulary; empty without either."""

    @classmethod
    def of(cls, dataset: Dataset) -> Schema:
        """Tell what the samples of a dataset must have in common with those of others."""
        words = () if dataset.vocabulary is None else dataset.vocabulary.tokens
        inputs = words if dataset.table is None else dataset.table.inputs
        columns = digest("\n".join(inputs).encode()) if inputs else ""
        kind = str(dataset.inputs.dtype).removeprefix("torch.")
        return cls(tuple(dataset.input_shape), tuple(dataset.class_names), kind, columns)

    @property
    def whole_numbers(self) -> bool:
        """Whether inputs are whole numbers, such as those of tokens."""
        return self.input_type not in ("uint8", *FLOATS)

    @property
    def trial(self) -> Tensor | None:
        """Two samples to try a model on where inputs are whole numbers: ones, as zeros may stand for nothing at all."""
        return torch.ones(2, *self.input_shape, dtype=torch.int64) if self.whole_numbers else None

    def __str__(self) -> str:
        """Write it in words."""
        shown = ", ".join(self.class_names[:5]) + (f", ... ({len(self.class_names)})" * (len(self.class_names) > 5))
        return f"the shape {list(self.input_shape)} of {self.input_type} and the classes {shown}"


@dataclass(frozen=True)
class Declaration:
    """What a site tells about its samples; ``normalises_by`` is NOTHING, SUMS, or the constants of its dataset."""

    schema: Schema
    size: int
    test_size: int
    label_counts: tuple[int, ...]
    normalises_by: str | Statistics = NOTHING

    def to_facts(self) -> dict[str, Any]:
        """Write it into the answer to a hello."""
        return {
            "input_shape": list(self.schema.input_shape),
            "class_names": list(self.schema.class_names),
            "input_type": self.schema.input_type,
            "columns": self.schema.columns,
            "size": self.size,
            "test_size": self.test_size,
            "label_counts": list(self.label_counts),
            "normalises_by": normalisation_to_facts(self.normalises_by),
        }

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Declaration:
        """Read the answer to a hello; what does not fit together, or is more than anybody has, is refused."""
        shape, names = _read_shape(facts), _read_names(facts)
        input_type, columns = facts.get("input_type"), facts.get("columns", "")
        if not isinstance(input_type, str) or input_type not in INPUT_TYPES:
            raise RefusedReply("its samples are of no known type")
        if not isinstance(columns, str) or not _DIGEST.fullmatch(columns):
            raise RefusedReply("its columns are named by no digest")
        counts = whole_numbers_in(facts, "label_counts", 0, MOST_SAMPLES)
        [size], [test_size] = (
            whole_numbers_in({name: [facts.get(name)]}, name, low, MOST_SAMPLES)
            for name, low in (("size", 1), ("test_size", 0))
        )
        if len(counts) != len(names) or sum(counts) != size:
            raise RefusedReply(f"it declares {size} samples, but label counts of {sum(counts)}")
        schema = Schema(shape, names, input_type, columns)
        return cls(schema, size, test_size, counts, _read_normalisation(facts, shape))


def _read_shape(facts: Mapping[str, Any]) -> tuple[int, ...]:
    shape = whole_numbers_in(facts, "input_shape", 1, MOST_ENTRIES)
    if not 1 <= len(shape) <= MOST_AXES or math.prod(shape) > MOST_ENTRIES:
        raise RefusedReply(
            f"its samples have the shape {str(list(shape))[:100]}; one of up to {MOST_AXES} axes and {MOST_ENTRIES} "
            "numbers is possible"
        )
    return shape


def _read_names(facts: Mapping[str, Any]) -> tuple[str, ...]:
    names = facts.get("class_names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise RefusedReply("its class_names are no list of names")
    if len(names) > MOST_CLASSES:
        raise RefusedReply(f"it declares {len(names)} classes, and {MOST_CLASSES} are the most")
    unfit = [name for name in names if not is_clean(name)]
    if unfit:
        raise RefusedReply(
            f"the class '{clean(unfit[0], 50)}' has a name that is too long, or with characters that cannot be shown"
        )
    return tuple(names)


def _read_normalisation(facts: Mapping[str, Any], shape: tuple[int, ...]) -> str | Statistics:
    by = normalisation_from_facts(facts.get("normalises_by", NOTHING))
    if by not in (NOTHING, SUMS) and (not isinstance(by, Statistics) or len(by.mean) != shape[0]):
        raise RefusedReply("it does not tell by what its samples are normalised")
    return by


def with_declarations(side: ServerSide, declarations: Mapping[int, Declaration]) -> ServerSide:
    """Let server hooks see what sites declared by now, some of them later than others."""
    sizes, label_counts = side.declared.sizes.clone(), side.declared.label_counts.clone()
    for site, declaration in declarations.items():
        sizes[site] = declaration.size
        label_counts[site] = torch.tensor(declaration.label_counts)
    return replace(side, declared=Declared(sizes, label_counts))


@dataclass(frozen=True)
class DeclaredSplit(Split):
    """Who declared how many samples; of each site one position stands for all, as none of them is here."""

    declared: tuple[Declaration, ...] = ()

    @property
    def sizes(self) -> np.ndarray:
        """The number of training samples of each site."""
        return np.array([one.size for one in self.declared], dtype=np.int64)

    @property
    def test_sizes(self) -> np.ndarray:
        """The number of test samples of each site."""
        return np.array([one.test_size for one in self.declared], dtype=np.int64)

    @property
    def hash(self) -> str:
        """A fingerprint of what was declared."""
        told = [(one.size, one.test_size, one.label_counts) for one in self.declared]
        return sha256(repr(told).encode()).hexdigest()[:16]

    def samples(self, dataset: Dataset) -> int:
        """Count the samples of all sites."""
        return int(self.sizes.sum() + self.test_sizes.sum())

    def label_counts(self, dataset: Dataset) -> np.ndarray:
        """Count the training labels, as declared: an array ``[sites, classes]``."""
        return np.array([one.label_counts for one in self.declared], dtype=np.int64)


def declared_data(
    name: str, schema: Schema, declarations: Mapping[int, Declaration], sites: int
) -> tuple[Dataset, Split]:
    """Describe data that the server does not have, from what the sites declared; nothing is as large as they say.

    A site that has not come yet counts as one sample of the first class until it declares itself.
    """
    unknown = Declaration(schema, 1, 0, (1, *[0] * (len(schema.class_names) - 1)))
    declared = tuple(declarations.get(site, unknown) for site in range(sites))
    inputs = torch.zeros(1, dtype=getattr(torch, schema.input_type)).expand(sites, *schema.input_shape)
    everybody, nobody = np.arange(sites), np.empty(0, dtype=np.int64)
    dataset = Dataset(name, inputs, torch.zeros(sites, dtype=torch.int64), everybody, nobody, schema.class_names)
    return dataset, DeclaredSplit(tuple(np.split(everybody, sites)), (nobody,) * sites, declared)

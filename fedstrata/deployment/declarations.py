"""What sites declare about their samples, and what a server that has no samples makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.data import Dataset, Split
from fedstrata.data.channels import Statistics
from fedstrata.deployment.checks import RefusedReply
from fedstrata.deployment.facts import statistics_from_facts, statistics_to_facts, whole_numbers_in
from fedstrata.engines.server import ServerSide
from fedstrata.methods import Declared

FLOATS = ("float16", "bfloat16", "float32", "float64")
INPUT_TYPES = ("uint8", "int8", "int16", "int32", "int64", "bool", *FLOATS)
"""The types that samples may have."""
NOTHING, SUMS = "nothing", "sums"
"""What samples are normalised by, if not by published constants: by nothing, or by what all sites' sums tell."""


@dataclass(frozen=True)
class Schema:
    """What all sites' samples have in common."""

    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    input_type: str = "float32"
    columns: str = ""
    """A digest of the inputs that a table's columns and categories become, in their order; empty without a table."""

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
            "normalises_by": self.normalises_by
            if isinstance(self.normalises_by, str)
            else statistics_to_facts(self.normalises_by),
        }

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Declaration:
        """Read the answer to a hello; what does not fit together is refused."""
        shape, names = whole_numbers_in(facts, "input_shape", 1), facts.get("class_names")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise RefusedReply("its class_names are no list of names")
        if facts.get("input_type") not in INPUT_TYPES:
            raise RefusedReply("its samples are of no known type")
        counts = whole_numbers_in(facts, "label_counts", 0)
        [size], [test_size] = (
            whole_numbers_in({name: [facts.get(name)]}, name, low) for name, low in (("size", 1), ("test_size", 0))
        )
        if len(counts) != len(names) or sum(counts) != size:
            raise RefusedReply(f"it declares {size} samples, but label counts of {sum(counts)}")
        schema = Schema(shape, tuple(names), facts["input_type"], str(facts.get("columns", ""))[:64])
        return cls(schema, size, test_size, counts, _read_normalisation(facts, shape))


def _read_normalisation(facts: Mapping[str, Any], shape: tuple[int, ...]) -> str | Statistics:
    value = facts.get("normalises_by", NOTHING)
    if value in (NOTHING, SUMS):
        return str(value)
    statistics = statistics_from_facts(value)
    if statistics is None or len(statistics.mean) != shape[0]:
        raise RefusedReply("it does not tell by what its samples are normalised")
    return statistics


def with_declarations(side: ServerSide, declarations: Mapping[int, Declaration]) -> ServerSide:
    """Let server hooks see what sites declared by now, some of them later than others."""
    sizes, label_counts = side.declared.sizes.clone(), side.declared.label_counts.clone()
    for site, declaration in declarations.items():
        sizes[site] = declaration.size
        label_counts[site] = torch.tensor(declaration.label_counts)
    return replace(side, declared=Declared(sizes, label_counts))


def declared_data(
    name: str, schema: Schema, declarations: Mapping[int, Declaration], sites: int
) -> tuple[Dataset, Split]:
    """Describe data that the server does not have, from what the sites declared: the labels, but no inputs.

    A site that has not come yet counts as one sample of the first class until it declares itself.
    """
    classes = np.arange(len(schema.class_names))
    unknown = Declaration(schema, 1, 0, (1, *[0] * (len(classes) - 1)))
    declared = [declarations.get(site, unknown) for site in range(sites)]
    labels = [np.repeat(classes, one.label_counts) for one in declared]
    tests = [np.zeros(one.test_size, dtype=np.int64) for one in declared]
    pool = np.concatenate([*labels, *tests])
    positions = np.split(np.arange(len(pool)), np.cumsum([len(part) for part in (*labels, *tests)])[:-1])
    train, test = positions[:sites], positions[sites:]
    inputs = torch.zeros(1, dtype=getattr(torch, schema.input_type)).expand(len(pool), *schema.input_shape)
    dataset = Dataset(
        name, inputs, torch.from_numpy(pool), np.concatenate(train), np.concatenate(test), schema.class_names
    )
    return dataset, Split(tuple(train), tuple(test))

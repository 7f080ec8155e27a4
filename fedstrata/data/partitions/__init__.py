"""The ways to divide a dataset among clients: one partition per module."""

from fedstrata.data.partitions import classes, dirichlet, dirichlet_balanced, dirichlet_clients, groups, iid, natural
from fedstrata.data.partitions.base import Partitioner, partitions

__all__ = [
    "Partitioner",
    "classes",
    "dirichlet",
    "dirichlet_balanced",
    "dirichlet_clients",
    "groups",
    "iid",
    "natural",
    "partitions",
]

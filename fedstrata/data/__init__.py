"""Datasets, partitions, and batches made on the device."""

from fedstrata.data.arrays import from_arrays, from_clients
from fedstrata.data.cache import cache_directory
from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets import DatasetSource, datasets
from fedstrata.data.download import download
from fedstrata.data.given import read_data
from fedstrata.data.partitions import Partitioner, partitions
from fedstrata.data.randaugment import RandAugment
from fedstrata.data.split import Split
from fedstrata.data.tables import Table, from_table
from fedstrata.data.transforms import Transform, apply_transforms, parse_transforms, transforms
from fedstrata.data.vocabulary import Vocabulary

__all__ = [
    "Dataset",
    "DatasetSource",
    "Partitioner",
    "RandAugment",
    "Split",
    "Table",
    "Transform",
    "Vocabulary",
    "apply_transforms",
    "cache_directory",
    "datasets",
    "download",
    "from_arrays",
    "from_clients",
    "from_table",
    "parse_transforms",
    "partitions",
    "read_data",
    "transforms",
]

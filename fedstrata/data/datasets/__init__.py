"""The datasets that can be named: one module per family."""

from fedstrata.data.datasets import cifar, digits, fraction, heart_disease, image_folder, mnist, table
from fedstrata.data.datasets.base import DatasetSource, datasets

__all__ = [
    "DatasetSource", "cifar", "datasets", "digits", "fraction", "heart_disease", "image_folder", "mnist", "table",
]  # fmt: skip

"""The datasets that can be named: one module per family."""

from fedstrata.data.datasets import (
    cifar,
    digits,
    heart_disease,
    hub,
    image_folder,
    isic2019,
    mnist,
    table,
    tiny_imagenet,
)
from fedstrata.data.datasets.base import DatasetSource, datasets

__all__ = [
    "DatasetSource",
    "cifar",
    "datasets",
    "digits",
    "heart_disease",
    "hub",
    "image_folder",
    "isic2019",
    "mnist",
    "table",
    "tiny_imagenet",
]

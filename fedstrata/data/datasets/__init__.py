"""The datasets that can be named: one module per family."""

from fedstrata.data.datasets import (
    amazon_reviews,
    cifar,
    digits,
    fraction,
    heart_disease,
    hub,
    image_folder,
    isic2019,
    mimic_notes,
    mnist,
    news,
    sentiment140,
    table,
    tiny_imagenet,
)
from fedstrata.data.datasets.base import DatasetSource, datasets

__all__ = [
    "DatasetSource",
    "amazon_reviews",
    "cifar",
    "datasets",
    "digits",
    "fraction",
    "heart_disease",
    "hub",
    "image_folder",
    "isic2019",
    "mimic_notes",
    "mnist",
    "news",
    "sentiment140",
    "table",
    "tiny_imagenet",
]

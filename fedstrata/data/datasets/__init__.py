"""The datasets that can be named: one module per family."""

from fedstrata.data.datasets import (
    amazon_reviews,
    cifar,
    digits,
    heart_disease,
    image_folder,
    mnist,
    news,
    sentiment140,
    table,
)
from fedstrata.data.datasets.base import DatasetSource, datasets

__all__ = [
    "DatasetSource",
    "amazon_reviews",
    "cifar",
    "datasets",
    "digits",
    "heart_disease",
    "image_folder",
    "mnist",
    "news",
    "sentiment140",
    "table",
]

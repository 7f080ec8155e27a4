"""Fetching datasets from the Hugging Face hub, only when asked to."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from fedstrata.data.cache import cache_directory
from fedstrata.errors import FedStrataError, unknown_name


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the hub: its repository and the folder of its Parquet shards."""

    repository: str
    folder: str


HUB_DATASETS = {
    "cifar10": HubDataset("uoft-cs/cifar10", "plain_text"),
    "cifar100": HubDataset("uoft-cs/cifar100", "cifar100"),
    "mnist": HubDataset("ylecun/mnist", "mnist"),
    "ag_news": HubDataset("fancyzhx/ag_news", "data"),
    "fashion_mnist": HubDataset("zalando-datasets/fashion_mnist", "fashion_mnist"),
}


def download_offer(name: str) -> str:
    """Complete a sentence about missing files with the way to fetch them, where there is one."""
    if name not in HUB_DATASETS:
        return ""
    return f", or fetch them with 'fedstrata download {name}' (which needs: pip install 'fedstrata[hub]')"


def download(name: str, destination: Path | None = None) -> Path:
    """Fetch the Parquet shards of a dataset into ``destination/<name>`` and return that folder.

    The default destination is the cache directory. Needs the ``hub`` extra. What is already there is not fetched again.
    """
    if name not in HUB_DATASETS:
        raise unknown_name("dataset that can be fetched called", name, HUB_DATASETS)
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise FedStrataError(
            f"Fetching '{name}' needs the package huggingface_hub; install it with: pip install 'fedstrata[hub]'."
        ) from None
    source = HUB_DATASETS[name]
    folder = (destination or cache_directory()) / name
    try:
        hub.snapshot_download(
            repo_id=source.repository,
            repo_type="dataset",
            allow_patterns=[f"{source.folder}/*.parquet"],
            local_dir=str(folder),
        )
    # The hub raises errors of its own, of its HTTP library and of the operating system, which share no other base.
    except Exception as error:
        raise FedStrataError(
            f"'{source.repository}' could not be fetched from the Hugging Face hub into '{folder}': {error}."
        ) from error
    return folder

"""Fetching datasets from the Hugging Face hub, only when asked to."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

from fedstrata.data.cache import cache_directory
from fedstrata.errors import FedStrataError, first_line, unknown_name


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
    "tiny_imagenet": HubDataset("zh-plus/tiny-imagenet", "data"),
}


HUB_FOLDER = "hub"
"""Where datasets lie that are named as on the hub."""
_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_CONVERTED = "refs/convert/parquet"
"""The branch on which the hub keeps Parquet shards that it made itself of other formats."""


def download_offer(name: str) -> str:
    """Complete a sentence about missing files with the way to fetch them, where there is one."""
    if name not in HUB_DATASETS:
        return ""
    return f", or fetch them with 'fedstrata download {name}' (which needs: pip install 'fedstrata[hub]')"


def checked_repository(name: str) -> str:
    """Let a name pass that a dataset can have on the hub, and that leads nowhere else on this machine."""
    if not _REPOSITORY.fullmatch(name):
        raise FedStrataError(
            f"'{name}' is no name of a dataset on the hub; write hub:owner/name, such as "
            "hub:zalando-datasets/fashion_mnist."
        )
    return name


def download(name: str, destination: Path | None = None) -> Path:
    """Fetch the Parquet shards of a dataset into ``destination/<name>`` and return that folder.

    ``hub:owner/name`` stands for any dataset of the hub, and goes into ``destination/hub/owner/name``. The default
    destination is the cache directory. Needs the ``hub`` extra. What is already there is not fetched again.
    """
    if name.startswith("hub:"):
        repository = checked_repository(name.removeprefix("hub:"))
        folder = (destination or cache_directory()) / HUB_FOLDER / repository
        _fetch(name, HubDataset(repository, ""), folder)
        if not any(folder.rglob("*.parquet")):
            _fetch(name, HubDataset(repository, ""), folder, _CONVERTED)
        return folder
    if name not in HUB_DATASETS:
        raise unknown_name("dataset that can be fetched called", name, HUB_DATASETS)
    folder = (destination or cache_directory()) / name
    _fetch(name, HUB_DATASETS[name], folder)
    return folder


def _fetch(name: str, source: HubDataset, folder: Path, revision: str | None = None) -> None:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise FedStrataError(
            f"Fetching '{name}' needs the package huggingface_hub; install it with: pip install 'fedstrata[hub]'."
        ) from None
    branch = {} if revision is None else {"revision": revision}
    try:
        hub.snapshot_download(
            repo_id=source.repository,
            repo_type="dataset",
            allow_patterns=[f"{source.folder}/*.parquet" if source.folder else "*.parquet"],
            local_dir=str(folder),
            **branch,
        )
    # The hub raises errors of its own, of its HTTP library and of the operating system, which share no other base.
    except Exception as error:
        raise FedStrataError(
            f"'{source.repository}' could not be fetched from the Hugging Face hub into '{folder}': "
            f"{first_line(error)}."
        ) from error

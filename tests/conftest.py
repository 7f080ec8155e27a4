"""Settings for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks import Table, note_attack
from hypothesis import settings

from fedstrata import plugins

# Properties are checked without a time limit per example: a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer to write down what attacks have come to; see ``tests/attacks.py``."""
    parser.addoption("--report", type=Path, help="the page that gets the table of attacks, docs/security.md")


def pytest_configure(config: pytest.Config) -> None:
    """Gather what tests perform, in the process that hears of all of them."""
    page = config.getoption("--report", None)
    if page is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table(page))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note what a test performs."""
    note_attack(item)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait without a word: on a busy machine what is quick may take long, and would be told."""
    monkeypatch.setattr("fedstrata.waiting.PATIENCE", 600.0)


@pytest.fixture(autouse=True, scope="session")
def nothing_in_the_cache() -> Iterator[None]:
    """Keep no decoded images in the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSTRATA_CACHE", "off")
        yield


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_disks() -> Iterator[None]:
    """Leave it to the system when files reach the disk: a process that is killed loses nothing by that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def fresh_imports() -> Iterator[None]:
    """Forget in the end what a test has imported, as a process does when it ends."""
    yield
    for file in plugins._imported.values():
        for registry, name in file.registered:
            registry.put(name, None)
    plugins._imported.clear()


@pytest.fixture
def fresh_methods(fresh_imports: None) -> Iterator[None]:
    """Forget the components that a page registers."""
    from fedstrata.diagnostics import diagnostics
    from fedstrata.losses import losses
    from fedstrata.methods import methods
    from fedstrata.scores import metrics

    known = {registry: set(registry.names()) for registry in (methods, losses, metrics, diagnostics)}
    yield
    for registry, before in known.items():
        for name in set(registry.names()) - before:
            registry.put(name, None)

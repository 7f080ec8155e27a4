"""Settings for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from fedstrata import plugins

# Properties are checked without a time limit per example: a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait without a word: on a busy machine what is quick may take long, and would be told."""
    monkeypatch.setattr("fedstrata.waiting.PATIENCE", 600.0)


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
    from fedstrata.losses import losses
    from fedstrata.methods import methods
    from fedstrata.scores import metrics

    known = {registry: set(registry.names()) for registry in (methods, losses, metrics)}
    yield
    for registry, before in known.items():
        for name in set(registry.names()) - before:
            registry.put(name, None)

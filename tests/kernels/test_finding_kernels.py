"""Where kernels cannot be used, runs go on without them, and say why once."""

from __future__ import annotations

import importlib.util
import warnings

import pytest

from fedstrata.errors import FedStrataWarning
from fedstrata.kernels import finding


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch):
    monkeypatch.setattr(finding, "_FOUND", {})


def test_without_triton_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(finding, "find_spec", lambda name: None)
    with warnings.catch_warnings(action="error"):
        assert finding.find_kernels("norms", "norms", lambda kernels: pytest.fail("must not be tried")) is None


def test_a_kernel_that_does_not_compile_is_told_once(monkeypatch):
    tried = []

    def trial(kernels):
        tried.append(kernels)
        raise RuntimeError("first line\nno such instruction")

    monkeypatch.setattr(finding, "find_spec", lambda name: importlib.util.find_spec("fedstrata"))
    with pytest.warns(FedStrataWarning, match=r"kernels for images are not used \(no such instruction\)"):
        assert finding.find_kernels("finding", "images", trial) is None
    with warnings.catch_warnings(action="error"):
        assert finding.find_kernels("finding", "images", trial) is None
    assert tried == [finding]


def test_kernels_that_pass_their_trial_are_used(monkeypatch):
    monkeypatch.setattr(finding, "find_spec", lambda name: importlib.util.find_spec("fedstrata"))
    assert finding.find_kernels("finding", "images", lambda kernels: None) is finding

"""What a release tells about itself in several places is the same in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fedstrata import __version__

ROOT = Path(__file__).parents[1]


def test_the_citation_and_the_changes_name_this_version():
    assert re.findall(r"(?m)^version: (.+)$", (ROOT / "CITATION.cff").read_text()) == [__version__]
    assert re.findall(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())[0] == __version__


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(name: str) -> dict[str, str]:
    """Read a lock file: each package with one version for some Python, every one with the hashes of its files."""
    text = (ROOT / "release" / name).read_text()
    entries = re.findall(r"(?m)^([a-z0-9-]+)==([^ ]+) [^-]*((?:--hash=sha256:[0-9a-f]{64}[ \\\n]*)+)", text)
    assert len(entries) == len(re.findall(r"(?m)^[a-z]", text)), "every package has hashes"
    return {package: version for package, version, _ in entries}


@pytest.mark.parametrize("requirement", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["flower"]])
def test_the_lock_file_has_what_a_deployment_asks_for(requirement):
    asked, versions = Requirement(requirement), locked("deployment.txt")
    assert asked.specifier.contains(versions[canonicalize_name(asked.name)])


def test_the_lock_file_without_cuda_is_the_other_one_without_it():
    whole, without = locked("deployment.txt"), locked("deployment-cpu.txt")
    gone = {name for name in whole if re.match(r"(nvidia|cuda)-|torch$|triton$", name)}
    assert {"torch", "triton"} <= gone
    assert without == {name: version for name, version in whole.items() if name not in gone}


def test_the_build_is_the_pinned_one():
    [backend] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert backend in PROJECT["optional-dependencies"]["release"]
    assert "==" in backend

"""The commit of the program is known in a checkout, after an installation from one, and where somebody tells it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedstrata.runs import provenance
from fedstrata.runs.describing import describe_environment


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    provenance.commit.cache_clear()
    yield
    provenance.commit.cache_clear()


def git(place: Path, *words: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *own, *words], cwd=place, check=True, capture_output=True, text=True).stdout.strip()


def test_a_checkout_tells_its_commit_and_whether_the_package_differs(tmp_path: Path) -> None:
    assert provenance._of_checkout(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert provenance._of_checkout(tmp_path) is None  # nothing was committed yet
    (tmp_path / "fedstrata").mkdir()
    (tmp_path / "fedstrata" / "a.py").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    commit = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    (tmp_path / "notes").write_text("beside the package")
    assert provenance._of_checkout(tmp_path) == commit
    (tmp_path / "fedstrata" / "a.py").write_text("two")
    assert provenance._of_checkout(tmp_path) == f"{commit}+changed"


def test_an_installation_from_a_repository_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a_package-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: a-package\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert provenance._of_installation("a-package") is None
    (place / "direct_url.json").write_text(json.dumps({"url": "x", "dir_info": {}}))
    assert provenance._of_installation("a-package") is None
    (place / "direct_url.json").write_text(
        json.dumps({"url": "x", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}})
    )
    assert provenance._of_installation("a-package") == "0123456789ab"
    assert provenance._of_installation("no-such-package") is None


def test_what_is_told_comes_first_and_stands_in_the_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTRATA_COMMIT", "abc123")
    assert describe_environment("cpu", {})["commit"] == "abc123"
    for told in ("0123456789ab", "0123456789ab" + 28 * "c"):
        provenance.commit.cache_clear()
        monkeypatch.setenv("FEDSTRATA_COMMIT", f"{told}+changed")
        assert provenance.commit() == "0123456789ab+changed"
    monkeypatch.delenv("FEDSTRATA_COMMIT")
    provenance.commit.cache_clear()
    monkeypatch.setattr(provenance, "_of_checkout", lambda place: None)
    monkeypatch.setattr(provenance, "_of_installation", lambda package: None)
    assert "commit" not in describe_environment("cpu", {})

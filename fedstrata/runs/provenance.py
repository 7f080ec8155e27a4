"""Which program a run was made with: the commit of its source, wherever that can be known."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

VARIABLE = "FEDSTRATA_COMMIT"
"""Tells the commit where the source was copied without its history, such as onto another machine."""
_LENGTH = 12
_WHOLE = re.compile(rf"\b([0-9a-f]{{{_LENGTH}}})[0-9a-f]{{28}}\b")


@cache
def commit() -> str | None:
    """Name the commit that the program runs from; none where nothing tells.

    It is what ``FEDSTRATA_COMMIT`` says, with the first twelve digits of a whole one; else that of the checkout around
    the package, marked where its files differ; else what pip noted when it installed the package from a repository
    (``direct_url.json``, PEP 610).
    """
    told = os.environ.get(VARIABLE)
    if told:
        return _WHOLE.sub(r"\1", told)
    return _of_checkout(Path(__file__).parents[2]) or _of_installation("fedstrata")


def _of_checkout(place: Path) -> str | None:
    if not (place / ".git").exists():
        return None
    try:
        told = [
            subprocess.run(["git", *words], cwd=place, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", f"--short={_LENGTH}", "HEAD"], ["status", "--porcelain", "fedstrata"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return told[0] + ("+changed" if told[1] else "")


def _of_installation(package: str) -> str | None:
    try:
        noted = json.loads(distribution(package).read_text("direct_url.json") or "{}")
        return str(noted["vcs_info"]["commit_id"])[:_LENGTH]
    except (PackageNotFoundError, ValueError, KeyError, TypeError):
        return None

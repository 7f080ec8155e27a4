"""What a release tells about itself in several places is the same in all of them."""

from __future__ import annotations

import re
from pathlib import Path

from fedstrata import __version__

ROOT = Path(__file__).parents[1]


def test_the_citation_and_the_changes_name_this_version():
    assert re.findall(r"(?m)^version: (.+)$", (ROOT / "CITATION.cff").read_text()) == [__version__]
    assert re.findall(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())[0] == __version__

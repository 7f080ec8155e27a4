"""The notebooks run from the first cell to the last, and are kept without outputs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["compare", "layers", "sites"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem == "layers" else [pytest.mark.slow], id=path.stem) for path in NOTEBOOKS],
)
def test_a_notebook_runs(path):
    pytest.importorskip("nbclient")
    pytest.importorskip("altair")
    from site_pages.notebooks import page

    begun = time.process_time()
    text = page(path, run=True)
    assert text.startswith("# ")
    assert "notebook-output" in text
    assert time.process_time() - begun < 60

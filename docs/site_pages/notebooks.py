"""Notebooks as pages: run anew, with what their cells print and show."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Cell = Mapping[str, Any]


def page(path: Path, run: bool) -> str:
    """Write a notebook as Markdown; with ``run`` its cells are executed first, otherwise they have no outputs."""
    notebook = executed(path) if run else json.loads(path.read_text(encoding="utf-8"))
    pieces = [piece for cell in notebook["cells"] for piece in _cell(cell)]
    title, *rest = pieces
    return "\n\n".join([title, f"*A notebook: [download it]({path.name}).*", *rest]) + "\n"


def executed(path: Path, seconds: int = 600) -> Mapping[str, Any]:
    """Run a notebook in its own folder; a cell that fails is an error."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=seconds, resources={"metadata": {"path": str(path.parent)}})
    client.execute(stderr=subprocess.DEVNULL)  # what the kernel says of itself; a cell's errors are raised here
    return dict(notebook)


def _cell(cell: Cell) -> Iterator[str]:
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] != "code":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        yield from _output(output)


def _output(output: Mapping[str, Any]) -> Iterator[str]:
    """Show an output in its richest form that a page can hold by itself."""
    if output["output_type"] == "stream":
        if output["name"] == "stdout":
            yield _text(output["text"])
        return
    data = output["data"]
    if "image/svg+xml" in data:
        yield f'<div class="notebook-figure">{"".join(data["image/svg+xml"])}</div>'
    elif "text/html" in data:
        yield f'<div class="notebook-table">{"".join(data["text/html"])}</div>'
    elif "text/markdown" in data:
        yield "".join(data["text/markdown"])
    elif "text/plain" in data:
        yield _text(data["text/plain"])


def _text(lines: str | list[str]) -> str:
    text = "".join(lines).rstrip("\n")
    return f"```{{ .text .notebook-output }}\n{text}\n```"

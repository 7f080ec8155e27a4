"""What MkDocs calls when it builds the site: formulas, and the pages that are made from code or lie elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_pages import at_a_glance, catalogue, drawn, notebooks, repository
from site_pages.mathematics import Mathematics

_DRAWN = re.compile(r"<!-- drawn: (\w+) -->")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Read formulas in all pages."""
    config.markdown_extensions.append(Mathematics())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in the folder of the documentation."""
    folder = Path(config.docs_dir)
    shown = {
        str(path.relative_to(folder).with_suffix(".md")): notebooks.page(path, config.extra["run_notebooks"])
        for path in sorted(folder.glob("notebooks/*.ipynb"))
    }
    made = {**catalogue.pages(), **repository.pages(), **shown, at_a_glance.PAGE: at_a_glance.page()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Draw what a page asks for, and set its links."""
    text = _DRAWN.sub(lambda found: drawn.PIECES[found.group(1)](), markdown)
    return repository.linked(text, page.file.src_uri)

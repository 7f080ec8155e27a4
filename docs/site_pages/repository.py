"""Pages that lie elsewhere in the repository, where people and other tools look for them, and links between all."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

ROOT = Path(__file__).parents[2]
PAGES = {
    "results/README.md": "results.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "CHANGELOG.md": "changes.md",
}
"""Where a page lies in the repository, and in the site."""
_LINK = re.compile(r"(?ms)(?P<code>^```.*?^```$|`[^`\n]+`)|\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def pages() -> dict[str, str]:
    """Read the pages, by their paths in the site."""
    return {page: (ROOT / source).read_text(encoding="utf-8") for source, page in PAGES.items()}


def linked(text: str, page: str) -> str:
    """Let the links of a page, which are right in the repository, lead to the same places in the site.

    What is no page of the site becomes plain words.

    >>> linked("[a](../docs/performance.md) [b](../SECURITY.md#files) [c](x.csv)", "results.md")
    '[a](performance.md) [b](security-policy.md#files) c'
    """
    source = next((source for source, shown in PAGES.items() if shown == page), join("docs", page))

    def link(found: re.Match[str]) -> str:
        words, target = found["words"], found["target"]
        if found["code"] or re.match(r"[a-z]+:|#", target):
            return found.group()
        file, mark, anchor = target.partition("#")
        place = normpath(join(dirname(source), file))
        if place not in PAGES and not place.startswith("docs/"):
            return words
        path = relpath(PAGES.get(place, place.removeprefix("docs/")), dirname(page) or ".")
        return f"[{words}]({path}{mark}{anchor})"

    return _LINK.sub(link, text)

"""Where the defaults of every method come from."""

import dataclasses
import re

import pytest

from fedstrata.methods import methods
from fedstrata.spec import sources

KNOWN = re.compile(r"(paper, \S.*|ours(; \S.*)?|[\w.-]+/[\w.-]+, \S.*)")


@pytest.mark.parametrize("name", methods.names())
def test_every_default_has_a_source(name):
    cls = methods.get(name)
    told, fields = sources(cls), [field.name for field in dataclasses.fields(cls)]
    assert sorted(told) == sorted(fields)
    assert not [source for source in told.values() if not KNOWN.fullmatch(source)]


def test_the_site_has_a_table_of_them():
    from site_pages import catalogue

    page = catalogue.pages()["methods/defaults.md"]
    for name in methods.names():
        for one in methods.describe(name)["parameters"]:
            [row] = re.findall(rf"(?m)^\| \[`{name}`\]\(.*?\) \| `{one['name']}` \|.*", page)
            assert row.endswith(f"| {one['source']} |".replace("|", "|"))

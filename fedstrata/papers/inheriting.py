"""What a part of a paper takes over: rows and columns that its paper describes, and those of a part that it is like.

A part names them in a list, or in a table with what it changes; a list may hold such tables, too:

    rows = ["FedAvg", { FedBABU = { at = "last" } }]

A row or a column begins with what the paper says of its name, or of the one that it is ``like``. That gives way to the
part's [experiment], which gives way to what the part itself says of its rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.spec import parse

ENTRIES: Mapping[str, str] = {"rows": "row", "columns": "column"}
"""What has entries, and what one of them is called."""
_LIKE = "like"

Entry = Mapping[str, Any]
"""What is said of a row or a column: changes of experiments, a number of its own, and which other one it is like."""
Entries = Mapping[str, Mapping[str, Entry]]
"""Rows and columns by their names."""


def entries_of_paper(content: Mapping[str, Any], where: str) -> Entries:
    """Read the rows and columns that a paper describes, of which one may be like another that stands above it."""
    found: dict[str, dict[str, Entry]] = {kind: {} for kind in ENTRIES}
    for kind, above in found.items():
        for name, entry in _read(content.get(kind, {}), kind, (), where).items():
            above[name] = _begun(name, entry, above, kind, where)
    return found


def entries_of_part(content: Mapping[str, Any], first: Mapping[str, Any], paper: Entries, where: str) -> Entries:
    """Read the rows and columns of a part, over those of the part that it is like; which there are, it says itself."""
    found: dict[str, Mapping[str, Entry]] = {}
    for kind in ENTRIES:
        below: Mapping[str, Entry] = first.get(kind, {})
        own = _read(content[kind], kind, {*below, *paper[kind]}, where) if kind in content else below
        found[kind] = {name: _laid_over(entry, below.get(name, {})) for name, entry in own.items()}
    return found


def completed(own: Entries, paper: Entries, experiment: Entry, shared: Entry, where: str) -> Entries:
    """Lay the rows and columns of a part over those of its paper, less what its [experiment] says itself.

    Methods' parameters in columns of the paper are for the parts that have these methods; others do without them.
    """
    rows = {
        name: _begun(name, entry, paper["rows"], "rows", where, lambda key: _says(experiment, key))
        for name, entry in own["rows"].items()
    }
    given = [entry.get("method") for entry in ({**shared, **experiment}, *rows.values())]
    methods = [text for text in given if isinstance(text, str)]
    columns = {
        name: _begun(
            name, entry, paper["columns"], "columns", where,
            lambda key: _says(experiment, key) or _is_of_another_method(key, methods),
        )
        for name, entry in own["columns"].items()
    }  # fmt: skip
    return {"rows": rows, "columns": columns}


def laid_over_cells(own: Mapping[str, Mapping[str, Entry]], first: Mapping[str, Mapping[str, Entry]]) -> dict[str, Any]:
    """Lay the cells of a part, by row and column, over those of the part that it is like.

    >>> laid_over_cells({"FedAvg": {"Heart": {"seeds": 3}}}, {"FedAvg": {"Heart": {"rounds": 9}, "CIFAR": {}}})
    {'FedAvg': {'Heart': {'rounds': 9, 'seeds': 3}, 'CIFAR': {}}}
    """
    laid = {row: dict(of_row) for row, of_row in first.items()}
    for row, of_row in own.items():
        of_first = laid.setdefault(row, {})
        for column, entry in of_row.items():
            of_first[column] = _laid_over(entry, of_first.get(column, {}))
    return laid


def flat(given: object, of: str, where: str) -> dict[str, Any]:
    """Write tables inside a table by the names by which ``--sweep`` has them, so that one can be laid over another.

    >>> flat({"rounds": 3, "partition": {"alpha": 0.1}}, "[experiment]", "'mine/table1.toml'")
    {'rounds': 3, 'partition.alpha': 0.1}
    """
    if not isinstance(given, Mapping):
        raise FedStrataError(f"The {of} of {where} is no table of keys of an experiment: '{given}'.")
    found: dict[str, Any] = {}
    for key, value in given.items():
        inner = value if isinstance(value, Mapping) else None
        found |= {key: value} if inner is None else {f"{key}.{name}": one for name, one in inner.items()}
    return found


def _read(given: object, kind: str, known: Collection[str], where: str) -> dict[str, Entry]:
    """Read a table or a list of entries; what is only named has to be known, and a row that is a text is a method."""
    found: dict[str, Entry] = {}
    listed = given if isinstance(given, list) else [given]
    for name in listed:
        if isinstance(name, str) and name not in known:
            raise _unknown(kind, name, known, where)
    for table in ({one: {}} if isinstance(one, str) else one for one in listed):
        if not isinstance(table, Mapping):
            raise FedStrataError(f"The {kind} of {where} are no table, and no list of names or tables: '{table}'.")
        for name, said in table.items():
            is_method = kind == "rows" and isinstance(said, str)
            found[name] = {"method": said} if is_method else flat(said, f"{ENTRIES[kind]} '{name}'", where)
    return found


def _begun(
    name: str, entry: Entry, paper: Mapping[str, Entry], kind: str, where: str,
    gives_way: Callable[[str], bool] = lambda key: False,
) -> Entry:  # fmt: skip
    """Lay an entry over the paper's one of its name, or of that which it is like, less the keys that give way."""
    other = str(entry.get(_LIKE, name))
    if _LIKE in entry and other not in paper:
        raise _unknown(kind, other, paper, where)
    first = {key: value for key, value in paper.get(other, {}).items() if not gives_way(key)}
    return _laid_over({key: value for key, value in entry.items() if key != _LIKE}, first)


def _laid_over(entry: Entry, first: Entry) -> Entry:
    """Lay an entry over another; with a text it replaces the parameters of the other one's text, too.

    >>> _laid_over({"partition": "iid"}, {"rounds": 3, "partition.alpha": 0.1})
    {'rounds': 3, 'partition': 'iid'}
    """
    return {**{key: value for key, value in first.items() if key in entry or not _says(entry, key)}, **entry}


def _says(said: Entry, key: str) -> bool:
    """Tell whether a key is among what is said, or the text that it is a parameter of.

    >>> _says({"partition": "iid"}, "partition.alpha"), _says({"partition.alpha": 0.1}, "partition.samples")
    (True, False)
    """
    return key in said or key.split(".")[0] in said


def _is_of_another_method(key: str, methods: Iterable[str]) -> bool:
    """Tell whether a key is a parameter of a method that none of these texts names.

    >>> _is_of_another_method("method.lws.beta", ["fedavg"]), _is_of_another_method("method.lws.beta", ["fedavg+lws"])
    (True, False)
    """
    words = key.split(".")
    if words[0] != "method" or len(words) < 3:
        return False
    return _plain(words[1]) not in {_plain(call.name) for text in methods for call in parse(text)}


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _unknown(kind: str, name: str, known: Collection[str], where: str) -> FedStrataError:
    return unknown_name(f"{ENTRIES[kind]} that {where} could take over called", name, known)

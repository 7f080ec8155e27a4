"""Tables as text, first of all that of the results: LaTeX for a paper, Markdown for everything else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedstrata.report.formats import ABSENT
from fedstrata.report.results import comparison_cells, comparison_notes
from fedstrata.report.rows import Row
from fedstrata.report.tables import Cell, Column

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    "−": r"\textminus{}",
    "±": r"\textpm{}",
    "–": r"\textendash{}",
    "·": r"\textperiodcentered{}",
    "…": r"\dots{}",
    "\u00a0": "~",
    "\u2011": "-",
    **{character: f"\\{character}" for character in "&%$#_"},
}
_NUMBER = re.compile(r"(?:< )?[+−-]?\d[\d.,]*(?: ± [\d.]+)?")


def escape_latex(text: str) -> str:
    r"""Write a text so that LaTeX sets it as it is.

    >>> escape_latex("fedprox(mu=0.01)_50%")
    'fedprox(mu=0.01)\\_50\\%'
    """
    return "".join(_SPECIAL.get(character, character) for character in text)


@dataclass(frozen=True)
class Typeset:
    """A table to be set: its columns, its lines, and the notes that belong to it."""

    columns: Sequence[Column]
    lines: Sequence[Sequence[Cell | str]]
    notes: Sequence[str] = ()

    @classmethod
    def of_results(cls, rows: Sequence[Row]) -> Typeset:
        """The results of a comparison."""
        return cls(*comparison_cells(rows), comparison_notes(rows))


LABEL = "tab:results"


def typeset_tables(table: Typeset, caption: str, label: str = LABEL) -> dict[str, str]:
    """Set a table in both languages: the texts by the names of their files."""
    return {"results.tex": latex_table(table, caption, label), "results.md": markdown_table(table)}


def latex_table(table: Typeset, caption: str, label: str = LABEL) -> str:
    """Set a table in LaTeX, with the packages booktabs and textcomp; the best of each column is bold."""
    columns, lines = table.columns, table.lines
    heads = " & ".join(escape_latex(column.title) for column in columns)
    body = [" & ".join(_latex_cell(cell, column) for cell, column in zip(line, columns, strict=True)) for line in lines]
    return "\n".join(
        [
            "% Made by FedStrata; needs \\usepackage{booktabs} and, before LaTeX of 2020, \\usepackage{textcomp}.",
            *(f"% {' '.join(note.split())}" for note in table.notes),
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escape_latex(caption)}}}",
            rf"  \label{{{label}}}",
            rf"  \begin{{tabular}}{{{''.join('r' if column.numeric else 'l' for column in columns)}}}",
            r"    \toprule",
            *_latex_groups(columns),
            rf"    {heads} \\",
            r"    \midrule",
            *(rf"    {line} \\" for line in body),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def markdown_table(table: Typeset) -> str:
    """Set a table in Markdown, with the notes below; the best of each column is bold."""
    columns, lines = table.columns, table.lines
    heads = [f"{column.group}: {column.title}" if column.group else column.title for column in columns]
    rules = ["---:" if column.numeric else "---" for column in columns]
    body = [[_markdown_cell(cell) for cell in line] for line in lines]
    written = [f"| {' | '.join(map(_escape_markdown, heads))} |", f"|{'|'.join(rules)}|"]
    written += [f"| {' | '.join(line)} |" for line in body]
    return "\n".join([*written, "", *(f"- {_escape_markdown(note)}" for note in table.notes), ""])


def _latex_cell(cell: Cell | str, column: Column) -> str:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    if cell.text == ABSENT:
        return "--"
    if column.numeric and _NUMBER.fullmatch(cell.text):
        number = cell.text.replace("−", "-").replace(" ± ", r" \pm ").replace(",", "{,}")
        return rf"$\mathbf{{{number}}}$" if cell.best else f"${number}$"
    text = escape_latex(cell.text)
    return rf"\textbf{{{text}}}" if cell.best else text


def _latex_groups(columns: Sequence[Column]) -> Iterator[str]:
    """The line above the headings, where neighbouring columns share a group, with rules below its names."""
    if not any(column.group for column in columns):
        return
    cells: list[str] = []
    rules: list[str] = []
    start = 0
    for end in range(1, len(columns) + 1):
        if end == len(columns) or columns[end].group != columns[start].group or not columns[start].group:
            name = escape_latex(columns[start].group)
            cells.append(rf"\multicolumn{{{end - start}}}{{c}}{{{name}}}" if name else "")
            rules += [rf"\cmidrule(lr){{{start + 1}-{end}}}"] if name else []
            start = end
    yield f"    {' & '.join(cells)} \\\\"
    yield f"    {' '.join(rules)}"


def _markdown_cell(cell: Cell | str) -> str:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    text = _escape_markdown(cell.text)
    return f"**{text}**" if cell.best else text


def _escape_markdown(text: str) -> str:
    """Keep a text from being read as markup, also as HTML.

    >>> _escape_markdown("a_b|<i>")
    'a\\\\_b\\\\|&lt;i>'
    """
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(text.split(" "))).replace("<", "&lt;")

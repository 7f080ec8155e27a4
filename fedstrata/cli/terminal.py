"""What the command line says, and where: results on standard output, everything else on standard error."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fedstrata.errors import FedStrataError, FedStrataWarning, mistake_of_others
from fedstrata.waiting import Waiting

results = Console(highlight=False)
messages = Console(stderr=True, highlight=False)


class Stopped(Exception):  # noqa: N818 - not an error
    """The user has stopped the command; the message says what is saved and how to go on."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def print_plain(text: str) -> None:
    """Write text to standard output as it is."""
    sys.stdout.write(text)


def print_json(content: Any) -> None:
    """Write the one JSON document of a command to standard output; what is not a finite number becomes null."""
    from fedstrata.files import to_json

    print_plain(to_json(content))


def new_table(*columns: str, right: Collection[str] = ()) -> Table:
    """Begin a table without frames; columns named in ``right`` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


_LETTERS, _BETWEEN = 7, 2
"""How many characters of a name must stay in a line where numbers are to stay whole, and how many part columns."""


def print_table(table: Table) -> None:
    """Show a table on standard output: where there is room, names are broken into lines, and numbers are not.

    Names are broken between words, if there is room for the longest ones.
    """
    numbers = [column for column in table.columns if column.justify == "right"]
    names = [column for column in table.columns if column.justify != "right"]
    left = results.width - sum(map(_longest, numbers)) - _BETWEEN * (len(table.columns) - 1)
    if len(names) * _LETTERS <= left:
        for column in numbers:
            column.no_wrap = True
    words = [_longest(column, words=True) for column in names]
    if sum(words) <= left:
        for column, length in zip(names, words, strict=True):
            column.min_width = length
    results.print(table)


def _longest(column: Column, words: bool = False) -> int:
    """The length of the longest entry of a column, or of the longest word in it."""
    texts = [str(cell) for cell in (column.header, *column.cells)]
    return max(cell_len(part) for text in texts for part in (text.split() if words else [text]) or [""])


def print_line(line: str) -> None:
    """Show a line of a log on standard error as it is: what others wrote is no markup."""
    messages.print(Text(line), soft_wrap=True)


def print_error(sentence: str) -> None:
    """Say in one line what went wrong."""
    _print_line("Error", sentence, "bold red")


def _print_line(word: str, sentence: str, style: str) -> None:
    messages.print(Text.assemble((f"{word}:", style), " ", " ".join(sentence.split())), soft_wrap=True)


@contextmanager
def telling(what: str, quiet: bool = False) -> Iterator[None]:
    """Tell on standard error what is being done: at once in a terminal, elsewhere only where it takes long."""
    with telling_all(quiet) as tell:
        tell(what)
        yield


@contextmanager
def telling_all(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Tell one thing after the other that is being done, as :func:`telling` does: yield what takes the words."""
    if quiet:
        yield lambda words: None
    elif messages.is_terminal:
        with messages.status("") as status:
            yield lambda words: status.update(Text(words))
    else:
        waiting = Waiting(lambda words: messages.print(Text(words), soft_wrap=True))
        try:
            yield waiting.begin
        finally:
            waiting.end()


@contextmanager
def guarded(debug: bool) -> Iterator[None]:
    """Run a command: warnings become clean lines, errors one sentence and an exit code; tracebacks only to debug."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", FedStrataWarning)
        warnings.showwarning = _warning_printer(debug)
        try:
            yield
            sys.stdout.flush()
        except (typer.Exit, SystemExit):
            raise
        except BrokenPipeError:
            # Whoever read the output has had enough of it; nothing may be written to the pipe when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (Exception, KeyboardInterrupt) as error:
            if debug:
                traceback.print_exc()
            sentence, exit_code = explain(error)
            print_error(sentence) if not isinstance(error, Stopped) else _print_line("Stopped", sentence, "bold")
            raise typer.Exit(exit_code) from None


def explain(error: BaseException) -> tuple[str, int]:
    """Put an exception into a sentence and an exit code."""
    if isinstance(error, Stopped):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "The command was interrupted.", 130
    if isinstance(error, FedStrataError):
        return str(error), 2
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "There is not enough memory; train fewer clients at once with --chunk, or use a smaller --batch-size.", 2
    if isinstance(error, OSError):
        where = f"'{error.filename}': " if error.filename else ""
        return f"The system refuses: {where}{(error.strerror or str(error)).lower()}.", 2
    if mistake := mistake_of_others(error):
        return f"{mistake} --debug shows the whole traceback.", 2
    what = f"{type(error).__name__}: {error}"
    return f"This is a bug in FedStrata ({what}); please report it with the traceback that --debug shows.", 1


def _warning_printer(debug: bool) -> Any:
    """Show each warning of FedStrata once, on a line of its own; those of other packages only to debug."""
    shown: set[str] = set()
    print_other = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, FedStrataWarning):
            if str(message) not in shown:
                shown.add(str(message))
                _print_line("Warning", str(message), "bold yellow")
        elif debug:
            print_other(message, category, filename, lineno, file, line)

    return show

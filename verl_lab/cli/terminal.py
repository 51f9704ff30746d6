"""Where commands print: tables and progress on a terminal, plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

OUT = Console(highlight=False, soft_wrap=True)
"""Results. Lines are never broken, so that they can be searched and cut."""

ERR = Console(stderr=True, highlight=False, soft_wrap=True)
"""Errors and remarks."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of text: a table on a terminal, tab-separated lines under a head in a pipe."""
    if not OUT.is_terminal:
        for row in (columns, *rows):
            OUT.file.write("\t".join(cell.replace("\n", " ") for cell in row) + "\n")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(_plain, row))
    OUT.print(table)


def print_line(text: str = "") -> None:
    """Prints text as it is: square brackets are no markup here, models and users write them."""
    OUT.print(text, markup=False, emoji=False)


def print_error(text: str) -> None:
    """Prints a message for a person to the error output."""
    ERR.print("Error:", style="bold red", end=" ")
    ERR.print(text, markup=False, emoji=False)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")

"""Tables for a terminal in which nothing is cut: words are folded, numbers kept whole."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

_FILE_COLUMNS = 120
"""Width where standard output is no terminal: a file, a CI log."""


def console() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS)


def table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table: columns of words that may be folded, then columns of numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in words:
        made.add_column(head, overflow="fold")
    for head in numbers:
        made.add_column(head, justify="right", no_wrap=True)
    return made

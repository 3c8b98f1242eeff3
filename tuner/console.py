"""Where results are shown."""

from __future__ import annotations

import sys

from rich.console import Console

WHOLE = 10_000
"""Columns of what is no terminal: nothing is cut there."""


def results_console() -> Console:
    """For results, on stdout; where that is closed (`>&-`), nothing is shown."""
    return Console() if sys.stdout is not None and sys.stdout.isatty() else Console(width=WHOLE)

"""report.html of one folder."""

from __future__ import annotations

from pathlib import Path

from reports.page import run_page
from reports.run import Say, read_run, silent
from tuner.pages import PAGE
from tuner.records import write_text


def build(folder: Path, say: Say = silent) -> Path:
    """Writes the page of the run in a folder, whole or not at all, from its records alone.

    Args:
        say: as in read_run.

    Raises:
        InputError: there is no run.
        OSError: the folder cannot be written.
    """
    page = folder / PAGE
    write_text(page, run_page(read_run(folder, say)))
    return page

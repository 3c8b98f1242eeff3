"""report.html beside a run's other files, made by the package `reports` where what it draws with is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

PAGE = "report.html"

LIBRARIES = ("matplotlib", "pygments")
"""What `reports` needs beyond what tuning does."""

OFF = "LNL_HTML"
"""Set to "off", this variable of the environment keeps runs from building the page, which takes some seconds."""


def is_wanted() -> bool:
    """Whether a run should have a page."""
    return os.environ.get(OFF) != "off"


def write_page(folder: Path) -> tuple[Path | None, str | None]:
    """Builds the page of a finished run.

    Returns:
        Its path, or why there is none, as a sentence; neither where it is not wanted.

    Raises:
        InputError: the folder has no run.
        OSError: the folder cannot be written.
    """
    if not is_wanted():
        return None, None
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        return None, (f"report.html was not written, since {missing[0]} is not installed; install it, and python -m reports "
                      f"{folder} writes it")
    from reports.build import build

    return build(folder), None

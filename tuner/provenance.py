"""Where and when results were made."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

DISTRIBUTION = "lnl-tuner"
_ROOT = Path(__file__).resolve().parent.parent


def now() -> str:
    """The current time, UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@functools.cache
def sources_digest() -> str:
    """A digest of all that decides what kernels there are and how they are rendered: the files of codegen/ and templates/."""
    digest = hashlib.sha256()
    for path in sorted([*_ROOT.glob("codegen/**/*.py"), *_ROOT.glob("templates/*.j2")]):
        digest.update(f"{path.relative_to(_ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def version() -> str:
    """The git revision of these sources ("+" where they were changed since), or the version of the installed package.

    $LNL_REVISION names the revision of sources that were copied without their history.
    """
    if named := os.environ.get("LNL_REVISION"):
        return named
    if (_ROOT / ".git").exists():
        revision = _git("rev-parse", "--short=12", "HEAD")
        if revision:
            return f"{revision}+" if _git("status", "--porcelain", "--untracked-files=no") else revision
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _git(*arguments: str) -> str:
    """What git says; nothing where it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

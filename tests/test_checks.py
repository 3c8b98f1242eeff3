"""The checks before a commit are those of CI."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOOKS = ROOT / ".pre-commit-config.yaml"
CI = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()


def entries() -> list[str]:
    """What the hooks run; a folded entry is one line."""
    text = re.sub(r"entry: >-\n((?: {10}.*\n)+)", lambda found: f"entry: {' '.join(found[1].split())}\n",
                  HOOKS.read_text(encoding="utf-8"))
    return re.findall(r"^ +entry: (.*)$", text, flags=re.MULTILINE)


def test_a_commit_is_checked_as_ci_checks_it() -> None:
    *checks, tests = entries()
    assert checks == [line for line in CI if line.startswith(("ruff", "mypy"))] == ["ruff check .", "mypy"]
    assert "python -m pytest -n auto" in CI and tests.startswith("python -m pytest ")


def test_the_quick_tests_are_there() -> None:
    files = [word for word in shlex.split(entries()[-1]) if word.startswith("tests/")]
    assert len(files) > 3 and all((ROOT / file).is_file() for file in files)

"""docs/commands.md names every option, status and variable of the environment that there is, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from reports import cli as reports
from tuner import cli as tuner
from tuner.bench import clocks, join, profile, promotion
from tuner.records import Status

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
NEEDS_NO_WORDS = {"--help", "--debug"}

Main = Callable[[Sequence[str]], int]
COMMANDS: dict[str, list[tuple[Main, list[str]]]] = {
    "python -m tuner": [(tuner.main, [])],
    "python -m tuner verify": [(tuner.main, ["verify"])],
    "python -m tuner bench": [(tuner.main, ["bench"]), (join.main, []), (clocks.main, []), (promotion.main, [])],
    "python -m tuner.bench.profile": [(profile.main, [])],
    "python -m tuner wisdom": [(tuner.main, ["wisdom", name]) for name in ("list", "import", "export", "forget")],
    "python -m reports": [(reports.main, list(words)) for words in ((), ("index",), ("pictures",))],
}
"""The commands that a section describes."""


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def synopsis(text: str) -> str:
    """Its indented lines."""
    return "\n".join(line for line in text.splitlines() if line.startswith("    "))


@pytest.mark.parametrize("title", COMMANDS)
def test_every_option_is_described_and_every_described_one_exists(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    offered: set[str] = set()
    for main, words in COMMANDS[title]:
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        offered |= set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", capsys.readouterr().out, flags=re.MULTILINE))
    described = set(OPTION.findall(section(title)))
    assert offered - NEEDS_NO_WORDS <= described, f"docs/commands.md does not describe {sorted(offered - described)}"
    strange = set(OPTION.findall(synopsis(section(title)))) - offered
    assert not strange, f"there is no {sorted(strange)}"


def test_every_status_has_its_meaning() -> None:
    named = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", section("python -m tuner"), flags=re.MULTILINE)))
    assert set(named) == {status.value for status in Status} - {Status.REFUSED.value}


def test_every_variable_of_the_environment_is_in_the_table() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for folder in ("codegen", "reports", "tuner")
                        for path in (ROOT / folder).rglob("*.py"))
    read = set(re.findall(r"\"(LNL_[A-Z]+)\"", sources))
    assert read == set(re.findall(r"`(LNL_[A-Z]+)`", section("Environment")))

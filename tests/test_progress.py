"""What there is to see of a run while it goes on, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from tests.test_records import MEASURED
from tuner import console
from tuner.outcome import Event
from tuner.progress import ProgressBar

WIDE = 400


class Clock:
    """Shows a second more whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def trying(done: int) -> Event:
    return Event("trying candidates", done, 3, MEASURED, {"hang": 2})


def shown(terminal: bool, fails: bool = False) -> str:
    stream = io.StringIO()
    bar = ProgressBar(Console(file=stream, force_terminal=terminal, width=WIDE, color_system=None), Clock())
    with suppress(RuntimeError), bar:
        bar.stage("opening the device")
        bar.stage("listing the candidates")
        if fails:
            raise RuntimeError
        for done in range(1, 4):
            bar.show(trying(done))
        bar.show(Event("changing one parameter at a time", 0, 1, MEASURED, {}))
        bar.stage("drawing report.html")
    return stream.getvalue()


def test_elsewhere_each_stage_is_one_line_when_it_has_ended() -> None:
    assert shown(terminal=False).splitlines() == [
        "tuner: opening the device: 1.0 s",
        "tuner: listing the candidates: 1.0 s",
        "tuner: trying candidates: 3/3, 1.0 s, best 2.25 us measured row_warp; rejected: 2 hang",
        "tuner: changing one parameter at a time: 1.0 s",
        "tuner: drawing report.html: 1.0 s"]


def test_what_goes_wrong_before_the_run_begins_stands_alone() -> None:
    assert shown(terminal=False, fails=True) == ""


def test_on_a_terminal_every_stage_is_shown_while_it_goes_on() -> None:
    text = shown(terminal=True)
    for name in ("opening the device", "listing the candidates", "trying candidates", "changing one parameter at a time",
                 "drawing report.html"):
        assert name in text
    assert "tuner:" not in text and "3/3" in text and "best 2.25 us measured row_warp; rejected: 2 hang" in text


def test_a_pipe_cuts_nothing_and_a_terminal_is_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert console.results_console().width == console.WHOLE
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert console.results_console().width == 77

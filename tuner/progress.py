"""The progress bar and the final tables on the console."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from codegen.dtypes import CLASS_ERRORS
from codegen.problem import GRADIENTS
from tuner.outcome import Event, TuneResult
from tuner.records import Record
from tuner.wording import gpu_text, problem_text, rows_text, share_of_floor, time_text


class ProgressBar:
    """Shows a run's stages as they come: how far each is, the best so far, and what was rejected. A context manager.

    On a terminal something always moves. Elsewhere each stage is a line when it has ended; those before the first event wait for
    it, as what a user has to mend until then is to stand alone.

    Args:
        console: where.
        clock: seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[steps]}"), TimeElapsedColumn(),
            TextColumn("{task.fields[found]}"), console=console, disable=not console.is_terminal)
        self._stage: _Stage | None = None
        self._lines: list[str] = []
        self._begun = False

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._end()
        self._progress.stop()

    def stage(self, name: str) -> None:
        """Something has begun of which nobody knows how many steps it has."""
        self._end()
        self._stage = _Stage(name, self._progress.add_task(name, total=None, steps="", found=""), self._clock())

    def show(self, event: Event) -> None:
        """One step further."""
        self._begun = True
        if self._stage is None or event.stage != self._stage.name:
            self.stage(event.stage)
            assert self._stage is not None
        if event.total == 1 and event.done == 0:  # a stage without steps
            return
        self._stage.steps, self._stage.found = f"{event.done}/{event.total}", _found(event)
        self._progress.update(self._stage.task, completed=event.done, total=event.total, steps=self._stage.steps,
                              found=self._stage.found)

    def _end(self) -> None:
        """Of the stage that goes on."""
        stage, self._stage = self._stage, None
        if stage is None:
            return
        self._progress.stop_task(stage.task)
        if not stage.steps:
            self._progress.update(stage.task, completed=1, total=1)
        if not self._console.is_terminal:
            parts = filter(None, (stage.steps, f"{self._clock() - stage.began:.1f} s", stage.found))
            self._lines.append(f"tuner: {stage.name}: {', '.join(parts)}")
        while self._begun and self._lines:
            self._console.print(self._lines.pop(0), markup=False, highlight=False, soft_wrap=True)


@dataclass(slots=True)
class _Stage:
    """What goes on, since when, and how far it is."""

    name: str
    task: TaskID
    began: float
    steps: str = ""
    found: str = ""


def _found(event: Event) -> str:
    best = "nothing valid yet" if event.best is None else f"best {time_text(event.best)} {event.best.config.variant}"
    rejected = ", ".join(f"{count} {status}" for status, count in event.rejected.items())
    return f"{best}; rejected: {rejected}" if rejected else best


def best_table(result: TuneResult) -> Table:
    """The best config of each variant."""
    kind = result.winner.time_kind if result.winner else "measured"
    table = Table(title=f"{problem_text(result.info)}, on {gpu_text(result)}: the best of each variant")
    table.add_column("variant", no_wrap=True)
    table.add_column("parameters")
    for name in (f"{kind} us", "floor / time", "worst error / bound"):
        table.add_column(name, justify="right")
    for record in result.best_by_variant().values():
        parameters = " ".join(f"{name}={value}" for name, value in record.config.params)
        table.add_row(record.config.variant, parameters, f"{record.best_us:.2f}", f"{share_of_floor(result, record):.0%}",
                      f"{record.worst_bound_ratio:.2f}")
    return table


def error_table(result: TuneResult, winner: Record) -> Table:
    """The winner's errors, gradient by gradient, against what is allowed."""
    limit = CLASS_ERRORS[result.info.accuracy]
    table = Table(title=f"Errors of the winner, validated {rows_text(winner)}")
    table.add_column("gradient")
    for name in ("normwise", "allowed", "worst element / bound"):
        table.add_column(name, justify="right")
    for name in GRADIENTS:
        if name in winner.errors:
            error = winner.errors[name]
            table.add_row(name, f"{error.normwise:.2e}", f"{limit:g}", f"{error.bound_ratio:.3f}")
    return table

"""The progress bar and the final tables on the console."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from codegen.dtypes import CLASS_ERRORS
from codegen.problem import GRADIENTS
from tuner.outcome import Event, TuneResult
from tuner.records import Record
from tuner.wording import gpu_text, problem_text, rows_text, share_of_floor, time_text


class ProgressBar:
    """Shows a run's events as they come: how far it is, the best so far, and what was rejected. A context manager."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[found]}"), console=console)
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        """One step further."""
        if event.stage != self._stage or self._task is None:
            self._stage = event.stage
            self._task = self._progress.add_task(event.stage, total=event.total, found="")
        self._progress.update(self._task, completed=event.done, total=event.total, found=_found(event))


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
    table = Table(title=f"Errors of the winner, validated at {rows_text(winner)} rows")
    table.add_column("gradient")
    for name in ("normwise", "allowed", "worst element / bound"):
        table.add_column(name, justify="right")
    for name in GRADIENTS:
        if name in winner.errors:
            error = winner.errors[name]
            table.add_row(name, f"{error.normwise:.2e}", f"{limit:g}", f"{error.bound_ratio:.3f}")
    return table

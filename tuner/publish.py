"""The folder of one tuning run: trials.jsonl while it runs, and best.cu, best.h, best.json and report.md at its end."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from codegen.render import render
from tuner.artifact import Choice, write_artifact
from tuner.errors import InputError
from tuner.outcome import TuneResult
from tuner.records import Journal, Record, RunInfo, write_text
from tuner.report import best_json, report_markdown

TRIALS, REPORT = "trials.jsonl", "report.md"
BEST = ("best.cu", "best.h", "best.json")


class Folder:
    """Takes a run's records as they come, and its result. A context manager round the run.

    Raises:
        InputError: the folder cannot be written.
    """

    def __init__(self, path: Path, info: RunInfo) -> None:
        self._path = path
        try:
            self._journal = Journal(path / TRIALS, info)
        except OSError as error:
            raise InputError(f"cannot write to {path} ({error.strerror}); choose another folder with --out") from error

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._journal.close()

    def add(self, record: Record) -> None:
        """Appends one record to trials.jsonl."""
        self._journal.add(record)

    def finish(self, result: TuneResult, interrupted: bool, choose: Choice) -> list[Path]:
        """Writes everything else and returns the paths of all files.

        Without a winner there is no best.*, and those of an earlier run go, unless this one was interrupted. `choose` gives the
        configs for row counts at which the winner is not fit.
        """
        self._journal.settle(result.records)
        write_text(self._path / REPORT, report_markdown(result, interrupted))
        best = [self._path / name for name in BEST]
        if result.winner is not None:
            write_artifact(best[0], best[1], render(result.problem, result.winner.config), result, choose)
            write_text(best[2], best_json(result))
        elif not interrupted:
            for path in best:
                path.unlink(missing_ok=True)
        return [path for path in (*best, self._path / TRIALS, self._path / REPORT) if path.exists()]

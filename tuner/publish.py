"""The folder of one tuning run: trials.jsonl while it runs, and best.cu, best.h, best.json and its reports at its end."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from codegen.render import render
from tuner.artifact import Choice, write_artifact
from tuner.candidates import Space
from tuner.errors import InputError
from tuner.known import Known, read_best
from tuner.outcome import TuneResult
from tuner.pages import PAGE, is_wanted, write_page
from tuner.records import Journal, Record, RunInfo, write_text
from tuner.report import best_json, report_markdown, run_end
from tuner.study.earlier import TakenUp, read_earlier, take_up
from tuner.wording import time_text

TRIALS, REPORT = "trials.jsonl", "report.md"
BEST_CU, BEST_H, BEST_JSON = "best.cu", "best.h", "best.json"

_TEMPORARY = re.compile(r"\.(trials|report|best)\.(jsonl|md|html|cu|h|json)\.[a-z0-9_]{8}")
"""What records.write_bytes calls a file of this folder while it writes it."""

NOISE = 1.02
"""Measured again, the same kernel takes up to so many times as long: the later of such results is as good."""


@dataclass(frozen=True, slots=True)
class Published:
    """What a run left.

    Attributes:
        written: paths of the files it wrote.
        kept: a sentence, where the best.* of an earlier run stay.
        no_page: a sentence, where report.html could not be made.
    """

    written: tuple[Path, ...]
    kept: str | None
    no_page: str | None = None


class Folder:
    """Takes a run's records as they come, and its result. A context manager round the run, which has the folder to itself.

    Args:
        path: where; it is made if need be.
        info: what the run is made under.
        resume: the run's space, where it goes on with what an earlier run has left here; None: it begins anew. What an unfinished
            run has left is kept beside then.
        may_resume: whether a run with the same arguments could be told to go on with what was kept beside.

    Attributes:
        taken: what the run need not try.
        said: what became of an earlier run, as a sentence; empty where there is nothing to say.

    Raises:
        InputError: the folder cannot be written, another run is writing to it, or the run there is no part of this one. Nothing
            was changed.
    """

    def __init__(self, path: Path, info: RunInfo, resume: Space | None = None, may_resume: bool = True) -> None:
        self._path = path
        self.taken, self.said = TakenUp(), ""
        try:
            self._lock = _locked(path)
            try:
                self._begin(info, resume, may_resume)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise InputError(f"cannot write to {path} ({error.strerror}); choose another folder with --out") from error

    def _begin(self, info: RunInfo, resume: Space | None, may_resume: bool) -> None:
        for path in (self._path / name for name in (TRIALS, BEST_CU, BEST_H, BEST_JSON, REPORT, PAGE)):
            if path.is_dir():  # or it would be seen when all is found
                raise InputError(f"{path} is a folder, where a file is to be written; choose another folder with --out")
        trials = self._path / TRIALS
        if resume is None:
            self.said = _kept_beside(trials, may_resume)
        elif (earlier := read_earlier(trials)) is None:
            self.said = f"there is no run to resume in {self._path}; a new one begins"
        else:
            self.taken = take_up(earlier, info, resume)
            self.said = self.taken.said
        self._journal = Journal(trials, info, (*self.taken.records, *self.taken.aside))

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._journal.close()
        os.close(self._lock)

    def add(self, record: Record) -> None:
        """Appends one record to trials.jsonl."""
        self._journal.add(record)

    def finish(self, result: TuneResult, interrupted: bool, choose: Choice, on_stage: Callable[[str], None] = lambda stage: None,
               has_time_for_page: Callable[[], bool] = lambda: True) -> Published:
        """Writes everything else.

        trials.jsonl, report.md and report.html are of this run. The best.* of an earlier run stay where this one found nothing as
        good; see why_kept.

        A process that is killed here leaves nothing that contradicts itself: the old best.json goes when the new best.cu and
        best.h are ready, then these are written, then the new best.json, report.md, and after the old report.html is gone
        trials.jsonl with the word that the run is finished. Where there is a best.json, best.cu and best.h are hence its own. The
        new page is built from all of that.

        Args:
            result: what the run found.
            interrupted: whether the user ended it.
            choose: gives the configs for row counts at which the winner is not fit.
            on_stage: told what begins.
            has_time_for_page: asked when all else is done; else report.html is left out, which is said.

        Raises:
            NoValidKernel, ToolchainError: as `choose`.
            OSError: the folder cannot be written.
        """
        cu, header, best, report = (self._path / name for name in (BEST_CU, BEST_H, BEST_JSON, REPORT))
        kept = why_kept(read_best(best), result)
        written = [self._path / TRIALS, report]
        if result.winner is not None and kept is None:
            on_stage("choosing the configs of best.cu")
            against = write_artifact(cu, header, render(result.problem, result.winner.config), result, choose, best)
            result = replace(result, checks=(*result.checks, *against))
            write_text(best, best_json(result))
            written = [cu, header, best, *written]
        draws = is_wanted() and has_time_for_page()
        no_page = None if draws or not is_wanted() else (
            f"{PAGE} was left out, since time was up; python -m reports {self._path} writes it")
        write_text(report, report_markdown(result, interrupted, kept, no_page))
        (self._path / PAGE).unlink(missing_ok=True)
        self._journal.settle((*result.records, *self.taken.aside), not interrupted and result.lost is None,
                             run_end(result, interrupted))
        page = None
        if draws:
            on_stage(f"drawing {PAGE}")
            page, no_page = write_page(self._path)
        return Published((*written, *filter(None, [page])), kept, no_page)


def _locked(path: Path) -> int:
    """Makes the folder and locks it, until the returned descriptor is closed or this process ends.

    Raises:
        InputError: another process has it.
        OSError: it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise InputError(f"another run is writing to {path}; wait for its end, or choose another folder with --out") from error
    except OSError:
        return descriptor  # some network file systems know no locks
    for entry in path.iterdir():
        if _TEMPORARY.fullmatch(entry.name):  # of a run that was killed: whoever would still need it had the lock
            entry.unlink(missing_ok=True)
    return descriptor


def _kept_beside(trials: Path, may_resume: bool) -> str:
    """Moves a trials.jsonl that is of a run that was not finished, or cannot be read, out of the way, and says so; nothing where
    there is none."""
    try:
        earlier = read_earlier(trials)
    except InputError:
        return f"the first line of {trials} could not be read; the file is kept in {_moved(trials, 'unread')}"
    if earlier is None or earlier.finished or not earlier.records:
        return ""
    beside = _moved(trials, re.sub(r"[^\w-]", "-", earlier.info.date[:19]))
    how = f"; to go on with them, rename that to {trials.name} and add --resume" if may_resume else ""
    return (f"the run of {earlier.info.date} in {trials.parent} was not finished, and its {len(earlier.records)} trials are kept "
            f"in {beside}{how}")


def _moved(trials: Path, mark: str) -> str:
    """Renames the file to the first free name with the mark, and returns that."""
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (trials.with_name(f"{trials.stem}-{mark}{ending}{trials.suffix}") for ending in endings)
    return trials.rename(next(path for path in names if not path.exists())).name


def why_kept(earlier: Known | None, result: TuneResult) -> str | None:
    """Why the best.* of an earlier run stay, as a sentence; None where there are none, or this run's take their place.

    They stay where this run has no winner. They go where they answer another question (another shape, other gradients, ...), were
    predicted while these were measured, or were made by other sources or on another GPU; else unless they are faster.
    """
    if earlier is None:
        return None
    before, winner = earlier.winner, result.winner
    that = f"those of {earlier.info.date} ({time_text(before)}) stay"
    if winner is None:
        return f"This run found no kernel for best.cu, best.h and best.json; {that}."
    if _question(earlier.info) != _question(result.info):
        return None
    if before.measured != winner.measured:
        predicted = f"This run only predicted times and did not write best.cu, best.h and best.json; {that}."
        return predicted if before.measured else None
    if _made_by(earlier.info) != _made_by(result.info) or winner.best_us <= NOISE * before.best_us:
        return None
    return f"This run's winner ({time_text(winner)}) is no better than the best.cu, best.h and best.json there were; {that}."


def _question(info: RunInfo) -> tuple[object, ...]:
    """What two runs must agree in to be about the same kernels."""
    return info.shape, info.dtype, info.param_dtype, info.wants, info.deterministic, info.accuracy, info.target, info.regime


def _made_by(info: RunInfo) -> tuple[object, ...]:
    """What two runs must agree in for times of one kind to be comparable; no time depends on the compiler of the CPU."""
    return info.version, info.device if info.measures else None

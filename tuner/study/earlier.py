"""An earlier run of the same folder: what of its trials.jsonl a run that goes on with it may keep."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError
from tuner.candidates import Space
from tuner.errors import InputError
from tuner.records import END, FINISHED, LONGEST_US, Record, RunInfo, Status
from tuner.wisdom.source import source_digest

_MUST_AGREE = {
    "shape": "shape", "dtype": "data type", "param_dtype": "data type of the parameters", "wants": "gradients",
    "accuracy": "accuracy class", "deterministic": "deterministic", "eps": "eps", "regime": "regime", "seed": "seed",
    "executor": "executor", "device": "device", "target": "target"}
"""What two runs must agree in for the records of one to be the other's: field of RunInfo, and how to call it."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """A trials.jsonl.

    Attributes:
        info: its header.
        records: one for each candidate that was tried, the last where there are several.
        damaged: lines that say nothing; a run that is killed leaves one at most.
        finished: whether the run came to its end.
        not_run: those of candidates that were not tried.
        end: what the run said of itself when it ended, as JSON values; none where it was killed, or does not say.
    """

    info: RunInfo
    records: tuple[Record, ...]
    damaged: int
    finished: bool
    not_run: tuple[Record, ...] = ()
    end: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TakenUp:
    """What a run keeps of an earlier one.

    Attributes:
        records: of candidates that it need not try.
        aside: other finished trials, whose configs are no candidates of this run: they stay in the file, for a run of which they
            are.
        said: what became of the others, as a sentence.
        clause: what a report should say of the records, as a clause; empty where there are none.
    """

    records: tuple[Record, ...] = ()
    aside: tuple[Record, ...] = ()
    said: str = ""
    clause: str = ""


def read_earlier(path: Path) -> Earlier | None:
    """What a trials.jsonl says; None where there is no file, or nothing in it.

    Raises:
        InputError: its header cannot be read.
        OSError: it cannot be opened.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    if not text:
        return None
    header, *lines = text.split("\n")
    try:
        values = json.loads(header)
        info, finished = RunInfo.from_json(values), bool(values.get(FINISHED, True))
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        why = f": {error}" if isinstance(error, InputError) else ""
        raise InputError(f"the first line of {path} is not the header of a tuning run{why}; "
                         "move the file away, or choose another folder with --out") from error
    found = [_record(line, info) for line in lines if line]
    records = {record.config: record for record in found if record is not None}
    tried = tuple(record for record in records.values() if record.status not in (Status.NOT_RUN, Status.REFUSED))
    not_run = tuple(record for record in records.values() if record.status is Status.NOT_RUN)
    end = values.get(END)
    return Earlier(info, tried, found.count(None), finished, not_run, end if isinstance(end, dict) else {})


def _record(line: str, info: RunInfo) -> Record | None:
    """What a line says; None where it says nothing, or nothing that a run of that header could."""
    try:
        record = Record.from_json(json.loads(line))
        times = [us for us in (record.time_us, record.final_us) if us is not None]
        if not all(0 < us < LONGEST_US for us in times) or (record.status in (Status.OK, Status.SLOWER) and not times):
            return None
        incomplete = record.status is Status.OK and set(record.errors) != set(info.wants.split(","))
        return None if incomplete else record
    except (CodegenError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def take_up(earlier: Earlier, info: RunInfo, space: Space) -> TakenUp:
    """What a run with this header and space may keep.

    A record counts where its config is still a candidate and its kernel still the one that was tried. Where only the kernel is,
    as after another choice of variants, it is kept for later. What was measured in the finals is not: there will be others.

    Raises:
        InputError: the earlier run answers another question, or ran elsewhere.
    """
    if differences := list(_differences(earlier.info, info)):
        raise InputError(f"the run that is to be resumed differs in {'; '.join(differences)}: resume it with the arguments and "
                         "on the device it began with, or choose another folder with --out")
    candidates = set(space.valid)
    current = [record for record in earlier.records if _is_current(record, earlier.info, info, space)]
    kept = [record for record in current if record.config in candidates]
    aside = [record for record in current if record.config not in candidates]
    count = len(earlier.records)
    again = sum(record.config in candidates for record in earlier.records) - len(kept)
    gone = count - len(kept) - len(aside) - again
    said = [f"resumed the run of {earlier.info.date}: "
            + (f"{len(kept)} of its {count} finished trials are kept" if count else "it has finished no trial")]
    if again:
        said.append(f"{again} will be tried again, since their kernels have changed")
    if gone:
        said.append(f"{gone} are dropped, since their kernels have changed and they are no candidates of this run")
    if aside:
        said.append(f"{len(aside)} stay in the file but do not count, since they are no candidates of this run")
    if not aside and not gone and (earlier.info.combinations, earlier.info.valid) != (info.combinations, info.valid):
        said.append(f"the space has changed, from {earlier.info.valid} configs to {info.valid}")
    if earlier.damaged:
        said.append(f"{earlier.damaged} could not be read and will be tried again")
    clause = f"{len(kept)} of the candidates were tried by the run that began at {earlier.info.date}, which this one goes on with"
    records, others = (tuple(replace(record, final_us=None, times={}) for record in part) for part in (kept, aside))
    return TakenUp(records, others, "; ".join(said), clause if kept else "")


def _is_current(record: Record, before: RunInfo, now: RunInfo, space: Space) -> bool:
    """Whether the config's kernel is the one that was tried."""
    if before.sources and before.sources == now.sources:
        return True
    try:
        return record.source == source_digest(space.problem, record.config)
    except CodegenError:  # there is no such kernel any more
        return False


def _differences(before: RunInfo, now: RunInfo) -> Iterator[str]:
    for attribute, name in _MUST_AGREE.items():
        was, is_now = getattr(before, attribute), getattr(now, attribute)
        if was != is_now:
            yield f"{name} ({was} then, {is_now} now)"

"""An earlier run of the same folder: what of its trials.jsonl a run that goes on with it may keep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from codegen.errors import CodegenError
from tuner.candidates import Space
from tuner.errors import InputError
from tuner.records import FINISHED, Record, RunInfo, Status
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
    """

    info: RunInfo
    records: tuple[Record, ...]
    damaged: int
    finished: bool
    not_run: tuple[Record, ...] = ()


@dataclass(frozen=True, slots=True)
class TakenUp:
    """What a run keeps of an earlier one.

    Attributes:
        records: of candidates that it need not try.
        said: what became of the others, as a sentence.
        clause: what a report should say of the records, as a clause; empty where there are none.
    """

    records: tuple[Record, ...] = ()
    said: str = ""
    clause: str = ""


def read_earlier(path: Path) -> Earlier | None:
    """What a trials.jsonl says; None where there is no file.

    Raises:
        InputError: its header cannot be read.
        OSError: it cannot be opened.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    header, *lines = text.split("\n")
    try:
        values = json.loads(header)
        info, finished = RunInfo.from_json(values), bool(values.get(FINISHED, True))
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        why = f": {error}" if isinstance(error, InputError) else ""
        raise InputError(f"the first line of {path} is not the header of a tuning run{why}; "
                         "move the file away, or choose another folder with --out") from error
    found = [_record(line) for line in lines if line]
    records = {record.config: record for record in found if record is not None}
    tried = tuple(record for record in records.values() if record.status not in (Status.NOT_RUN, Status.REFUSED))
    not_run = tuple(record for record in records.values() if record.status is Status.NOT_RUN)
    return Earlier(info, tried, found.count(None), finished, not_run)


def _record(line: str) -> Record | None:
    try:
        return Record.from_json(json.loads(line))
    except (CodegenError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def take_up(earlier: Earlier, info: RunInfo, space: Space) -> TakenUp:
    """What a run with this header and space may keep.

    A record is kept where its config is still a candidate and its kernel still the one that was tried. What was measured in the
    finals is not: there will be others.

    Raises:
        InputError: the earlier run answers another question, or ran elsewhere.
    """
    if differences := list(_differences(earlier.info, info)):
        raise InputError(f"the run that is to be resumed differs in {'; '.join(differences)}: resume it with the arguments and "
                         "on the device it began with, or choose another folder with --out")
    candidates = set(space.valid)
    there = [record for record in earlier.records if record.config in candidates]
    kept = [record for record in there if _is_current(record, earlier.info, info, space)]
    gone, changed = len(earlier.records) - len(there), len(there) - len(kept)
    said = [f"resumed the run of {earlier.info.date}: {len(kept)} of its {len(earlier.records)} finished trials are kept"]
    if changed:
        said.append(f"{changed} will be tried again, since their kernels have changed")
    if gone:
        said.append(f"{gone} are dropped, since the space has changed and they are no longer in it")
    elif (earlier.info.combinations, earlier.info.valid) != (info.combinations, info.valid):
        said.append(f"the space has changed, from {earlier.info.valid} configs to {info.valid}")
    if earlier.damaged:
        said.append(f"{earlier.damaged} could not be read and will be tried again")
    clause = f"{len(kept)} of the candidates were tried by the run that began at {earlier.info.date}, which this one goes on with"
    return TakenUp(tuple(replace(record, final_us=None, times={}) for record in kept), "; ".join(said), clause if kept else "")


def _is_current(record: Record, before: RunInfo, now: RunInfo, space: Space) -> bool:
    """Whether the config's kernel is the one that was tried."""
    if before.sources and before.sources == now.sources:
        return True
    return record.source == source_digest(space.problem, record.config)


def _differences(before: RunInfo, now: RunInfo) -> Iterator[str]:
    for field, name in _MUST_AGREE.items():
        was, is_now = getattr(before, field), getattr(now, field)
        if was != is_now:
            yield f"{name} ({was} then, {is_now} now)"

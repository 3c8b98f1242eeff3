"""Candidates tried together with all who share the study of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from tuner.candidates import Space
from tuner.evaluate import Judge
from tuner.pace import Pace
from tuner.pipeline import IN_FLIGHT, try_in_turn
from tuner.records import Record, RunInfo, Status
from tuner.search import ModelSampler
from tuner.strategy import Search
from tuner.study.members import Members
from tuner.study.shared import Shared
from tuner.study.storage import Storage

PREFIX = "lnl-backward"
"""How the names of all studies begin."""


def try_together(storage: Storage, info: RunInfo, space: Space, search: Search, judge: Judge, out_of_time: Callable[[], bool],
                 on_record: Callable[[Record], Record], lanes: int, pace: Pace) -> None:
    """Tries what is to be searched until all who share the study have tried the budget, or time is up here. What this process has
    not finished then is left to the others.

    Args:
        storage: where the study is.
        info, space: of the run.
        on_record: called with each record, the other processes' too, and returns it as it is to be shared.
        lanes, pace: as for try_in_turn.

    Raises:
        StorageLost: the storage cannot be used any more.
        ToolchainError, DeviceLost: as try_in_turn.
    """
    def take_over(record: Record) -> None:
        if record.status is Status.OK and record.measured:
            judge.best_us = min(judge.best_us, record.best_us)
        on_record(record)

    ledger = storage.study(_name(info, space))
    with Members(ledger) as members:
        budget = min(search.budget, len(search.candidates))
        # Each process makes random choices of its own, or all of them would propose the same.
        sampler = ModelSampler(search.candidates, search.predicted, int(members.own, 16), search.first, budget, space.variants)
        shared = Shared(ledger, members, sampler, budget, take_over, out_of_time)
        try:
            # Where nothing is measured the CPU that would compile ahead is the one that judges: nothing is kept from the others.
            try_in_turn(shared, judge, out_of_time, lambda record: shared.add(on_record(record)), lanes=lanes,
                        ahead=IN_FLIGHT if info.measures else 1, on_begin=shared.begin, pace=pace)
        finally:
            shared.release()
    if shared.lost is not None:
        raise shared.lost


def join(storage: Storage, info: RunInfo, space: Space) -> tuple[str, ...]:
    """Makes the run's study, or sees that it can be written. What is to be said of the storage, as sentences.

    Raises:
        StorageLost: the storage cannot be used.
    """
    own = _name(info, space)
    storage.study(own)
    question = own.rpartition(" ")[0] + " "
    count = sum(name.startswith(question) and name != own for name in storage.names())
    others = (f"the storage has {count} other {'study' if count == 1 else 'studies'} of this problem, of other sources or "
              "variants, whose trials do not count here") if count else ""
    return tuple(filter(None, (storage.said, others)))


def _name(info: RunInfo, space: Space) -> str:
    """The study of all runs of the same problem, on the same kind of device, over the same kernels."""
    device = info.device if info.measures else "predicted"  # whichever compiler the CPU's kernels are made by
    question = (info.dtype, info.param_dtype, info.wants, info.accuracy, info.deterministic, info.eps, info.regime, info.executor,
                device, info.target)
    kernels = (info.sources, *map(str, space.valid))
    first, second = (hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16] for part in (question, kernels))
    return f"{PREFIX} {info.shape} {info.dtype} {first} {second}"

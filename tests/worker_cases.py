"""Workers in which tests plant faults, and runs with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem, Shape
from codegen.render import render
from tests import planted_worker
from tests.planted_worker import PLANTS, RUNS, TEXTS, planted
from tuner.candidates import survey
from tuner.guess import rank
from tuner.outcome import TuneResult
from tuner.records import Record, Status
from tuner.store import Store
from tuner.tuning import Request, TuningRun
from tuner.workers import judge as workers_judge
from tuner.workers.messages import Place
from tuner.workers.patience import Patience
from tuner.workers.pool import Workers

ROOT = Path(__file__).resolve().parent.parent
SHAPE = Shape(4, 4, 8, 16)
VARIANT = "row_warp"
PROBLEM = Problem.of(SHAPE, deterministic=True)
RANKED = list(rank(survey(PROBLEM, target("sm_90"), [VARIANT])))
EXPECTED = {**{name: status for name, (_, status) in TEXTS.items()}, **{name: status for name, (_, status) in RUNS.items()}}

QUICK = Patience(least=5.0)
"""Hangs are ended soon; a candidate of this size takes a tenth of a second."""

Open = Callable[..., Workers]


def opening(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Of a fixture that opens workers with plants, and ends them."""
    monkeypatch.setattr(workers_judge, "render", lambda problem, config: planted(render(problem, config)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made: list[Workers] = []

    def open_workers(plants: Mapping[Config, str] | None = None, patience: Patience = QUICK) -> Workers:
        monkeypatch.setenv(PLANTS, json.dumps({str(config): name for config, name in (plants or {}).items()}))
        made.append(Workers(Place("host", "sm_90", store.root), patience, planted_worker.__name__))
        return made[-1]

    yield open_workers
    for workers in made:
        workers.close()


def tuned(workers: Workers, on_record: Callable[[Record], None] = lambda record: None, **options: object) -> TuneResult:
    options = {"trials": 10, "variants": (VARIANT,), "deterministic": True, **options}
    run = TuningRun(Request(SHAPE, **options), workers, on_record=on_record)  # type: ignore[arg-type]
    run.execute()
    return run.result()


def tried(result: TuneResult) -> dict[Config, Record]:
    return {record.config: record for record in result.records if record.status not in (Status.NOT_RUN, Status.REFUSED)}

"""Candidates that hang or break the GPU's context, on a GPU: each costs itself alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing
from itertools import pairwise

import pytest

from codegen.config import Config
from codegen.problem import Shape
from codegen.render import render
from codegen.space import valid_configs
from tests import planted_worker
from tests.planted_worker import ON_GPU, PLANTS, planted
from tuner.executors.cuda_context import open_gpu
from tuner.outcome import TuneResult
from tuner.records import Record, Status
from tuner.store import Store
from tuner.tuning import Request, TuningRun
from tuner.workers import judge as workers_judge
from tuner.workers.messages import Place
from tuner.workers.patience import Patience
from tuner.workers.pool import Workers

pytestmark = pytest.mark.cuda

SHAPE = Shape(4, 4, 8, 16)
QUICK = Patience(least=6.0)


def tuned(store: Store, monkeypatch: pytest.MonkeyPatch, plants: Mapping[Config, str]) -> TuneResult:
    monkeypatch.setattr(workers_judge, "render", lambda problem, config: planted(render(problem, config)))
    monkeypatch.setenv(PLANTS, json.dumps({str(config): name for config, name in plants.items()}))
    with closing(Workers(Place("cuda", "sm_90", store.root), QUICK, planted_worker.__name__)) as workers:
        run = TuningRun(Request(SHAPE, variants=("row_warp",), trials=60, deterministic=True), workers)
        run.execute()
        return run.result()


def tried(result: TuneResult) -> dict[Config, Record]:
    return {record.config: record for record in result.records if record.status is not Status.REFUSED}


def test_a3_out_of_bounds_and_endless_kernels_cost_themselves_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = tuned(store, monkeypatch, {})
    assert clean.winner is not None and clean.lost is None
    first = [record.config for record in clean.records if record.status is Status.OK][:20]
    spare = [config for config in first if config != clean.winner.config][:3]
    plants = dict(zip(spare, ON_GPU, strict=True))
    result = tuned(store, monkeypatch, plants)
    found = tried(result)
    assert [found[config].status for config in spare] == [Status.CRASH, Status.HANG, Status.OK]
    assert re.search("illegal memory access|GPU context", found[spare[0]].reason or "")
    assert result.lost is None and result.winner is not None
    assert result.winner.best_us <= 1.05 * clean.winner.best_us
    assert all(found[config].status is Status.OK for config in first if config not in plants)


def test_candidates_leave_no_memory_on_the_gpu(store: Store) -> None:
    """Free device memory after 400 judgements is what it was after a hundred, within 1 %, or 300 or 600 later: other processes on
    the GPU take some as well, but not always."""
    gpu = open_gpu(0)

    def free() -> int:
        with gpu.active():
            return int(gpu.driver.mem_get_info()[0])

    problem = Request(SHAPE).problem()
    with closing(Workers(Place("cuda", "sm_90", store.root))) as workers:
        judge = workers.judge(problem)
        compiled = [judge.compile(config) for config in valid_configs(problem, workers.limits, ["row_warp"])[:20]]
        left = []
        for count in (100, 300, 300, 300):
            for index in range(count):
                judge.judge(compiled[index % len(compiled)])
            left.append(free())
        assert any(after >= 0.99 * before for before, after in pairwise(left))

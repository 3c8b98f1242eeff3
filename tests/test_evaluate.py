"""What becomes of one candidate: what is checked before it is timed, and what is not worth validating."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem, Shape
from codegen.render import Source
from codegen.space import valid_configs
from tests.fake_gpu import FakeGpu, FakeProgram
from tests.numpy_kernels import PLAIN
from tuner import evaluate
from tuner.candidates import survey
from tuner.evaluate import Evaluator
from tuner.executors import Resources
from tuner.guess import rank
from tuner.inputs import Gradients, Inputs
from tuner.outcome import TuneResult
from tuner.records import Record, Status
from tuner.tuning import FINALISTS, Request, TuningRun

SHAPE = Shape(40, 30, 8, 16)
PROBLEM = Problem.of(SHAPE)
VARIANT = "row_warp"
VALID = valid_configs(PROBLEM, target("sm_90"), [VARIANT])


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Validating takes long, whatever the shape."""
    monkeypatch.setattr(evaluate, "COSTLY_ELEMENTS", 0)
    yield


def wrong_on_many_rows(inputs: Inputs, wants: frozenset[str]) -> Gradients:
    """Right on small probes."""
    right = PLAIN(inputs, wants)
    assert right.db is not None
    return replace(right, db=right.db + np.float32(1.0)) if inputs.rows > 1000 else right


def records(gpu: FakeGpu) -> dict[Config, Record]:
    evaluator = Evaluator(gpu, PROBLEM)
    return {config: evaluator.judge(evaluator.compile(config)) for config in VALID[:6]}


def tuned(gpu: FakeGpu) -> TuneResult:
    running = TuningRun(Request(SHAPE, variants=(VARIANT,)), gpu)
    running.execute()
    return running.result()


def test_where_validating_is_quick_everything_is_validated() -> None:
    found = records(FakeGpu(lambda config: 5.0 + VALID.index(config), {VALID[4]: wrong_on_many_rows}))
    assert [record.status for record in found.values()] == [Status.OK] * 4 + [Status.WRONG, Status.OK]
    assert all(PROBLEM.rows in record.rows for record in found.values() if record.status is Status.OK)


@pytest.mark.usefixtures("costly")
def test_where_it_is_not_only_what_is_faster_than_the_best_is_validated() -> None:
    times = dict(zip(VALID, (9.0, 10.0, 8.0, 30.0, 7.0, 8.5), strict=False))
    found = list(records(FakeGpu(times.__getitem__)).values())
    assert [record.status for record in found] == [
        Status.OK, Status.SLOWER, Status.OK, Status.SLOWER, Status.OK, Status.SLOWER]
    for record in found:
        assert record.time_us == times[record.config] and record.measured
        if record.status is Status.SLOWER:
            assert record.reason is not None and "not validated" in record.reason
            assert record.rows == () and not record.errors
        else:
            assert PROBLEM.rows in record.rows and record.errors


@pytest.mark.usefixtures("costly")
def test_what_fails_the_small_probe_is_never_timed() -> None:
    def wrong(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        right = PLAIN(inputs, wants)
        assert right.dw is not None
        return replace(right, dw=right.dw * np.float32(1.001))

    gpu = FakeGpu(lambda config: 5.0, {VALID[2]: wrong})
    assert records(gpu)[VALID[2]].status is Status.WRONG
    assert VALID[2] not in gpu.timed and VALID[1] in gpu.timed


@pytest.mark.usefixtures("costly")
def test_fast_and_wrong_does_not_win_though_small_probes_do_not_show_it() -> None:
    planted = dict.fromkeys(VALID[3::7], wrong_on_many_rows)
    result = tuned(FakeGpu(lambda config: 3.0 if config in planted else 5.0 + 0.01 * VALID.index(config), planted))
    statuses = {record.config: record.status for record in result.records}
    assert {statuses[config] for config in planted} == {Status.WRONG}
    assert result.winner is not None and result.winner.config == VALID[0]


@pytest.mark.usefixtures("costly")
def test_finalists_are_validated_before_they_are_timed_again() -> None:
    """One that is nearly as fast as the best was screened only, when it was tried."""
    tried = list(rank(survey(PROBLEM, target("sm_90"), [VARIANT])))
    wrong = tried[3]
    result = tuned(FakeGpu(lambda config: 5.0 + 0.01 * tried.index(config), {wrong: wrong_on_many_rows}))
    statuses = {record.config: record for record in result.records}
    assert statuses[wrong].status is Status.WRONG
    timed_again = [record for record in result.records if record.final_us is not None]
    assert len(timed_again) == FINALISTS - 1
    assert all(record.status is Status.OK and PROBLEM.rows in record.rows for record in timed_again)
    assert sum(record.status is Status.SLOWER for record in result.records) > 10
    assert result.rejections()["slower"] > 10


class Reporting(FakeGpu):
    """A GPU whose compiler reports other resources for some configs."""

    def __init__(self, reports: dict[Config, Resources]) -> None:
        super().__init__(lambda config: 3.0 if config in reports else 5.0)
        self._reports = reports

    def compile(self, source: Source) -> FakeProgram:
        program = super().compile(source)
        if source.config in self._reports:
            program.resources = {VARIANT: self._reports[source.config]}
        return program


def test_what_spills_is_not_run_once_anything_is_valid() -> None:
    spilling = Resources(255, 0, spill_bytes=64)
    gpu = Reporting({VALID[0]: spilling, VALID[3]: spilling})
    found = records(gpu)
    assert found[VALID[0]].status is Status.OK  # nothing better was known
    assert found[VALID[3]].status is Status.SPILLS and found[VALID[3]].time_us is None
    assert VALID[3] not in gpu.timed


def test_what_spills_does_not_win_against_what_does_not() -> None:
    spilling = dict.fromkeys(VALID, Resources(255, 0, spill_bytes=64))
    quick = VALID[7]
    del spilling[quick]
    result = tuned(Reporting(spilling))
    assert result.winner is not None and result.winner.config == quick and result.winner.time_us == 5.0
    only = tuned(Reporting({**spilling, quick: Resources(255, 0, spill_bytes=64)}))
    assert only.winner is not None and only.winner.time_us == 3.0


def test_what_the_compiler_made_too_large_for_the_gpu_is_not_launched() -> None:
    gpu = Reporting({VALID[1]: Resources(4096, 0), VALID[2]: Resources(32, 1 << 20)})
    found = records(gpu)
    for config, what in ((VALID[1], "registers"), (VALID[2], "shared memory")):
        assert found[config].status is Status.LAUNCH_ERROR
        assert what in (found[config].reason or "")
        assert config not in gpu.timed

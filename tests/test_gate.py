"""The safety gate: what keeps a winner from being promoted, who takes its place, and that what was not run is said."""

from __future__ import annotations

import json
import math
import random
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from codegen.limits import target
from codegen.problem import ALL_GRADIENTS, Problem, Shape
from codegen.render import render
from codegen.space import parse_config
from tests import planted_worker
from tests.fake_gpu import FakeGpu
from tests.gate_cases import PROBLEM, SHAPE, VALID, VARIANT, by_place, outcomes, statuses, tuned
from tests.numpy_kernels import PLAIN
from tests.planted_worker import ENTRY, PLANTS, planted
from tests.test_a1 import Planting, text_fault
from tuner import evaluate
from tuner.candidates import survey
from tuner.choose import open_isolated
from tuner.errors import DeviceLost, LaunchError
from tuner.evaluate import Evaluator
from tuner.executors import Executor, Run
from tuner.gate import gate, recheck
from tuner.gate.checks import Check, Outcome, out_of_time, sentences
from tuner.gate.gate import contenders
from tuner.gate.recheck import AUDIT_RUNS, Recheck
from tuner.guess import rank
from tuner.inputs import Gradients, Inputs
from tuner.outcome import Event
from tuner.records import Record, Status
from tuner.report import best_json, report_markdown
from tuner.store import Store
from tuner.tuning import Request, TuningRun
from tuner.validate import Validator
from tuner.workers import judge as workers_judge
from tuner.workers.messages import Place
from tuner.workers.pool import Workers

# --- other data --------------------------------------------------------------------------------------------------------------


def right_at(rows: frozenset[int]) -> Run:
    """A kernel that is right at these row counts only."""
    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        found = PLAIN(inputs, wants)
        if inputs.rows in rows:
            return found
        assert found.dw is not None
        return replace(found, dw=found.dw * np.float32(1.01))

    return run


SEARCHED = Validator(PROBLEM)
SEEN = frozenset({*SEARCHED.probe_rows, SEARCHED.random_rows, SEARCHED.hard_rows})


def test_a_kernel_that_is_right_only_where_the_search_looks_loses_to_the_next() -> None:
    result = tuned(FakeGpu(by_place, dict.fromkeys(VALID[:2], right_at(SEEN))))
    assert result.winner is not None and result.winner.config == VALID[2]
    found = statuses(result)
    assert found[VALID[0]] is found[VALID[1]] is Status.WRONG
    assert sum("on other data than that of the search" in clause for clause in result.said) == 2
    new = set(result.winner.gate_rows) - SEEN
    assert len(new) >= 2 and any(str(rows) in result.checks[0].said for rows in new)


def test_one_that_is_right_for_the_data_of_the_search_only_is_caught() -> None:
    """It knows the weights of the search."""
    known: set[bytes] = set()

    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        key = inputs.w.tobytes()
        if searching:
            known.add(key)
        found = PLAIN(inputs, wants)
        return found if key in known else replace(found, db=np.zeros_like(found.db))

    searching = True

    def on_event(event: Event) -> None:
        nonlocal searching
        searching = not event.stage.startswith("examining")

    result = tuned(FakeGpu(by_place, {VALID[0]: run}), on_event)
    assert result.winner is not None and result.winner.config == VALID[1]
    assert statuses(result)[VALID[0]] is Status.WRONG


def test_on_the_cpu_the_best_predicted_is_caught_as_well(host_executor: Executor) -> None:
    ranked = list(rank(survey(PROBLEM, target("sm_90"), [VARIANT])))
    conditions = " || ".join(f"p.rows == {rows}" for rows in sorted(SEEN))
    plant = text_fault(f"({ENTRY})", rf"\1 if (!({conditions})) return;")
    result = tuned(Planting(host_executor, {ranked[0]: plant}), trials=3)
    assert statuses(result)[ranked[0]] is Status.WRONG
    assert result.winner is not None and result.winner.config == ranked[1]
    assert result.checks[1] == Check("compute-sanitizer", Outcome.NOT_RUN, "the laws of the host executor, which every candidate "
                                     "has kept, stand in its place")


def test_a_kernel_that_fails_at_other_row_counts_is_recorded_as_that() -> None:
    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        if inputs.rows not in SEEN:
            raise LaunchError("the kernel wrote 4 bytes past the end of dx")
        return PLAIN(inputs, wants)

    result = tuned(FakeGpu(by_place, {VALID[0]: run}))
    rejected = next(record for record in result.records if record.config == VALID[0])
    assert rejected.status is Status.LAUNCH_ERROR and "past the end of dx" in (rejected.reason or "")


def test_one_that_takes_the_device_with_it_does_not_win() -> None:
    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        if inputs.rows not in SEEN:
            raise DeviceLost("an illegal memory access")
        return PLAIN(inputs, wants)

    result = tuned(FakeGpu(by_place, {VALID[0]: run}))
    assert statuses(result)[VALID[0]] is Status.LAUNCH_ERROR
    assert result.winner is not None and result.winner.config == VALID[1]
    assert result.lost is not None and str(VALID[0]) in result.lost
    assert outcomes(result) == {"safety gate": Outcome.NOT_RUN}


@pytest.mark.parametrize("shape", [Shape(4, 4, 8, 16), Shape(1, 1, 8, 16), Shape(1, 33, 8, 16), Shape(1, 70, 8, 16),
                                   Shape(8, 1024, 768, 3072), Shape(64, 128, 4096, 12288), Shape(1, 260, 64, 64)], ids=str)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_row_counts_are_new_wherever_they_can_be(shape: Shape, on_gpu: bool) -> None:
    problem = Problem.of(shape)
    usual = Validator(problem, max_multiply_adds=None if on_gpu else evaluate.HOST_MULTIPLY_ADDS)
    used = {*usual.probe_rows, usual.random_rows, usual.hard_rows}
    rows = Recheck(problem, 0, on_gpu, used).rows
    assert rows and min(rows) >= 1 and len(set(rows)) == len(rows)
    many = problem.hidden * problem.out > recheck.MANY_WEIGHTS
    if on_gpu:
        assert len(rows) == (1 if many else 2)
    if on_gpu or not many:
        assert not set(rows) & used
    else:
        assert max(rows) * problem.hidden * problem.out <= max(recheck.HOST_MULTIPLY_ADDS, problem.hidden * problem.out)
    assert usual.hard_rows != recheck.HARD_ROWS


# --- bit-equality ------------------------------------------------------------------------------------------------------------


def wavering(inputs: Inputs, wants: frozenset[str]) -> Gradients:
    """A kernel whose last bits are right, or wrong, by chance: but for data whose sums are exact in any order."""
    found = PLAIN(inputs, wants)
    assert found.dw is not None
    if (found.dw * 4 % 1).any() and WAVERS.random() < 0.5:
        found.dw[-1, -1] = np.nextafter(found.dw[-1, -1], np.float32(math.inf))
    return found


WAVERS = random.Random(1)


def test_the_audit_catches_a_kernel_that_does_not_repeat_its_bits() -> None:
    result = tuned(FakeGpu(by_place, {VALID[0]: wavering}), deterministic=True)
    assert statuses(result)[VALID[0]] is Status.VARIES
    assert result.winner is not None and result.winner.config == VALID[1]
    assert result.checks[-1] == Check("bit-equality", Outcome.PASSED, f"{AUDIT_RUNS} runs gave the same bits at 16 rows")


def test_without_the_wish_for_it_there_is_no_audit() -> None:
    result = tuned(FakeGpu(by_place, {VALID[0]: wavering}))
    assert result.winner is not None and result.winner.config == VALID[0]
    assert "bit-equality" not in outcomes(result)


def test_a_difference_in_the_last_of_twenty_runs_shows() -> None:
    calls = 0

    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        nonlocal calls
        calls += 1
        found = PLAIN(inputs, wants)
        if calls == AUDIT_RUNS:
            assert found.dx is not None
            found.dx[0, 0] *= np.float32(-1.0)
        return found

    audited = Recheck(PROBLEM, 0, True, SEEN).audit(run, {})
    assert audited.runs == calls == AUDIT_RUNS and audited.reason is not None and "dx" in audited.reason


def test_an_audit_takes_no_longer_than_it_may_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recheck, "AUDIT_SECONDS", 0.0)
    result = tuned(FakeGpu(by_place), deterministic=True)
    assert result.checks[-1].said == (
        f"{recheck.LEAST_AUDIT_RUNS} runs gave the same bits at 16 rows (time did not allow {AUDIT_RUNS})")


def test_on_the_cpu_an_audit_varies_the_order_of_blocks_and_threads(host_executor: Executor) -> None:
    """Atomic additions are in a fixed order in each way of running, but not in all of them."""
    problem = Problem.of(Shape(1, 300, 20, 12))
    evaluator = Evaluator(host_executor, problem)
    atomic = evaluator.audit(parse_config("row_warp:reduction=atomic"))
    assert atomic.reason is not None and "gives other bits" in atomic.reason
    assert evaluator.audit(parse_config("row_warp:reduction=two_pass")).reason is None


# --- its time ----------------------------------------------------------------------------------------------------------------


def test_once_time_is_up_the_next_wins_unexamined_and_that_is_said() -> None:
    """Of many that fail each takes its time; all of them would take longer than the run may."""
    skipped = 0.0

    def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
        nonlocal skipped
        if inputs.rows not in SEEN:
            skipped += 6.0  # seconds, of 15 that the gate has
        return right_at(SEEN)(inputs, wants)

    tuning = TuningRun(Request(SHAPE, variants=(VARIANT,), timeout=60.0, deterministic=True),
                       FakeGpu(by_place, dict.fromkeys(VALID, run)))
    tuning.schedule = replace(tuning.schedule, clock=lambda: time.monotonic() + skipped)
    tuning.execute()
    result = tuning.result()
    rejected = [record for record in result.records if record.status is Status.WRONG]
    assert 2 <= len(rejected) < 12
    assert result.winner is not None and result.winner.config == VALID[len(rejected)]
    assert result.checks == (out_of_time(len(rejected)),)
    assert f"time was up when it had rejected {len(rejected)} faster ones" in report_markdown(result, interrupted=False)


# --- what is said ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "times"), [("trying candidates", 1), ("examining the fastest", 2)])
def test_a_run_that_is_interrupted_says_that_its_winner_was_not_examined(at: str, times: int) -> None:
    stages: list[str] = []

    def interrupt(event: Event) -> None:
        stages.append(event.stage)
        if stages[-1] == at and stages.count(at) == times:
            raise KeyboardInterrupt

    run = TuningRun(Request(SHAPE, variants=(VARIANT,)), FakeGpu(by_place, {VALID[0]: right_at(SEEN)}), on_event=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.execute()
    result = run.result()
    assert result.winner is not None and result.winner.status is Status.OK
    assert result.winner.config == VALID[1] or at == "trying candidates"
    assert "* safety gate: not run, the run ended before." in report_markdown(result, interrupted=True)
    assert json.loads(best_json(result))["gate"] == [
        {"name": "safety gate", "outcome": "not run", "said": "the run ended before"}]


def test_checks_that_say_the_same_share_a_sentence() -> None:
    same = [Check(tool, Outcome.PASSED, "nothing found") for tool in ("memcheck", "initcheck")]
    assert sentences([same[0], Check("racecheck", Outcome.NOT_RUN, "it failed"), same[1]]) == [
        "memcheck, initcheck: passed, nothing found", "racecheck: not run, it failed"]


def test_the_fastest_comes_first_then_the_other_finalists_then_the_rest() -> None:
    def record(index: int, time_us: float, final_us: float | None = None) -> Record:
        return Record(VALID[index], Status.OK, None, time_us, True, final_us)

    records = [record(0, 1.0), record(1, 2.0, 2.2), record(2, 2.0, 2.1), record(3, 2.0, 2.11), record(4, 3.0),
               replace(record(5, 0.5), status=Status.WRONG)]
    assert [found.config for found in contenders(records, VALID[3])] == [VALID[index] for index in (3, 2, 1, 0, 4)]
    assert gate.contenders([], None) == []


def test_every_gradient_is_audited() -> None:
    for name in sorted(ALL_GRADIENTS):
        calls = 0

        def run(inputs: Inputs, wants: frozenset[str], name: str = name) -> Gradients:
            nonlocal calls
            calls += 1
            found = PLAIN(inputs, wants)
            if calls == 2:
                getattr(found, name).flat[0] += 1
            return found

        reason = Recheck(PROBLEM, 0, True, SEEN).audit(run, {}).reason
        assert reason is not None and f"in {name} " in reason


# --- in processes of their own -----------------------------------------------------------------------------------------------


def test_in_workers_the_gate_finds_the_same(host_executor: Executor, store: Store) -> None:
    config = VALID[0]
    record = Record(config, Status.OK, rows=(1, 16))
    with closing(open_isolated("host", store=store)) as workers:
        judge, here = workers.judge(PROBLEM), Evaluator(host_executor, PROBLEM)
        assert judge.recheck(record) == here.recheck(record)
        assert judge.audit(config) == here.audit(config) and here.audit(config).runs == AUDIT_RUNS


def test_one_that_ends_its_worker_in_the_gate_is_rejected(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    config = VALID[0]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    monkeypatch.setenv(PLANTS, json.dumps({str(config): "is killed"}))
    monkeypatch.setattr(workers_judge, "render", lambda problem, config: planted(render(problem, config)))
    with closing(Workers(Place("host", "sm_90", store.root), module=planted_worker.__name__)) as workers:
        judge = workers.judge(PROBLEM)
        assert judge.recheck(Record(config, Status.OK)).status is Status.CRASH
        reason = judge.audit(config).reason
        assert reason is not None and "signal 9" in reason

"""What each parameter of the winner is worth: which kernels stand for it, and how their times come about."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from codegen.config import Config
from codegen.errors import CodegenError
from codegen.limits import target
from codegen.problem import Problem, Shape
from codegen.space import make_config, variant_of
from codegen.variants import tried
from tests.fake_gpu import FakeGpu, failing_launch, lost_at, rugged
from tuner import tuning
from tuner.ablation import ROUNDS, ablate
from tuner.candidates import survey
from tuner.changed import Changed
from tuner.errors import ToolchainError
from tuner.evaluate import Evaluator
from tuner.executors import Executor
from tuner.outcome import TuneResult
from tuner.records import Status
from tuner.request import Request
from tuner.tuning import TuningRun

SHAPE = Shape(4, 4, 8, 16)
VARIANT = "row_shared"
SPACE = survey(Problem.of(SHAPE), target("sm_90"), [VARIANT])
COUNT = 60


def tuned(executor: Executor, **options: object) -> TuneResult:
    options = {"variants": (VARIANT,), "trials": COUNT, "ablation": True, **options}
    run = TuningRun(Request(SHAPE, **options), executor)  # type: ignore[arg-type]
    run.execute()
    return run.result()


def again(result: TuneResult, gpu: FakeGpu, ends: float) -> tuple[Changed, ...]:
    """Another ablation of the winner."""
    assert result.winner is not None
    records = {record.config: record for record in result.records}
    return ablate(result.winner, SPACE, (), records, Evaluator(gpu, Problem.of(SHAPE)), gpu, "warm", ends)


def won(result: TuneResult) -> Config:
    assert result.winner is not None
    return result.winner.config


def differences(one: Config, other: Config) -> int:
    return sum(one[name] != other[name] for name, _ in one.params)


def test_for_each_other_value_stands_the_candidate_most_like_the_winner() -> None:
    result = tuned(FakeGpu())
    winner, least = won(result), {}
    for config in SPACE.valid:
        for name, value in config.params:
            if value != winner[name]:
                least[name, value] = min(differences(winner, config), least.get((name, value), 99))
    choices = tried(variant_of(VARIANT)).choices
    expected = {(name, value) for name in choices for value in choices[name] if value != winner[name]}
    assert [(one.parameter, one.value) for one in result.ablation] == [
        (name, value) for name in choices for value in choices[name] if (name, value) in expected]
    assert max(least.values()) > 1 and set(least) < expected
    for one in result.ablation:
        if one.status is Status.REFUSED:
            assert (one.parameter, one.value) not in least and one.reason and differences(winner, one.config) == 1
        else:
            assert one.config in SPACE.valid and differences(winner, one.config) == least[one.parameter, one.value]


def test_each_is_timed_in_turns_with_the_winner_and_no_trial_is_added() -> None:
    gpu = FakeGpu()
    result = tuned(gpu)
    assert len(result.records) == COUNT
    tried = {record.config for record in result.records}
    timed = {one.config: one for one in result.ablation if one.ratios}
    assert len(timed) > 12 and any(config not in tried for config in timed)
    for config, one in timed.items():
        assert (one.status, one.reason, one.us) == (Status.OK, None, rugged(config))
        assert one.ratios == (rugged(config) / rugged(won(result)),) * ROUNDS
    turns = gpu.timed[-ROUNDS * (1 + len(timed)):]
    assert turns == turns[:1 + len(timed)] * ROUNDS and turns[0] == won(result)


def test_what_changes_slowly_changes_for_both() -> None:
    gpu = FakeGpu()
    seen: Counter[Config] = Counter()

    def drifting(config: Config) -> float:
        """Each time the winner is timed again, everything takes half as long again."""
        if gpu.timed[-1] == winner:
            seen[winner] += 1
        return rugged(config) * 1.5 ** seen[winner]

    first = tuned(gpu)
    winner = won(first)
    gpu.times = drifting
    for one in again(first, gpu, math.inf):
        if one.ratios:
            assert one.ratios == pytest.approx([rugged(one.config) / rugged(winner)] * ROUNDS)
            assert one.us == pytest.approx(rugged(one.config) * 1.5 ** 2)


def test_what_is_not_valid_has_no_time_and_a_reason() -> None:
    plain = tuned(FakeGpu())
    tried = {record.config for record in plain.records}
    [bad, *_] = [one.config for one in plain.ablation if one.config not in tried and one.ratios]
    [slow, *_] = [one.config for one in plain.ablation if one.config not in (*tried, bad) and one.ratios]
    result = tuned(FakeGpu(kernels={bad: failing_launch}, refused=frozenset([slow])))
    statuses = {one.config: (one.status, one.us, one.ratios) for one in result.ablation}
    assert won(result) == won(plain)
    assert statuses[bad] == (Status.LAUNCH_ERROR, None, ()) and statuses[slow] == (Status.COMPILE_ERROR, None, ())
    assert all(one.reason for one in result.ablation if not one.ratios)


def test_once_time_is_up_nothing_more_is_timed() -> None:
    gpu = FakeGpu()
    found = again(tuned(gpu, ablation=False), gpu, -math.inf)
    assert len(gpu.timed) == len(_timed_until_ablation())
    assert {(one.status, one.reason, one.ratios) for one in found if one.status is not Status.REFUSED} == {
        (Status.NOT_RUN, "time was up", ())}


def test_a_gpu_that_is_lost_then_does_not_spoil_the_run() -> None:
    calls = len(_timed_until_ablation())
    result = tuned(lost_at(lambda gpu, config: len(gpu.timed) > calls + 20))
    assert result.winner is not None and result.lost is None
    assert any("the GPU was lost" in (one.reason or "") for one in result.ablation)


def test_a_compiler_that_is_gone_then_does_not_spoil_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: object) -> tuple[Changed, ...]:
        raise ToolchainError("nvcc is gone")

    monkeypatch.setattr(tuning, "ablate", gone)
    result = tuned(FakeGpu())
    assert result.winner is not None and result.ablation == ()
    assert [text for text in result.said if "nvcc is gone" in text]


def _timed_until_ablation() -> list[Config]:
    gpu = FakeGpu()
    tuned(gpu, ablation=False)
    return gpu.timed


def test_it_is_left_out_where_nobody_asks_for_it() -> None:
    assert tuned(FakeGpu(), ablation=False).ablation == ()


def test_without_a_gpu_it_is_predicted_and_compiles_nothing_more(host_executor: Executor) -> None:
    result = tuned(host_executor, variants=("row_thread",), trials=2)
    known = {record.config: record for record in result.records}
    assert result.winner is not None and len(result.ablation) > 5
    for one in result.ablation:
        if one.status is not Status.REFUSED:
            record = known[one.config]
            assert (one.status, one.us) == (record.status, record.time_us)
            assert one.ratios == ((one.us or 0) / result.winner.best_us,)
    assert {one.status for one in result.ablation} >= {Status.OK, Status.NOT_RUN}


# --- as JSON -------------------------------------------------------------------------------------------------------------------


GOOD: dict[str, Any] = Changed("threads", make_config("row_thread"), Status.OK, None, 2.5, (1.25, 1.5)).as_json()


def test_json_gives_it_back() -> None:
    for one in tuned(FakeGpu()).ablation:
        assert Changed.from_json(json.loads(json.dumps(one.as_json(), allow_nan=False))) == one


@pytest.mark.parametrize("change", [
    {"parameter": "colour"}, {"parameter": ["threads"]}, {"config": "row_thread:threads=7"}, {"config": 7}, {"status": "fine"},
    {"reason": 7}, {"us": "2"}, {"us": -1.0}, {"ratios": [0.0]}, {"ratios": [math.nan]}, {"ratios": ["1"]}, {"ratios": 1},
    {"ratios": None}, {"us": math.inf}], ids=str)
def test_damaged_json_is_refused(change: Mapping[str, Any]) -> None:
    assert Changed.from_json(GOOD).ratios == (1.25, 1.5)
    with pytest.raises((CodegenError, AttributeError, KeyError, TypeError, ValueError)):
        Changed.from_json({**GOOD, **change})
    with pytest.raises(KeyError):
        Changed.from_json({name: value for name, value in GOOD.items() if name not in change})

"""Whole tuning runs: what is tried and timed, what is recorded, what wins, and how a run ends. Times are made up."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem, Shape
from codegen.render import Source
from tests.fake_gpu import FakeGpu, FakeProgram, lost_at, rugged
from tuner import guess
from tuner.candidates import Space, survey
from tuner.costmodel import predict
from tuner.errors import DeviceLost, LaunchError, ToolchainError
from tuner.evaluate import Evaluator
from tuner.executors import Executor
from tuner.outcome import Event, TuneResult, why_no_winner
from tuner.pipeline import try_in_turn
from tuner.records import Record, Status
from tuner.strategy import Listed
from tuner.timing.finals import ROUNDS
from tuner.timing.regimes import REGIMES
from tuner.tuning import TIMEOUT, Request, TuningRun

SHAPE = "4,4,8,16"


@cache
def space(shape: str = SHAPE, variants: tuple[str, ...] | None = None) -> Space:
    return survey(Problem.of(Shape.parse(shape)), target("sm_90"), variants)


def run(gpu: FakeGpu, shape: str = SHAPE, on_event: Callable[[Event], None] = lambda event: None,
        **options: object) -> TuneResult:
    running = TuningRun(Request(Shape.parse(shape), **options), gpu, on_event=on_event)  # type: ignore[arg-type]
    running.execute()
    return running.result()


def test_the_search_finds_what_the_cost_model_does_not_know() -> None:
    """On prices that have nothing to do with the predictions, 150 of 1,600 configs come near the best; random ones do not."""
    variants = ("row_thread", "row_warp", "row_shared")
    valid = space(SHAPE, variants).valid
    best = min(rugged(config) for config in valid)
    rng = random.Random(1)
    found, by_chance = [], []
    for seed in range(3):
        result = run(FakeGpu(), trials=150, seed=seed, variants=variants)
        assert result.winner is not None
        found.append(result.winner.best_us / best)
        by_chance.append(min(rugged(config) for config in rng.sample(valid, 150)) / best)
    assert max(found) <= 1.1
    assert sum(found) < sum(by_chance)


def test_a_small_space_is_tried_whole_and_its_fastest_wins() -> None:
    gpu = FakeGpu()
    result = run(gpu, variants=("row_thread", "row_warp"))
    valid = space(SHAPE, ("row_thread", "row_warp")).valid
    assert {record.config for record in result.records} == set(valid)
    assert Counter(config for config in gpu.compiled).most_common()[0][1] <= 3  # the finals and the gate take it out of the store
    assert result.winner is not None
    assert result.winner.config == min(valid, key=rugged)
    assert result.winner.measured and result.winner.final_us == rugged(result.winner.config)


def test_a_large_space_is_searched_within_the_number_of_trials() -> None:
    result = run(FakeGpu(), variants=("row_thread", "row_warp"), trials=40)
    tried = [record for record in result.records if record.status is not Status.REFUSED]
    assert len(tried) == 40
    assert len({record.config for record in result.records}) == len(result.records)


def test_every_candidate_has_a_record_and_every_rejected_one_a_reason() -> None:
    valid = space(SHAPE, ("row_warp",)).valid
    gpu = FakeGpu(refused=frozenset(valid[::5]))
    result = run(gpu, variants=("row_warp",))
    statuses = Counter(record.status for record in result.records)
    assert statuses == {Status.OK: len(valid) - len(valid[::5]), Status.COMPILE_ERROR: len(valid[::5])}
    assert all(record.reason for record in result.records if record.status is not Status.OK)
    assert result.rejections() == {"compile error": len(valid[::5])}


def test_the_order_of_records_does_not_depend_on_how_long_compilers_take() -> None:
    class Uneven(FakeGpu):
        def compile(self, source: Source) -> FakeProgram:
            time.sleep(random.random() / 200)
            return super().compile(source)

    first, second = (run(Uneven(), variants=("row_warp",), trials=30, seed=4) for _ in range(2))
    assert [record.config for record in first.records] == [record.config for record in second.records]


# --- time --------------------------------------------------------------------------------------------------------------------


def test_a_run_on_a_gpu_ends_after_three_minutes_unless_the_caller_says_otherwise(host_executor: Executor) -> None:
    shape = Shape.parse(SHAPE)
    assert TuningRun(Request(shape), FakeGpu()).info.timeout_s == TIMEOUT == 180.0
    assert TuningRun(Request(shape, timeout=7.0), FakeGpu()).info.timeout_s == 7.0
    assert TuningRun(Request(shape), host_executor).info.timeout_s is None


def test_no_candidate_begins_after_the_timeout_and_finalists_are_timed_within_it() -> None:
    class Slow(FakeGpu):
        def compile(self, source: Source) -> FakeProgram:
            time.sleep(0.1)
            return super().compile(source)

    running = TuningRun(Request(Shape.parse(SHAPE), variants=("row_warp",), timeout=1.5), Slow())
    began = time.monotonic()
    running.execute()
    took = time.monotonic() - began
    result = running.result()
    assert took < 15
    assert 0 < len(result.records) < len(space(SHAPE, ("row_warp",)).valid)
    assert result.winner is not None and result.winner.final_us is not None


def test_what_takes_much_longer_than_the_best_is_timed_once() -> None:
    valid = space(SHAPE, ("row_warp",)).valid
    gpu = FakeGpu(lambda config: 30.0 if config in valid[1::2] else 2.0)
    result = run(gpu, variants=("row_warp",))
    counts = Counter(gpu.timed)
    after_the_first_good_one = [record for record in result.records[1:] if record.time_us == 30.0]
    assert len(after_the_first_good_one) > 10
    assert {counts[record.config] for record in after_the_first_good_one} == {1}
    assert all(record.status is Status.OK and record.measured for record in result.records)


def test_what_is_predicted_to_run_far_too_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guess, "LONG_CALL_US", 0.1)
    monkeypatch.setattr(guess, "FAR_OFF", 2.0)
    gpu = FakeGpu()
    result = run(gpu, variants=("row_thread", "row_warp"))
    valid = space(SHAPE, ("row_thread", "row_warp")).valid
    times = {config: predict(result.problem, config, gpu.limits).time_us for config in valid}
    short_enough = {config for config, time_us in times.items() if time_us <= 2.0 * min(times.values())}
    assert {record.config for record in result.records} == short_enough
    assert 0 < len(short_enough) < len(times)


# --- finalists ---------------------------------------------------------------------------------------------------------------


def test_finalists_are_timed_again_in_turns_and_the_second_time_decides() -> None:
    valid = space(SHAPE, ("row_warp",)).valid
    lucky, steady = valid[0], valid[1]
    counts: Counter[Config] = Counter()

    def times(config: Config) -> float:
        counts[config] += 1
        if config == lucky:
            return 2.0 if counts[config] <= 2 else 3.0
        return 2.2 if config == steady else 2.4

    gpu = FakeGpu(times)
    result = run(gpu, variants=("row_warp",))
    assert result.winner is not None and result.winner.config == steady
    assert (result.winner.time_us, result.winner.final_us) == (2.2, 2.2)
    again = gpu.timed[2 * len(valid):]
    finalists = list(dict.fromkeys(again))
    assert lucky in finalists and len(finalists) > 2
    assert Counter(again) == dict.fromkeys(finalists, ROUNDS * len(REGIMES))
    turns = again[::len(REGIMES)]
    assert turns == (finalists + finalists[::-1]) * (ROUNDS // 2) + finalists
    assert set(result.winner.times) == set(REGIMES)


def test_what_cannot_be_timed_again_does_not_win() -> None:
    valid = space(SHAPE, ("row_warp",)).valid
    seen: Counter[Config] = Counter()

    def times(config: Config) -> float:
        seen[config] += 1
        if config == valid[3] and seen[config] > 3:
            raise LaunchError("the kernel failed")
        return 2.0 if config == valid[3] else 2.1

    result = run(FakeGpu(times), variants=("row_warp",))
    assert result.winner is not None and result.winner.config != valid[3]
    assert result.winner.final_us == 2.1
    assert next(iter(result.best_by_variant().values())) is result.winner


# --- how a run ends ----------------------------------------------------------------------------------------------------------


def test_a_missing_compiler_ends_the_run() -> None:
    class Bare(FakeGpu):
        def compile(self, source: Source) -> FakeProgram:
            raise ToolchainError("no nvcc was found")

    with pytest.raises(ToolchainError):
        run(Bare(), variants=("row_thread",))


def test_a_lost_gpu_ends_the_run_with_the_best_so_far() -> None:
    gpu = lost_at(lambda gpu, config: len(set(gpu.timed)) == 10 and config not in gpu.timed)
    result = run(gpu, variants=("row_warp",))
    assert len(result.records) == 11
    assert [record.status for record in result.records] == [Status.OK] * 10 + [Status.LAUNCH_ERROR]
    assert result.winner is not None and result.winner.time_us == min(rugged(record.config) for record in result.records[:10])
    assert result.winner.final_us is None
    assert result.lost is not None and f"lost after {result.records[-1].config}" in result.lost
    assert result.lost.endswith("an illegal memory access")


def test_a_gpu_lost_while_the_fastest_are_timed_again_keeps_the_first_times() -> None:
    valid = space(SHAPE, ("row_warp",)).valid
    gpu = lost_at(lambda gpu, config: len(gpu.timed) == 2 * len(valid) + 3)
    gpu.times = lambda config: 2.0 + 1e-3 * valid.index(config)
    result = run(gpu, variants=("row_warp",))
    assert len(result.valid()) == len(valid)
    assert result.winner is not None and result.winner.config == valid[0] and result.winner.final_us is None
    assert result.lost is not None


def test_a_lost_device_ends_what_runs_side_by_side_too() -> None:
    valid = space(SHAPE, ("row_warp",)).valid[:9]
    gpu = lost_at(lambda gpu, config: config == valid[4])
    finished: list[Record] = []
    with pytest.raises(DeviceLost):
        try_in_turn(Listed(valid), Evaluator(gpu, Problem.of(Shape.parse(SHAPE))), lambda: False, finished.append, lanes=2)
    assert finished[-1].status is Status.LAUNCH_ERROR and len(finished) <= 5


def test_an_interrupt_keeps_what_was_finished() -> None:
    seen: list[Record] = []

    def interrupt(event: Event) -> None:
        if event.done == 7:
            raise KeyboardInterrupt

    running = TuningRun(Request(Shape.parse(SHAPE), variants=("row_warp",)), FakeGpu(), on_record=seen.append, on_event=interrupt)
    with pytest.raises(KeyboardInterrupt):
        running.execute()
    result = running.result()
    assert len(result.records) == len(seen) == 7
    assert result.winner == min(seen, key=lambda record: record.best_us)


def test_events_tell_the_best_so_far_and_what_was_rejected() -> None:
    valid = space(SHAPE, ("row_thread",)).valid
    events: list[Event] = []
    run(FakeGpu(refused=frozenset(valid[:2])), on_event=events.append, variants=("row_thread",))
    trying = [event for event in events if event.stage == "trying candidates"]
    assert [event.done for event in trying] == list(range(1, len(valid) + 1))
    assert trying[-1].rejected == {"compile error": 2}
    bests = [event.best.best_us for event in trying if event.best is not None]
    assert bests == sorted(bests, reverse=True)
    assert bests[-1] == min(rugged(config) for config in valid[2:])
    # Nobody knows how many of the fastest are examined: the first that passes is the last.
    assert {(event.done, event.total) for event in events if event.stage == "examining the fastest"} == {(0, 1)}


@pytest.mark.parametrize(("variant", "dtype", "said"), [
    ("weight_mma", "float32", "16 by 8 values of w are too few"), ("tile_cluster", "bfloat16", "take tile_wgmma")])
def test_a_shape_without_candidates_is_told_what_speaks_against_the_shape(variant: str, dtype: str, said: str) -> None:
    """Not what speaks against parameters that go together at no shape, of however many combinations."""
    result = TuningRun(Request(Shape(4, 4, 8, 16), dtype=dtype, variants=(variant,)), FakeGpu()).result()
    assert said in why_no_winner(result) and said not in next(iter(result.info.refused))
    unlike = replace(result, info=replace(result.info, refused={"needs 12 bytes": 5, "odd": 2}))  # of no variant's defaults
    assert why_no_winner(unlike).endswith("with the figures of one of them: needs 12 bytes")

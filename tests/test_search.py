"""The search: what is tried, in which order, what is learned, and what wins. Times are made up by a stand-in for a GPU."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from functools import cache

import optuna
import pytest

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem, Shape
from codegen.render import Source
from codegen.space import make_config, parse_config
from tests.fake_gpu import FakeGpu, FakeProgram, lost_at, rugged
from tuner.candidates import Space, distance, nearest, survey, without_figures
from tuner.errors import DeviceLost, LaunchError, ToolchainError
from tuner.evaluate import Evaluator
from tuner.outcome import Event, TuneResult
from tuner.pipeline import try_all
from tuner.records import Record, Status
from tuner.search import Families, Family
from tuner.strategy import HillClimb, InTurn, Listed, Pool, Strategy
from tuner.tuning import FINAL_ROUNDS, Request, TuningRun

SHAPE = "4,4,8,16"


@cache
def space(shape: str = SHAPE, variants: tuple[str, ...] | None = None) -> Space:
    return survey(Problem.of(Shape.parse(shape)), target("sm_90"), variants)


def run(gpu: FakeGpu, shape: str = SHAPE, on_event: Callable[[Event], None] = lambda event: None,
        **options: object) -> TuneResult:
    running = TuningRun(Request(Shape.parse(shape), **options), gpu, on_event=on_event)  # type: ignore[arg-type]
    running.execute()
    return running.result()


def drive(strategy: Strategy, times: Callable[[Config], float | None], ahead: int = 1) -> list[Config]:
    """Plays the tuner: keeps `ahead` candidates open, and tells their times in the order in which they were asked for."""
    asked: list[Config] = []
    told = 0
    while True:
        asked += strategy.ask(ahead - (len(asked) - told))
        if told == len(asked):
            return asked
        strategy.tell(asked[told], times(asked[told]))
        told += 1


# --- the space ---------------------------------------------------------------------------------------------------------------


def test_survey_accounts_for_every_combination() -> None:
    found = space()
    assert found.combinations == len(found.valid) + sum(found.refused.values())
    assert all(found.why_not(config) is None for config in found.valid[::50])
    assert found.why_not(parse_config("row_warp:reduction=single_block,splits=64")) is not None


def test_like_reasons_count_together() -> None:
    assert without_figures("needs 123 bytes where 1.5e3 are") == without_figures("needs 7 bytes where 1.5e3 are")
    assert without_figures("sm_90 and two2") == "sm_90 and two2"


def test_nearest_config() -> None:
    config = make_config("row_warp")
    close, far = make_config("row_warp", {"warps": 8}), make_config("row_warp", {"warps": 8, "rows": 4})
    assert distance(config, close) < distance(config, far)
    assert nearest(config, [far, make_config("row_thread"), close]) == close
    assert nearest(config, [make_config("row_thread")]) is None


# --- strategies --------------------------------------------------------------------------------------------------------------


def test_a_list_is_tried_in_its_order_and_never_twice() -> None:
    configs = list(space().valid[:6])
    assert drive(Listed([*configs, *configs], Pool(configs)), rugged, ahead=4) == configs


def test_hill_climbing_starts_next_to_the_best_and_follows_it() -> None:
    valid = [config for config in space().valid if config.variant == "row_warp"]
    pool = Pool(valid)
    start = valid[0]
    pool.take(start)
    pool.tell(start, rugged(start))
    tried = drive(HillClimb(pool, 40), rugged)
    assert len(tried) == 39
    assert distance(start, tried[0])[0] <= 2
    assert min(rugged(config) for config in tried) < rugged(start)


def test_strategies_in_turn_wait_for_the_times_of_the_one_before() -> None:
    valid = list(space().valid)
    pool = Pool(valid)
    both = InTurn([Listed(valid[:3], pool), HillClimb(pool, 6)])
    first = both.ask(10)
    assert first == valid[:3]
    assert both.ask(10) == []
    for config in first:
        both.tell(config, rugged(config))
    assert len(both.ask(10)) == 3


def families(budget: int, seed: int = 0, refused: dict[Config, str] | None = None,
             variants: tuple[str, ...] | None = None) -> tuple[Families, Pool]:
    among = space(SHAPE, variants)
    pool = Pool(among.valid)
    shuffled = list(among.valid)
    random.Random(3).shuffle(shuffled)
    note = {} if refused is None else refused
    return Families(among, pool, shuffled, budget, seed, note.__setitem__), pool


def test_families_try_no_config_twice_and_keep_their_budget() -> None:
    strategy, _ = families(120)
    tried = drive(strategy, rugged, ahead=8)
    assert len(tried) == len(set(tried)) == 120
    assert {config.variant for config in tried} == set(space().variants)


def test_the_budget_moves_to_the_fastest_family() -> None:
    def slow_but_for(favourite: str) -> Callable[[Config], float]:
        return lambda config: rugged(config) + (0.0 if config.variant == favourite else 100.0)

    for favourite in ("row_warp", "row_shared"):
        strategy, _ = families(150)
        counts = Counter(config.variant for config in drive(strategy, slow_but_for(favourite)))
        assert counts[favourite] == max(counts.values())
        assert counts["row_thread"] <= 16


def test_exhausted_families_leave_their_budget_to_the_others() -> None:
    variants = ("row_thread", "row_warp")
    strategy, pool = families(1000, variants=variants)
    tried = drive(strategy, lambda config: 1.0 if config.variant == "row_thread" else None, ahead=5)
    assert set(tried) == set(space(SHAPE, variants).valid)
    assert pool.given == len(tried)


def test_the_same_seed_gives_the_same_search() -> None:
    first, again, other = (drive(families(60, seed)[0], rugged, ahead=4) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_invalid_proposals_are_pruned_with_their_reason_and_never_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[optuna.trial.TrialState | None] = []
    tell = optuna.study.Study.tell

    def spy(self: optuna.study.Study, trial: optuna.trial.Trial, values: float | None = None,
            state: optuna.trial.TrialState | None = None) -> optuna.trial.FrozenTrial:
        states.append(state)
        return tell(self, trial, values, state)

    monkeypatch.setattr(optuna.study.Study, "tell", spy)
    refused: dict[Config, str] = {}
    drive(families(120, refused=refused)[0], rugged)
    assert refused
    assert all(space().why_not(config) == reason for config, reason in refused.items())
    assert set(states) == {None, optuna.trial.TrialState.PRUNED}


def test_a_config_proposed_again_is_told_what_is_known_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning it would teach the sampler that what it likes best is bad."""
    told: list[tuple[optuna.trial.TrialState, float | None]] = []
    tell = optuna.study.Study.tell

    def spy(self: optuna.study.Study, trial: optuna.trial.Trial, values: float | None = None,
            state: optuna.trial.TrialState | None = None) -> optuna.trial.FrozenTrial:
        done = tell(self, trial, values, state)
        told.append((done.state, done.value))
        return done

    among = space(SHAPE, ("row_warp",))
    good, bad = among.valid[0], among.valid[-1]
    proposed = good
    monkeypatch.setattr(optuna.study.Study, "tell", spy)
    monkeypatch.setattr(optuna.trial.Trial, "suggest_categorical", lambda self, name, choices: proposed[name])
    family = Family("row_warp", among, Pool(among.valid), [], 0, lambda config, reason: None)
    assert family.ask() == good
    others = [family.ask()]
    assert told.pop() == (optuna.trial.TrialState.FAIL, None)  # still open: nothing is known
    family.tell(good, 2.5)
    assert told.pop() == (optuna.trial.TrialState.COMPLETE, 2.5)
    others.append(family.ask())
    assert told.pop() == (optuna.trial.TrialState.COMPLETE, 2.5)
    proposed = bad
    assert family.ask() == bad
    family.tell(bad, None)
    others.append(family.ask())
    assert [told.pop() for _ in range(2)] == [(optuna.trial.TrialState.PRUNED, None)] * 2
    assert len({good, bad, *others}) == 5


def test_the_search_finds_what_the_cost_model_does_not_know() -> None:
    """On prices that have nothing to do with the predictions, 150 of 1,600 configs come near the best; random ones do not."""
    best = min(rugged(config) for config in space().valid)
    rng = random.Random(1)
    found, by_chance = [], []
    for seed in range(3):
        result = run(FakeGpu(), trials=150, seed=seed)
        assert result.winner is not None
        found.append(result.winner.best_us / best)
        by_chance.append(min(rugged(config) for config in rng.sample(space().valid, 150)) / best)
    assert max(found) <= 1.1
    assert sum(found) < sum(by_chance)


# --- whole runs --------------------------------------------------------------------------------------------------------------


def test_a_small_space_is_tried_whole_and_its_fastest_wins() -> None:
    gpu = FakeGpu()
    result = run(gpu, variants=("row_thread", "row_warp"))
    valid = space(SHAPE, ("row_thread", "row_warp")).valid
    assert {record.config for record in result.records} == set(valid)
    assert Counter(config for config in gpu.compiled).most_common()[0][1] <= 2  # a finalist comes out of the store again
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


def test_no_candidate_begins_after_the_timeout() -> None:
    class Slow(FakeGpu):
        def compile(self, source: Source) -> FakeProgram:
            time.sleep(0.02)
            return super().compile(source)

    began = time.monotonic()
    result = run(Slow(), variants=("row_warp",), timeout=0.2)
    assert time.monotonic() - began < 5
    assert 0 < len(result.records) < len(space(SHAPE, ("row_warp",)).valid)
    assert result.winner is not None


def test_finalists_are_timed_again_in_turns_and_the_second_time_decides() -> None:
    valid = space(SHAPE, ("row_warp",)).valid
    lucky, steady = valid[0], valid[1]
    counts: Counter[Config] = Counter()

    def times(config: Config) -> float:
        counts[config] += 1
        if config == lucky:
            return 2.0 if counts[config] == 1 else 3.0
        return 2.2 if config == steady else 2.4

    gpu = FakeGpu(times)
    result = run(gpu, variants=("row_warp",))
    assert result.winner is not None and result.winner.config == steady
    assert (result.winner.time_us, result.winner.final_us) == (2.2, 2.2)
    again = gpu.timed[len(valid):]
    finalists = list(dict.fromkeys(again))
    assert lucky in finalists and len(finalists) > 2
    assert again == finalists * FINAL_ROUNDS


def test_what_cannot_be_timed_again_does_not_win() -> None:
    valid = space(SHAPE, ("row_warp",)).valid
    seen: Counter[Config] = Counter()

    def times(config: Config) -> float:
        seen[config] += 1
        if config == valid[3] and seen[config] > 2:
            raise LaunchError("the kernel failed")
        return 2.0 if config == valid[3] else 2.1

    result = run(FakeGpu(times), variants=("row_warp",))
    assert result.winner is not None and result.winner.config != valid[3]
    assert result.winner.final_us == 2.1
    assert next(iter(result.best_by_variant().values())) is result.winner


def test_a_missing_compiler_ends_the_run() -> None:
    class Bare(FakeGpu):
        def compile(self, source: Source) -> FakeProgram:
            raise ToolchainError("no nvcc was found")

    with pytest.raises(ToolchainError):
        run(Bare(), variants=("row_thread",))


def test_a_lost_gpu_ends_the_run_with_the_best_so_far() -> None:
    gpu = lost_at(lambda gpu, config: len(gpu.timed) == 10)
    result = run(gpu, variants=("row_warp",))
    assert len(result.records) == 11
    assert [record.status for record in result.records] == [Status.OK] * 10 + [Status.LAUNCH_ERROR]
    assert result.winner is not None and result.winner.time_us == min(rugged(record.config) for record in result.records[:10])
    assert result.winner.final_us is None
    assert result.lost is not None and f"lost after {result.records[-1].config}" in result.lost
    assert result.lost.endswith("an illegal memory access")


def test_a_gpu_lost_while_the_fastest_are_timed_again_keeps_the_first_times() -> None:
    valid = space(SHAPE, ("row_warp",)).valid
    gpu = lost_at(lambda gpu, config: len(gpu.timed) == len(valid) + 3)
    result = run(gpu, variants=("row_warp",))
    assert len(result.valid()) == len(valid)
    assert result.winner is not None and result.winner.config == min(valid, key=rugged) and result.winner.final_us is None
    assert result.lost is not None


def test_a_lost_device_ends_what_runs_side_by_side_too() -> None:
    valid = space(SHAPE, ("row_warp",)).valid[:9]
    gpu = lost_at(lambda gpu, config: config == valid[4])
    finished: list[Record] = []
    with pytest.raises(DeviceLost):
        for record in try_all(list(valid), Evaluator(gpu, Problem.of(Shape.parse(SHAPE))), lambda: False):
            finished.append(record)
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

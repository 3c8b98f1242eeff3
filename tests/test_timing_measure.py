"""Times in both regimes, and the clocks before them, on a stream whose clock the test sets; with a GPU, on the card."""

from __future__ import annotations

import time

import pytest

from codegen.expr import const
from codegen.plan import Launch, Plan
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import Source, render
from codegen.space import make_config
from tests.fake_bench import FakeStream
from tests.fake_cuda import FakeCuda, open_executor
from tuner.errors import DeviceLost, InputError, LaunchError
from tuner.executors.cuda import CudaExecutor, CudaProgram
from tuner.executors.cuda_context import open_gpu
from tuner.inputs import random_inputs, read_only
from tuner.store import Store
from tuner.timing.clocks import ALIKE, IDLE_SECONDS, PATIENCE_SECONDS, WARM_SECONDS, Clocks
from tuner.timing.measure import MAX_REPEATS, MIN_SAMPLE_US, Effort, cold, warm
from tuner.timing.regimes import REGIMES, Regime, as_regime, deciding_first
from tuner.timing.stats import Summary

EFFORT = Effort(7, 1.0)


class Passing:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def ticking(stream: FakeStream, us: float) -> None:
    stream.now += us


@pytest.mark.parametrize(("us", "repeats"), [(8.0, 14), (250.0, 1), (0.1, MAX_REPEATS)])
def test_warm_times_are_of_one_call_whatever_stands_in_a_graph(us: float, repeats: int) -> None:
    stream = FakeStream()
    timing = warm(stream, lambda: ticking(stream, us), EFFORT, Clocks())
    assert timing.repeats == repeats
    assert timing.samples == pytest.approx((us,) * 7)
    assert timing.regime == "warm" and timing.settled
    assert "flush" not in stream.log
    assert stream.repeats[0] == 1 and stream.repeats[-1] == repeats and stream.open_graphs == 0


def test_a_graph_that_takes_long_to_start_still_gives_samples_that_last() -> None:
    """One call takes 2 us, starting a graph 10: a graph of as many calls as one of one suggests would be too short."""
    stream = FakeStream()
    inner = stream.graph

    def slow_to_start(work, repeats):  # type: ignore[no-untyped-def]
        begun = False

        def first() -> None:
            nonlocal begun
            if not begun:
                stream.now += 10.0
            begun = True
            work()

        context = inner(first, repeats)
        entered = context.__enter__()

        class Graph:
            def __enter__(self):  # type: ignore[no-untyped-def]
                def replay() -> None:
                    nonlocal begun
                    begun = False
                    entered()
                return replay

            def __exit__(self, *error: object) -> None:
                context.__exit__(None, None, None)

        return Graph()

    stream.graph = slow_to_start  # type: ignore[method-assign]
    timing = warm(stream, lambda: ticking(stream, 2.0), EFFORT, Clocks())
    assert timing.repeats * timing.median >= MIN_SAMPLE_US
    assert stream.open_graphs == 0


def test_cold_times_hold_one_call_each_and_not_the_flush() -> None:
    stream = FakeStream(flush_us=80.0)
    timing = cold(stream, lambda: ticking(stream, 8.0), EFFORT, Clocks())
    assert timing.samples == pytest.approx((8.0,) * 7) and timing.repeats == 1
    assert timing.regime == "cold"
    assert stream.log[-14:] == ["flush", "replay"] * 7
    assert stream.repeats == [1] and stream.open_graphs == 0


def test_writing_over_the_cache_counts_for_the_budget() -> None:
    stream = FakeStream(flush_us=900.0)
    assert len(cold(stream, lambda: ticking(stream, 100.0), Effort(100, 0.02), Clocks()).samples) == 20


@pytest.mark.parametrize("measure", [warm, cold])
def test_a_call_beyond_the_budget_is_run_twice(measure) -> None:  # type: ignore[no-untyped-def]
    stream = FakeStream()
    timing = measure(stream, lambda: ticking(stream, 3e5), Effort(20, 0.1), Clocks())
    assert timing.samples == pytest.approx((3e5,))
    assert stream.log.count("replay") == 2
    assert len(measure(stream, lambda: ticking(stream, 3e5), Effort(20, 0.1, 5), Clocks()).samples) == 5


# --- clocks -------------------------------------------------------------------------------------------------------------------


class Card:
    """A GPU whose clock rises from a fifth to the whole while it works, in steps of a tenth."""

    def __init__(self, call_us: float, noise: float = 0.0, step_us: float = 20_000.0) -> None:
        self._step_us = step_us
        self.worked_us = 0.0
        self._call_us = call_us
        self._noise = noise
        self.spells = 0

    def speed(self) -> float:
        return min(1.0, 0.2 + 0.1 * int(self.worked_us / self._step_us))

    def __call__(self, count: int) -> float:
        self.spells += 1
        begin = self.worked_us
        for _ in range(count):
            self.worked_us += self._call_us / self.speed() * (1.0 + self._noise * (self.spells % 2))
        return self.worked_us - begin


@pytest.mark.parametrize("call_us", [2.0, 300.0, 7_000.0])
def test_after_idle_time_the_clock_has_risen_before_the_first_sample(call_us: float) -> None:
    card = Card(call_us)
    assert Clocks().settle(card, 5.0 * call_us)
    assert card.speed() == 1.0 and 1e6 * WARM_SECONDS <= card.worked_us < 1e6 * PATIENCE_SECONDS


def test_a_clock_that_rises_for_longer_is_waited_for() -> None:
    card = Card(100.0, step_us=50_000.0)
    assert Clocks().settle(card, 500.0)
    assert card.speed() == 1.0 and card.worked_us > 2.0e6 * WARM_SECONDS


def test_a_busy_gpu_is_believed_after_a_few_spells() -> None:
    now, card = Passing(), Card(100.0)
    clocks = Clocks(now)
    clocks.settle(card, 500.0)
    worked, card.spells = card.worked_us, 0
    now.seconds += 0.5 * IDLE_SECONDS
    assert clocks.settle(card, 100.0)
    assert card.spells <= ALIKE + 1 and card.worked_us - worked < 1e4
    now.seconds += 1.5 * IDLE_SECONDS
    worked = card.worked_us
    clocks.settle(card, 100.0)
    assert card.worked_us - worked >= 1e6 * WARM_SECONDS


def test_times_that_never_agree_are_said_and_end() -> None:
    card = Card(100.0, noise=0.05)
    assert not Clocks().settle(card, 100.0)
    assert card.worked_us <= 1.01e6 * PATIENCE_SECONDS


def test_a_busy_gpu_is_not_kept_longer_than_the_budget() -> None:
    now, card = Passing(), Card(100.0, noise=0.05)
    clocks = Clocks(now)
    clocks.busy()
    clocks.settle(card, 500.0, budget_s=0.004)
    assert card.worked_us <= 1.1 * 4_000.0


def test_a_long_call_that_has_run_needs_no_warming() -> None:
    card = Card(3e5)
    assert Clocks().settle(card, 3e5, done_us=6e5, budget_s=0.1) or card.spells
    assert card.spells <= ALIKE


# --- regimes ------------------------------------------------------------------------------------------------------------------


def test_regimes_have_two_names() -> None:
    assert as_regime("cold") == "cold"
    assert deciding_first("cold") == ("cold", "warm") and deciding_first("warm") == ("warm", "cold")
    with pytest.raises(InputError, match="no regime 'hot'; choose from warm, cold"):
        as_regime("hot")


# --- through the executor -----------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, store: Store) -> tuple[CudaProgram, FakeCuda]:
    """A program of two launches, each of which takes fake.call_ms."""
    fake = FakeCuda()
    executor = open_executor(monkeypatch, store, fake)
    assert executor.bus_id == "0000:3B:00.0"
    fake.plan = Plan((Launch("kernel", const(1), 32), Launch("kernel", const(1), 32)))
    text = 'extern "C" __global__ void kernel(float*) {}\n'
    return executor.compile(Source(Problem(5, 3, 7), make_config("row_thread"), text, fake.plan)), fake


@pytest.mark.parametrize(("regime", "repeats"), [("warm", 3), ("cold", 1)])
def test_a_program_is_timed_in_both_regimes_and_leaves_nothing_behind(
        made: tuple[CudaProgram, FakeCuda], regime: Regime, repeats: int) -> None:
    program, fake = made
    inputs = read_only(random_inputs(5, 3, 7))
    program.run(inputs, ALL_GRADIENTS)  # afterwards the executor keeps what it needs
    kept = fake.free_bytes
    timing = program.time(inputs, ALL_GRADIENTS, samples=4, regime=regime)
    assert timing.samples == pytest.approx((2e3 * fake.call_ms,) * 4)
    assert (timing.regime, timing.repeats) == (regime, repeats)
    assert fake.free_bytes == kept and not fake.graphs and fake.depth == 0


def test_without_room_for_writing_over_the_cache_only_cold_times_fail(made: tuple[CudaProgram, FakeCuda]) -> None:
    program, fake = made
    inputs = read_only(random_inputs(5, 3, 7))
    program.run(inputs, ALL_GRADIENTS)
    fake.free_bytes = 1000
    with pytest.raises(LaunchError, match="out of memory"):
        program.time(inputs, ALL_GRADIENTS, regime="cold")
    assert program.time(inputs, ALL_GRADIENTS).median > 0.0
    assert fake.free_bytes == 1000 and fake.depth == 0


def test_a_gpu_lost_while_cold_says_so(made: tuple[CudaProgram, FakeCuda], monkeypatch: pytest.MonkeyPatch) -> None:
    program, fake = made

    def lose(*arguments: object) -> None:
        fake.sticky = "an illegal memory access was encountered"

    monkeypatch.setattr(fake.driver, "memset_d32_async", lose)
    inputs = read_only(random_inputs(5, 3, 7))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        program.time(inputs, ALL_GRADIENTS, regime="cold")
    assert fake.depth == 0


# --- on the card --------------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_on_the_card_a_cold_call_takes_longer_than_a_warm_one(cuda_executor: CudaExecutor) -> None:
    """8 MB that stay in the L2 cache when warm."""
    problem = Problem(4096, 256, 256)
    program = cuda_executor.compile(render(problem, make_config("row_warp")))
    inputs = read_only(random_inputs(4096, 256, 256))
    warmed, chilled = (program.time(inputs, ALL_GRADIENTS, regime=regime) for regime in REGIMES)
    assert (warmed.regime, chilled.regime, chilled.repeats) == ("warm", "cold", 1)
    assert 0.98 * warmed.median < chilled.median < 10.0 * warmed.median + 50.0
    assert warmed.settled


@pytest.mark.cuda
@pytest.mark.parametrize("regime", ["warm", "cold"])
def test_on_the_card_times_after_idle_time_are_those_of_a_busy_gpu(cuda_executor: CudaExecutor, regime: str) -> None:
    problem = Problem(16384, 64, 64)
    program = cuda_executor.compile(render(problem, make_config("row_warp")))
    inputs = read_only(random_inputs(16384, 64, 64))
    measure = lambda: program.time(inputs, ALL_GRADIENTS, samples=20, budget_s=0.1, regime=as_regime(regime))  # noqa: E731
    measure()
    busy = Summary.of([measure().samples for _ in range(3)])
    time.sleep(3.0 * IDLE_SECONDS)
    idle = measure()
    assert idle.median == pytest.approx(busy.median, rel=0.03), (busy, idle)


@pytest.mark.cuda
def test_on_the_card_cold_timing_gives_its_memory_back(cuda_executor: CudaExecutor) -> None:
    problem = Problem(64, 64, 64)
    program = cuda_executor.compile(render(problem, make_config("row_warp")))
    inputs = read_only(random_inputs(64, 64, 64))
    program.time(inputs, ALL_GRADIENTS, regime="cold")
    gpu = open_gpu(0)

    def free() -> int:
        with gpu.active():
            return int(gpu.driver.mem_get_info()[0])

    def taken() -> int:
        before = free()
        for _ in range(20):
            program.time(inputs, ALL_GRADIENTS, samples=3, budget_s=0.01, regime="cold")
        return before - free()

    # Each keeps a buffer of several times the L2 cache, or none does. Other processes take and give as well, but not always.
    assert min(taken() for _ in range(5)) < cuda_executor.limits.l2_bytes

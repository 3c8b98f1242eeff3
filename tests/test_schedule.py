"""When the parts of a run end: all of them within the time it was given."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from tuner.gate.gate import seconds_of
from tuner.pace import FROM_STORE_S, Pace
from tuner.schedule import (
    ABLATION_SHARE,
    COMPANIONS_SHARE,
    LEAST_ABLATION_S,
    PAGE_S,
    PROVE_S,
    Schedule,
    process_began,
    stopped_at,
)

BEGINS = 100.0


@dataclass
class Clock:
    """Shows `now`."""

    now: float = BEGINS

    def __call__(self) -> float:
        return self.now


def schedule(timeout: float, *, measures: bool = True, ablation: bool = True, files: bool = True, pace: Pace | None = None,
             clock: Clock | None = None) -> Schedule:
    return Schedule(timeout, measures, ablation, files, BEGINS, pace or Pace(), clock or Clock())


@pytest.mark.parametrize("timeout", [1.0, 10.0, 25.0, 60.0, 180.0, 3600.0])
@pytest.mark.parametrize("measures", [True, False])
@pytest.mark.parametrize("pace", [Pace(), Pace(0.3, 0.02), Pace(40.0, 30.0), Pace(9.0, 2.0, busy=5.0)], ids=str)
def test_every_part_has_its_end_before_the_end_of_all(timeout: float, measures: bool, pace: Pace) -> None:
    one = schedule(timeout, measures=measures, pace=pace)
    assert one.finds < one.gives_up < one.closes <= one.proves <= one.stops < one.ends == BEGINS + timeout
    assert one.finds - BEGINS >= 0.299 * timeout


def test_on_a_gpu_the_gate_and_the_ablation_have_their_shares() -> None:
    one = schedule(180.0)
    assert one.closes - one.finds == pytest.approx(seconds_of(180.0))
    assert one.stops - one.proves == pytest.approx(ABLATION_SHARE * 180.0)
    assert schedule(180.0, ablation=False).stops == schedule(180.0, ablation=False).proves


def test_where_time_is_short_nothing_is_kept_for_what_can_be_left_out() -> None:
    short = schedule(0.9 * LEAST_ABLATION_S / ABLATION_SHARE)
    assert short.stops == short.proves
    kept = schedule(1000.0).ends - schedule(1000.0).stops
    shorter = schedule(25.0)
    assert kept - (shorter.ends - shorter.stops) == pytest.approx(PAGE_S)


def test_companions_that_take_long_to_compile_take_time_from_the_search() -> None:
    pace = Pace()
    one = schedule(180.0, pace=pace)
    pace.compiled(2.0)
    pace.judged(0.1)
    assert one.closes == one.proves  # while the gate examines the winner they are compiled and proven
    before = one.finds
    pace.compiled(30.0)
    assert before - one.finds == pytest.approx(30.0 + 3 * PROVE_S - seconds_of(180.0))
    pace.compiled(500.0)
    assert one.proves - one.closes == pytest.approx(COMPANIONS_SHARE * 180.0)


def test_without_files_nothing_is_kept_for_them() -> None:
    one = schedule(180.0, ablation=False, files=False, pace=Pace(30.0, 9.0))
    assert one.closes == one.proves == one.stops == one.ends


def test_what_came_out_of_the_store_says_nothing_of_how_long_compiling_takes() -> None:
    pace = Pace()
    pace.compiled(0.9 * FROM_STORE_S)
    assert pace.compile_s is None
    pace.compiled(4.0)
    pace.compiled(3.0)
    assert pace.compile_s == 4.0


def test_a_part_has_passed_once_its_moment_is_there() -> None:
    clock = Clock()
    one = schedule(180.0, clock=clock)
    clock.now = BEGINS + 0.5 * (one.finds - BEGINS)
    assert one.passed(0.5) and not one.passed(0.51) and not one.closed()
    clock.now = one.gives_up
    assert one.passed(1.0) and one.given_up() and not one.closed()
    clock.now = one.closes
    assert one.passed(1.0) and one.closed() and one.has_time_for_page()
    clock.now = one.ends - 0.9 * PAGE_S
    assert not one.has_time_for_page()
    assert one.took_text() == "took 177.3 s of 180 s"


def test_on_a_busy_machine_the_page_needs_more_time() -> None:
    clock = Clock(BEGINS + 180.0 - 2 * PAGE_S)
    assert schedule(180.0, clock=clock).has_time_for_page()
    assert not schedule(180.0, clock=clock, pace=Pace(busy=2.5)).has_time_for_page()


def test_without_a_limit_nothing_ever_passes() -> None:
    clock = Clock(1e9)
    for measures in (True, False):
        one = schedule(math.inf, measures=measures, clock=clock)
        assert not one.passed(1.0) and not one.closed() and one.has_time_for_page() and one.left_for_proofs() > 1e6
        assert one.took_text() == "took 999999900.0 s"


# --- clocks --------------------------------------------------------------------------------------------------------------------


def test_what_goes_on_is_stopped_at_its_moment_though_that_moves() -> None:
    moment, stopped = [math.inf], threading.Event()
    with stopped_at(lambda: moment[0], stopped.set):
        assert not stopped.wait(0.3)
        moment[0] = -math.inf
        assert stopped.wait(60.0)


def test_what_has_ended_is_not_stopped() -> None:
    stopped = threading.Event()
    with stopped_at(lambda: math.inf, stopped.set):
        pass
    assert not stopped.is_set()


def test_the_time_of_a_command_begins_when_its_process_is_started() -> None:
    code = "import time; time.sleep(0.5); from tuner.schedule import process_began; print(process_began())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    began, after = float(done.stdout), time.monotonic()
    assert before - 0.1 <= began <= after - 0.5
    assert process_began() < before


def test_how_busy_the_machine_is_shows_in_all_that_only_computes() -> None:
    pace = Pace()
    for wait in (1.0, 0.0):
        with pace.computing():
            sum(range(1_000_000))
            time.sleep(wait)  # as long as something else had the core
        assert pace.busy > 2.0

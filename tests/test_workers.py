"""Candidates in processes of their own: one that hangs, crashes or takes what it should not costs nothing but itself."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fake_gpu import rugged
from tests.planted_worker import IN_FINALS, MEMORY_BYTES, PIECE_BYTES, SEEN
from tests.processes import children, running, status_kib
from tests.worker_cases import EXPECTED, PROBLEM, RANKED, Open, opening, tried, tuned
from tuner import tuning
from tuner.ablation import ROUNDS as ABLATION_ROUNDS
from tuner.executors import Timing
from tuner.records import Record, Status
from tuner.store import Store
from tuner.timing.finals import ROUNDS
from tuner.timing.health import Spell, Watch
from tuner.timing.regimes import REGIMES
from tuner.workers import judge as workers_judge


@pytest.fixture
def opened(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens workers with plants, and ends them."""
    yield from opening(store, monkeypatch)


@pytest.fixture
def fake_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers have a GPU with made-up times; the file of who timed what."""
    monkeypatch.setenv(SEEN, str(tmp_path / "seen"))
    monkeypatch.setattr(workers_judge, "builder", lambda workers: lambda source: None)
    return tmp_path / "seen"


# --- candidates that do harm -------------------------------------------------------------------------------------------------


def test_a3_each_bad_candidate_costs_itself_alone(opened: Open) -> None:
    """Planted in the place of the best predicted, each is recorded by its kind; all others are validated, and the best wins."""
    names = list(EXPECTED)
    plants = dict(zip(RANKED, names, strict=False))
    count = len(names) + 4
    result = tuned(opened(plants), trials=count)
    found = tried(result)
    assert {name: found[config].status for config, name in plants.items()} == EXPECTED
    others = [config for config in RANKED[:count] if EXPECTED.get(plants.get(config, ""), Status.OK) is Status.OK]
    assert all(found[config].status is Status.OK for config in others)
    assert result.winner is not None and result.winner.config == others[0]
    assert all(record.reason for record in found.values() if record.status is not Status.OK)
    assert "signal 6" in (found[RANKED[names.index("aborts")]].reason or "")
    pieces = re.fullmatch(r"no more than (\d) pieces", found[RANKED[names.index("takes all memory")]].reason or "")
    assert pieces and int(pieces[1]) * PIECE_BYTES <= MEMORY_BYTES
    assert result.rejections()["hang"] == 2 and result.lost is None


def test_a_candidate_that_hangs_is_ended_within_its_limit(opened: Open) -> None:
    workers = opened({RANKED[0]: "sleeps"})
    judge = workers.judge(PROBLEM)
    compiled = judge.compile(RANKED[0])
    began = time.monotonic()
    record = judge.judge(compiled)
    limit = workers.patience.for_candidate(workers.facts, PROBLEM, RANKED[0])
    assert record.status is Status.HANG and record.reason is not None and f"{limit:.0f} s" in record.reason
    assert time.monotonic() - began < limit + 5.0


def test_the_next_worker_begins_at_once(opened: Open) -> None:
    workers = opened({RANKED[0]: "aborts"})
    judge = workers.judge(PROBLEM)
    for config in RANKED[1:3]:
        assert judge.judge(judge.compile(config)).status is Status.OK
    bad, good = judge.compile(RANKED[0]), judge.compile(RANKED[1])
    began = time.monotonic()
    assert judge.judge(bad).status is Status.CRASH
    assert judge.judge(good).status is Status.OK
    assert time.monotonic() - began < 5.0


def test_a_worker_killed_from_outside_costs_no_candidate(opened: Open) -> None:
    workers = opened()
    killed: list[int] = []
    seen: list[Record] = []

    def kill(record: Record) -> None:
        seen.append(record)
        for lane in workers.lanes:
            if lane.worker is not None and len(seen) == 1:
                killed.append(lane.worker.pid)
                os.kill(lane.worker.pid, signal.SIGKILL)

    found = tried(tuned(workers, kill))
    assert {record.status for record in found.values()} == {Status.OK} and len(found) >= 10
    assert killed and not any(running(pid) for pid in killed)


def test_the_nursery_killed_from_outside_costs_no_candidate(opened: Open) -> None:
    workers = opened()
    pids: list[int] = []

    def kill(record: Record) -> None:
        if not pids:
            pids.extend([workers.nursery_pid, *children(workers.nursery_pid)])
            os.kill(workers.nursery_pid, signal.SIGKILL)

    found = tried(tuned(workers, kill))
    assert {record.status for record in found.values()} == {Status.OK} and len(found) >= 10
    assert workers.nursery_pid != pids[0] and len(pids) > 1
    assert not any(running(pid) for pid in pids)


# --- where candidates are timed ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_gpu")
def test_a3_on_measured_times_the_winner_is_the_same(opened: Open) -> None:
    clean = tuned(opened(), trials=1000)
    assert clean.winner is not None and clean.info.measures
    ranked = sorted(clean.valid(), key=lambda record: record.best_us)
    names = ["segfaults", "loses the device", "needs too much", "is killed", "fails", "sleeps"]
    plants = dict(zip((record.config for record in ranked[1:]), names, strict=False))
    result = tuned(opened(plants), trials=1000)
    assert {plants[config]: tried(result)[config].status for config in plants} == {name: EXPECTED[name] for name in names}
    assert result.winner is not None and result.winner.config == clean.winner.config
    assert {record.config for record in result.valid()} == {record.config for record in clean.valid()} - set(plants)


def test_the_fastest_are_timed_again_in_a_process_that_has_run_nothing(opened: Open, fake_gpu: Path) -> None:
    best, second, *_ = sorted(RANKED, key=rugged)
    result = tuned(opened({second: IN_FINALS}), trials=1000)
    lines = Counter(tuple(line.split()) for line in fake_gpu.read_text().splitlines())
    judge = next(pid for pid, _ in lines)
    assert lines[judge, str(best)] == lines[judge, str(second)] == 2
    finals = {pid: count for (pid, config), count in lines.items() if config == str(best) and pid != judge}
    assert len(finals) == 2 and sum(finals.values()) == len(REGIMES) * ROUNDS  # one process more, since the second ends one
    assert result.winner is not None and result.winner.config == best and set(result.winner.times) == set(REGIMES)
    assert tried(result)[second].status is Status.OK and tried(result)[second].final_us is None


@pytest.mark.usefixtures("fake_gpu")
def test_a_spell_of_the_finals_has_no_start_of_a_worker_in_it(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second, *_ = sorted(RANKED, key=rugged)
    workers = opened({second: IN_FINALS})
    there: list[bool] = []

    class Looking(Watch):
        def take(self, measure: Callable[[], Timing], attempts: int = 1) -> Spell:
            there.append(workers.lanes[0].worker is not None)
            return super().take(measure, attempts)

    monkeypatch.setattr(tuning, "open_watch", lambda bus_id: Looking())
    tuned(workers, trials=1000)
    assert len(there) > 2 * ROUNDS and all(there)


@pytest.mark.usefixtures("fake_gpu")
def test_what_the_ablation_tries_harms_itself_alone(opened: Open) -> None:
    plain = tuned(opened(), trials=12, ablation=True)
    first, second, *others = dict.fromkeys(one.config for one in plain.ablation if one.ratios and one.config not in tried(plain))
    result = tuned(opened({first: "segfaults", second: "loses the device"}), trials=12, ablation=True)
    found = {one.config: one for one in result.ablation}
    assert {found[config].status for config in (first, second)} == {Status.CRASH} and result.lost is None
    assert not found[first].ratios and not found[second].ratios and found[first].reason and found[second].reason
    assert len(others) > 2 and all(len(found[config].ratios) == ABLATION_ROUNDS for config in others)
    assert result.winner is not None and plain.winner is not None and result.winner.config == plain.winner.config


# --- what is left behind -----------------------------------------------------------------------------------------------------


def test_candidates_leave_nothing_in_a_worker(opened: Open) -> None:
    """Neither memory nor a library: what 20 leave behind, 200 more do not add to."""
    workers = opened()
    judge = workers.judge(PROBLEM)
    compiled = [judge.compile(config) for config in RANKED[:4]]
    used = []
    for count in (20, 100):
        for index in range(count):
            assert judge.judge(compiled[index % 4]).status is Status.OK
        worker = workers.lanes[0].worker or workers.lanes[1].worker
        assert worker is not None
        used.append(status_kib(worker.pid, "VmRSS"))
        assert "kernel.so" not in Path(f"/proc/{worker.pid}/maps").read_text()
    assert used[1] < 1.02 * used[0]

"""Candidates in processes of their own: one that hangs, crashes or takes what it should not costs nothing but itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Event

import pytest

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem, Shape
from codegen.render import render
from tests import planted_worker
from tests.fake_gpu import rugged
from tests.planted_worker import IN_FINALS, MEMORY_BYTES, OPENING, PIECE_BYTES, PLANTS, RUNS, SEEN, SLOW, TEXTS, planted
from tests.trials import read_trials
from tuner import tuning
from tuner.ablation import ROUNDS as ABLATION_ROUNDS
from tuner.candidates import survey
from tuner.errors import DeviceLost, ToolchainError
from tuner.executors import Timing
from tuner.gate.checks import Outcome
from tuner.guess import rank
from tuner.outcome import TuneResult, why_no_winner
from tuner.records import Record, Status
from tuner.store import Store
from tuner.timing.finals import ROUNDS
from tuner.timing.health import Spell, Watch
from tuner.timing.regimes import REGIMES
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


@pytest.fixture
def opened(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens workers with plants, and ends them."""
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


@pytest.fixture
def fake_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers have a GPU with made-up times; the file of who timed what."""
    monkeypatch.setenv(SEEN, str(tmp_path / "seen"))
    monkeypatch.setattr(workers_judge, "builder", lambda workers: lambda source: None)
    return tmp_path / "seen"


def tuned(workers: Workers, on_record: Callable[[Record], None] = lambda record: None, **options: object) -> TuneResult:
    options = {"trials": 10, "variants": (VARIANT,), "deterministic": True, **options}
    run = TuningRun(Request(SHAPE, **options), workers, on_record=on_record)  # type: ignore[arg-type]
    run.execute()
    return run.result()


def tried(result: TuneResult) -> dict[Config, Record]:
    return {record.config: record for record in result.records if record.status not in (Status.NOT_RUN, Status.REFUSED)}


def running(pid: int) -> bool:
    """Whether a process is there that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """The processes that a process started, and that those started, and so on."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            own = [int(word) for word in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [*own, *(below for child in own for below in children(child))]
    return found


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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


# --- when time is up ---------------------------------------------------------------------------------------------------------


def test_a_run_does_not_wait_for_what_never_ends(opened: Open) -> None:
    workers = opened(dict.fromkeys(RANKED, "sleeps"), Patience(least=600.0))
    began = time.monotonic()
    result = tuned(workers, timeout=1.0)
    assert time.monotonic() - began < 60.0
    assert not tried(result) and result.winner is None and result.lost is None
    assert Counter(record.reason for record in result.records)["time was up"] >= 10
    assert why_no_winner(result) == "no candidate was finished in time; allow more with --timeout"


def test_what_was_valid_when_the_rest_was_given_up_passes_the_gate_in_other_processes(
        opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[Callable[[], object]] = []
    given_up = Event()

    def stopped_at(moment: Callable[[], float], stop: Callable[[], object]) -> AbstractContextManager[Event]:
        stops.append(stop)
        return nullcontext(given_up)

    def give_up(record: Record) -> None:
        if record.status is Status.OK:
            given_up.set()
            stops[0]()

    monkeypatch.setattr(tuning, "stopped_at", stopped_at)
    workers = opened(dict.fromkeys(RANKED[1:], "sleeps"), Patience(least=600.0))
    result = tuned(workers, give_up, timeout=1e4)
    assert [record.config for record in result.valid()] == list(tried(result)) == [RANKED[0]]
    assert result.winner is not None and result.winner.config == RANKED[0]
    assert result.checks[0].outcome is Outcome.PASSED and result.winner.gate_rows
    assert result.lost is None and len(workers.lanes) == len(opened().lanes)


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


# --- what ends a run ---------------------------------------------------------------------------------------------------------


def test_workers_that_all_end_at_once_end_the_run_with_a_sentence(opened: Open, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPENING, str(tmp_path / "opened"))
    result = tuned(opened())
    assert result.lost is not None and "3 processes in a row" in result.lost and "status 3" in result.lost
    assert result.winner is None


def test_stopping_does_not_wait_for_a_worker_that_is_starting(opened: Open, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPENING, str(tmp_path / "opened"))
    monkeypatch.setenv(SLOW, "")
    workers = opened()
    judge = workers.judge(PROBLEM)
    compiled = judge.compile(RANKED[0])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(judge.judge, compiled)
        wait_until(lambda: children(workers.nursery_pid))
        judge.stop()
        began = time.monotonic()
        with pytest.raises(DeviceLost, match="the run has ended"):
            waiting.result(60.0)
    assert time.monotonic() - began < 10.0
    monkeypatch.delenv(OPENING)
    assert workers.why_invalid(PROBLEM, RANKED[0], 0, 1 << 20) is None  # others may still be asked


def test_a_device_that_cannot_be_opened_is_said_as_in_this_process(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(ToolchainError, match="no C\\+\\+ compiler found"):
        Workers(Place("host", "sm_90", store.root))


def test_a_nursery_that_cannot_start_is_a_sentence(store: Store) -> None:
    with pytest.raises(DeviceLost, match="the process that was to open the device ended"):
        Workers(Place("host", "sm_90", store.root), module="tests.no_such_module")


def test_closing_leaves_no_process(opened: Open) -> None:
    workers = opened({RANKED[0]: "sleeps"})
    judge = workers.judge(PROBLEM)
    assert judge.judge(judge.compile(RANKED[1])).status is Status.OK
    pids = [workers.nursery_pid, *children(workers.nursery_pid)]
    assert len(pids) == 2
    workers.close()
    assert not any(running(pid) for pid in pids)


def command_line(out: Path, plants: Mapping[Config, str]) -> subprocess.Popen[str]:
    """`python -m tuner`, with plants, as from a terminal."""
    code = ("import sys; from tuner.workers import pool, nursery; from tuner import cli, choose\n"
            "choose.Workers.__init__.__defaults__ = (None, 'tests.planted_worker')\n"
            f"sys.exit(cli.main(['--shape', '{SHAPE}', '--executor', 'host', '--variants', '{VARIANT}', '--out', {str(out)!r}]))")
    environment = {**os.environ, PLANTS: json.dumps({str(config): name for config, name in plants.items()})}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def until_stuck(process: subprocess.Popen[str], out: Path) -> list[int]:
    """Waits until a candidate that sleeps has a core to itself; all processes of the run."""
    def stuck() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return (out / "trials.jsonl").exists() and len(children(process.pid)) >= 2
    wait_until(stuck)
    time.sleep(1.0)
    return [process.pid, *children(process.pid)]


def test_p2_ctrl_c_does_not_wait_for_a_candidate_that_hangs(tmp_path: Path) -> None:
    everyone = survey(Problem.of(SHAPE), target("sm_90"), [VARIANT])
    process = command_line(tmp_path, dict.fromkeys(rank(everyone), "sleeps"))
    pids = until_stuck(process, tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
    assert time.monotonic() - began < 15.0
    wait_until(lambda: not any(running(pid) for pid in pids), 5.0)
    assert read_trials(tmp_path / "trials.jsonl")[1] == []


def test_no_process_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    everyone = survey(Problem.of(SHAPE), target("sm_90"), [VARIANT])
    process = command_line(tmp_path, dict.fromkeys(rank(everyone), "endless"))
    pids = until_stuck(process, tmp_path)
    process.kill()
    process.wait()
    wait_until(lambda: not any(running(pid) for pid in pids), 20.0)
    process.communicate()


# --- what is left behind -----------------------------------------------------------------------------------------------------


def status_kib(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


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

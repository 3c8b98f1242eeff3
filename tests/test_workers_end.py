"""Runs in processes of their own that end: when time is up, when they are interrupted or killed, when none can be started."""

from __future__ import annotations

import json
import os
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
from codegen.problem import Problem
from tests.planted_worker import OPENING, PLANTS, SLOW
from tests.processes import children, running, wait_until
from tests.trials import read_trials
from tests.worker_cases import PROBLEM, RANKED, ROOT, SHAPE, VARIANT, Open, opening, tried, tuned
from tuner import tuning
from tuner.candidates import survey
from tuner.errors import DeviceLost, ToolchainError
from tuner.gate.checks import Outcome
from tuner.guess import rank
from tuner.outcome import why_no_winner
from tuner.records import Record, Status
from tuner.store import Store
from tuner.workers.messages import Place
from tuner.workers.patience import Patience
from tuner.workers.pool import Workers


@pytest.fixture
def opened(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens workers with plants, and ends them."""
    yield from opening(store, monkeypatch)


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
    assert any("was given up" in said for said in result.said)
    assert result.lost is None and len(workers.lanes) == len(opened().lanes)


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

"""What a run does with its time: nothing that has no end holds it up, and what is left out is said."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem, Shape
from codegen.render import Source, render
from tests import quick_worker
from tests.fake_gpu import FakeGpu
from tests.processes import children, running, wait_until
from tuner import ablation
from tuner import proofs as proofs_module
from tuner.artifact import serve_all_rows
from tuner.candidates import survey
from tuner.companions import choose_companion
from tuner.compilers import Group, run_compiler
from tuner.errors import RunEnded
from tuner.evaluate import Compiled, Evaluator
from tuner.guess import rank
from tuner.outcome import Event, TuneResult
from tuner.pace import Pace
from tuner.pipeline import compiling, try_in_turn
from tuner.proofs import Proofs
from tuner.records import Record, Status
from tuner.request import Request
from tuner.strategy import Listed
from tuner.tuning import TuningRun
from tuner.workers import judge as workers_judge
from tuner.workers.messages import Place
from tuner.workers.pool import Workers

SHAPE = Shape(4, 4, 8, 16)
VARIANT = "row_warp"
PROBLEM = Problem.of(SHAPE)
H200 = target("sm_90")
RANKED = list(rank(survey(PROBLEM, H200, [VARIANT])))

FOREVER = ["sleep", "1000"]

SOON = 60.0
"""Seconds, of what takes a moment on a machine with nothing else to do."""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """A GPU whose workers take everything for valid, and a compiler that has nothing to do."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    for module in (workers_judge, proofs_module):
        monkeypatch.setattr(module, "builder", lambda workers: lambda source: None)
    with closing(Workers(Place("cuda", "sm_90", tmp_path), module=quick_worker.__name__)) as opened:
        yield opened


# --- compilers that do not end -------------------------------------------------------------------------------------------------


class Compiling(Evaluator):
    """A judge of whose candidates all but the first are compiled for ever."""

    def __init__(self, gpu: FakeGpu, folder: Path) -> None:
        super().__init__(gpu, PROBLEM)
        self._folder = folder

    def compile(self, config: Config) -> Compiled:
        if config != RANKED[0]:
            run_compiler(FOREVER, self._folder)
        return super().compile(config)


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_is_still_compiled_when_time_is_up_is_not_waited_for_and_its_compilers_end(lanes: int, tmp_path: Path) -> None:
    seen: list[Record] = []
    up = threading.Event()
    compilers: list[int] = []

    def note(record: Record) -> None:
        seen.append(record)
        wait_until(lambda: len(_sleeping()) >= 1)
        compilers.extend(_sleeping())
        up.set()

    began = time.monotonic()
    try_in_turn(Listed(RANKED[:4]), Compiling(FakeGpu(), tmp_path), up.is_set, note, lanes=lanes)
    assert time.monotonic() - began < SOON
    assert [(record.config, record.status) for record in seen] == [(RANKED[0], Status.OK)]
    wait_until(lambda: not any(running(pid) for pid in compilers))


def _sleeping() -> list[int]:
    """Those of the processes that this one has started which run FOREVER."""
    return [pid for pid in children(os.getpid()) if _command(pid) == FOREVER]


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def test_only_the_compilers_of_those_that_are_given_up_end(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as others:
        with compiling(1) as pool:
            given_up = pool.submit(run_compiler, FOREVER, tmp_path)
            kept = others.submit(run_compiler, ["sh", "-c", "while [ ! -e end ]; do sleep 0.05; done"], tmp_path)
            wait_until(_sleeping)
        with pytest.raises(RunEnded):
            given_up.result(SOON)
        assert not kept.done()
        (tmp_path / "end").touch()
        assert kept.result(SOON).returncode == 0


def test_after_the_end_no_compiler_begins(tmp_path: Path) -> None:
    group = Group()
    group.end()
    with ThreadPoolExecutor(1, initializer=group.join) as pool, pytest.raises(RunEnded):
        pool.submit(run_compiler, ["sh", "-c", "sleep 2; touch made"], tmp_path).result(SOON)
    assert not (tmp_path / "made").exists()


def test_the_pace_is_learned_from_what_is_tried() -> None:
    class Slow(Evaluator):
        def compile(self, config: Config) -> Compiled:
            time.sleep(0.3)
            return super().compile(config)

    pace = Pace()
    try_in_turn(Listed(RANKED[:2]), Slow(FakeGpu(), PROBLEM), lambda: False, lambda record: None, pace=pace)
    assert pace.compile_s is not None and pace.compile_s >= 0.3
    assert pace.judge_s is not None and 0.0 < pace.judge_s < SOON


# --- what is left out ----------------------------------------------------------------------------------------------------------


def tuned(executor: FakeGpu | Workers, on_stage: Callable[[TuningRun, str], None] = lambda run, stage: None,
          **options: object) -> TuneResult:
    def tell(event: Event) -> None:
        on_stage(run, event.stage)

    given = {name: options.pop(name) for name in ("began", "files", "proofs") if name in options}
    run = TuningRun(Request(SHAPE, variants=(VARIANT,), trials=30, **options), executor, on_event=tell, **given)  # type: ignore
    run.execute()
    return run.result()


def test_the_ablation_is_left_out_where_time_is_up_and_that_is_said() -> None:
    def late(run: TuningRun, stage: str) -> None:
        if stage == "examining the fastest":
            run.schedule = replace(run.schedule, clock=lambda: math.inf)

    result = tuned(FakeGpu(), late, timeout=1000.0, ablation=True, files=True)
    assert result.winner is not None and result.ablation == ()
    assert [said for said in result.said if "not looked at, since time was up" in said]
    assert tuned(FakeGpu(), timeout=1000.0, ablation=True, files=True).ablation


def test_time_runs_from_when_the_command_was_given() -> None:
    result = tuned(FakeGpu(), timeout=1000.0, began=time.monotonic() - 1001.0)
    assert result.records == () and result.winner is None
    assert tuned(FakeGpu(), timeout=1000.0, began=time.monotonic() - 1.0).winner is not None


def test_while_nothing_is_valid_the_time_of_the_finals_is_searched_too() -> None:
    gpu, slow = FakeGpu(), []

    def late(run: TuningRun, stage: str) -> None:
        if stage == "compiling the first candidates":
            now = run.schedule.begins + 0.9 * (run.schedule.finds - run.schedule.begins)  # in the time of the finals
            run.schedule = replace(run.schedule, clock=lambda: now)
            slow.append(now)

    result = tuned(gpu, late, timeout=1000.0)
    assert slow and [record.status for record in result.records] == [Status.OK]
    assert result.winner is not None and result.winner.final_us is not None


def test_an_ablation_that_is_stopped_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    times = 0

    def stopping(self: Evaluator, *arguments: object) -> object:
        nonlocal times
        times += 1
        if times > 12:
            raise RunEnded("the run has ended")
        return timed(self, *arguments)  # type: ignore[arg-type]

    result = tuned(FakeGpu())
    assert result.winner is not None
    timed = Evaluator.time
    monkeypatch.setattr(Evaluator, "time", stopping)
    records = {record.config: record for record in result.records}
    found = ablation.ablate(result.winner, survey(PROBLEM, H200, [VARIANT]), (), records, Evaluator(FakeGpu(), PROBLEM),
                            FakeGpu(), "warm", math.inf)
    assert [one for one in found if one.ratios] and not any("lost" in (one.reason or "") for one in found)


# --- companions ahead ----------------------------------------------------------------------------------------------------------


def test_companions_are_proven_before_they_are_asked_for_and_are_the_same(workers: Workers,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Problem, Config]] = []
    prove = Workers.why_invalid

    def noted(self: Workers, problem: Problem, config: Config, *others: object) -> str | None:
        asked.append((problem, config))
        return prove(self, problem, config, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Workers, "why_invalid", noted)
    result = tuned(workers)
    assert result.winner is not None
    source = render(PROBLEM, result.winner.config)

    def served(proofs: Proofs | None) -> list[tuple[Config, int | None]]:
        check = None if proofs is None else proofs.why_invalid
        kernels = serve_all_rows(source, H200, lambda at: choose_companion(workers, result, at, check))
        return [(kernel.source.config, kernel.last_rows) for kernel in kernels]

    plain = served(None)
    alone = len(asked)
    assert alone > 0
    with Proofs(workers, result.info.seed) as proofs:
        proofs.begin(PROBLEM, result.winner.config)
        proofs.finish(SOON)
        begun = len(asked)
        assert served(proofs) == plain and len(asked) == begun > alone


def test_bad_news_of_a_companion_are_asked_for_again(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tuned(workers)
    assert result.winner is not None
    answers: list[str | None] = []

    def first_stopped(self: Workers, *arguments: object) -> str | None:
        answers.append("the process that ran it was ended" if threading.current_thread() is not main else None)
        return answers[-1]

    main = threading.current_thread()
    monkeypatch.setattr(Workers, "why_invalid", first_stopped)
    with Proofs(workers, 0) as proofs:
        proofs.begin(PROBLEM, result.winner.config)
        proofs.finish(SOON)
        begun = len(answers)
        kernels = serve_all_rows(render(PROBLEM, result.winner.config), H200,
                                 lambda at: choose_companion(workers, result, at, proofs.why_invalid))
        assert begun and None not in answers[:begun] and set(answers[begun:]) == {None} and len(kernels) > 1


def test_proofs_that_nobody_waits_for_end_with_their_compilers(workers: Workers, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def build(source: Source) -> None:
        run_compiler(FOREVER, tmp_path)

    monkeypatch.setattr(proofs_module, "builder", lambda workers: build)
    result = tuned(workers)
    assert result.winner is not None
    began = time.monotonic()
    with Proofs(workers, 0) as proofs:
        proofs.begin(PROBLEM, result.winner.config)
        wait_until(_sleeping)
    assert time.monotonic() - began < SOON
    wait_until(lambda: not _sleeping())


def test_a_run_has_the_companions_of_its_winner_proven_before_the_ablation(workers: Workers) -> None:
    order: list[str] = []

    class Noting(Proofs):
        def begin(self, problem: Problem, winner: Config) -> None:
            order.append(f"begin {winner}")

        def finish(self, seconds: float) -> None:
            order.append("finish")

    with Noting(workers, 0) as proofs:
        result = tuned(workers, lambda run, stage: order.append(stage), ablation=True, timeout=1000.0, proofs=proofs, files=True)
    assert result.winner is not None
    wanted = ["examining the fastest", f"begin {result.winner.config}", "checking the configs for other row counts", "finish",
              "changing one parameter at a time"]
    assert [step for step in order if step in wanted] == wanted
    assert json.dumps([one.as_json() for one in result.ablation])

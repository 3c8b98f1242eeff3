"""One tuning run: from a shape to the records of its candidates and the fastest valid one.

With a GPU the candidates are searched by their measured times. Without one they are ranked by the cost model, the best are
compiled and validated on the CPU, and the fastest predicted of the valid ones wins; the others are recorded as not run.

The winner is the first of the fastest that passes the gate (tuner.gate).

Time. A run on a GPU ends after TIMEOUT seconds unless the caller says otherwise. The end of it is for the gate and what else
follows (tuner.schedule); before, the space is surveyed and ranked, candidates are tried, and on a GPU the last FINAL_SHARE is for
the finalists. What is predicted to run far too long is not tried at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from codegen.config import Config
from codegen.render import render
from codegen.space import make_config
from tuner.ablation import ablate
from tuner.candidates import nearest, survey
from tuner.changed import Changed
from tuner.costmodel import plausible_us, predict
from tuner.errors import DeviceLost, RunEnded, StorageLost, ToolchainError
from tuner.evaluate import FINAL_SAMPLES, FINAL_SECONDS, Evaluator, Judge, Report
from tuner.executors import Executor, Resources
from tuner.gate.checks import SKIPPED, Check, out_of_time
from tuner.gate.gate import contenders, open_gate
from tuner.guess import longest, rank
from tuner.outcome import Event, TuneResult, rejections, spills
from tuner.pipeline import told, try_in_turn
from tuner.pipeline import workers as cores
from tuner.proofs import Proofs
from tuner.provenance import now, sources_digest, version
from tuner.records import Record, RunInfo, Status
from tuner.request import Request
from tuner.schedule import Schedule, stopped_at
from tuner.store import Store
from tuner.strategy import Search, strategy_for
from tuner.study.earlier import TakenUp
from tuner.timing import finals
from tuner.timing.finals import Entrant
from tuner.timing.health import open_watch
from tuner.timing.regimes import as_regime
from tuner.toolchain import find_nvcc
from tuner.versions import versions
from tuner.wisdom.recall import seeds, seeds_first
from tuner.workers.pool import Workers

if TYPE_CHECKING:
    from tuner.study.storage import Storage

TRIALS = 500
"""Candidates tried on a GPU unless the caller says otherwise, if time allows."""

TIMEOUT = 180.0
"""Seconds of a run on a GPU unless the caller says otherwise."""

FINAL_SHARE = 1 / 6
"""Part of the time before the gate that is kept for validating and timing the finalists."""

SHORTLIST = 16
"""Candidates validated without a GPU unless the caller says otherwise, beside each variant's default."""

FINALISTS, FINAL_WITHIN = 8, 1.25
"""The fastest are timed again in turns (tuner.timing.finals): at most so many, and only those whose first time lies within this
factor of the best."""


class TuningRun:
    """A run that can be interrupted: whatever is raised from `execute`, `result` has all that was finished.

    Args:
        request: what to tune for.
        executor: where candidates run: in this process, or, with Workers, in others.
        store: where compiled kernels are kept, for the compiler reports of runs without a GPU.
        storage: where the study is that this run shares with others; None: it has the search to itself.
        files: whether best.cu, with its companions, and the pages are written afterwards, in the time of the request.
        proofs: of these companions, which begin while the winner is still examined.
        began: when the time of the request began, by time.monotonic; None: now.
        on_record: called with each record when it is finished.
        on_event: called after each step.

    Attributes:
        info: what the run is made under.
        problem, space: what is computed, and the candidates.
        schedule: when each part ends.

    Raises:
        InvalidProblem, UnsupportedDtype, InvalidConfig, InputError, InputTypeError: the request makes no sense.
    """

    def __init__(self, request: Request, executor: Executor | Workers, *, store: Store | None = None,
                 storage: Storage | None = None, files: bool = False, proofs: Proofs | None = None, began: float | None = None,
                 on_record: Callable[[Record], None] = lambda record: None,
                 on_event: Callable[[Event], None] = lambda event: None) -> None:
        began = time.monotonic() if began is None else began
        self._request = request
        self._executor = executor
        self._store = Store() if store is None else store
        self._storage = storage
        self._proofs = proofs
        self.on_record = on_record
        self.on_event = on_event
        self.problem = request.problem()
        self._trials = request.trials or (TRIALS if executor.measures else SHORTLIST)
        self._timeout = request.timeout or (TIMEOUT if executor.measures else None)
        self.schedule = Schedule(math.inf if self._timeout is None else self._timeout, executor.measures, request.ablation, files,
                                 began)
        with self.schedule.pace.computing():
            self.space = survey(self.problem, executor.limits, request.variants)
        self._records: dict[Config, Record] = {}
        self._best: Record | None = None
        self._fastest: Config | None = None
        self._lost: str | None = None
        self._alone: str | None = None
        self._said: tuple[str, ...] = ()
        self._origin = ""
        self._checks: tuple[Check, ...] = (SKIPPED,)
        self._ablation: tuple[Changed, ...] = ()
        self.info = self._information()

    def take_up(self, taken: TakenUp) -> None:
        """Before `execute`: goes on with what an earlier run has tried. It counts as this run's, but not its time."""
        self._records = {record.config: record for record in taken.records}
        self._best = min(filter(_may_win, taken.records), key=lambda record: record.best_us, default=None)
        self._origin = taken.clause

    def execute(self) -> None:
        """Runs to the end, or until time is up or the device is lost.

        Raises:
            ToolchainError: there is no compiler for the executor.
            KeyboardInterrupt: the user's.
        """
        self._tell("predicting times", 0, 1)
        with self.schedule.pace.computing():
            predicted = seeds_first(rank(self.space), self.space, self.info)
        self._tell("compiling the first candidates", 0, 1)
        try:
            judge = self._judge()
            with stopped_at(lambda: self.schedule.gives_up, judge.stop) as stopped, suppress(RunEnded):
                if self._executor.measures:
                    self._search(predicted, judge)
                else:
                    self._validate_best(predicted, judge)
            if self._lost is not None:
                return
            if stopped.is_set():
                judge = self._judge()
                self._said += ("what still ran when the time of the search was up was given up",)
            with stopped_at(lambda: self.schedule.stops, judge.stop):
                self._pass_gate(judge)
            self._prove_companions()
            self._ablate(judge, predicted)
        except DeviceLost as error:
            self._lose(next(reversed(self._records), "its start"), error)

    def _lose(self, at: Config | str, error: DeviceLost) -> None:
        self._lost = f"the GPU was lost after {at}, and the run ended there: {error}"

    def result(self) -> TuneResult:
        """All that is finished by now."""
        records = tuple(self._records.values())
        valid = [record for record in records if record.status is Status.OK]
        winner = min(valid, key=lambda record: (spills(record), record.best_us), default=None)
        if self._fastest is not None:
            winner = self._records[self._fastest]
        limits = self._executor.limits
        said = (self._origin, *self._said) if self._origin else self._said
        return TuneResult(self.info, self.problem, limits, records, winner, self._lost or self._alone, said, self._checks,
                          self._ablation, self.space.variants)

    # --- with a GPU ----------------------------------------------------------------------------------------------------------

    def _search(self, predicted: Mapping[Config, float], judge: Judge) -> None:
        judge.best_us = math.inf if self._best is None else self._best.best_us
        ranked = self._short_enough(predicted)
        total = min(self._trials, len({*ranked, *self._records}))
        tried = {config: told(record) for config, record in self._records.items()}
        search = Search(ranked, predicted, self._trials, self._request.seed, seeds(self.info, self.space), tried)
        self._try(search, judge, 1 - FINAL_SHARE, lambda record: self._add(record, total))
        self._time_finalists(judge, self._finalists(judge))

    def _short_enough(self, predicted: Mapping[Config, float]) -> list[Config]:
        """All candidates, the predicted ones first, but for those of which a call would take too long."""
        limit = longest(predicted)
        others = [config for config in self.space.valid if config not in predicted]
        return [config for config, time_us in predicted.items() if time_us <= limit] + others

    def _finalists(self, judge: Judge) -> list[Record]:
        """The fastest, all of them valid: those that were only screened are validated now, as far as time allows."""
        tried = [record for record in self._records.values() if record.status in (Status.OK, Status.SLOWER)]
        within = sorted((record for record in tried if record.best_us <= FINAL_WITHIN * judge.best_us and not spills(record)),
                        key=lambda record: record.best_us)[:FINALISTS]
        for done, record in enumerate(within):
            if record.status is Status.SLOWER and not self.schedule.passed(1 - FINAL_SHARE / 2):
                self._tell("validating the fastest", done, len(within))
                try:
                    self._records[record.config] = judge.validate(record)
                except RunEnded:
                    raise
                except DeviceLost as error:
                    self._lose(record.config, error)
                    return []
        found = (self._records[record.config] for record in within)
        return [record for record in found if record.status is Status.OK]

    def _time_finalists(self, judge: Judge, finalists: Sequence[Record]) -> None:
        """Times the fastest again, in turns and in a fresh process: in all rounds, or as many as there is time for, but one.

        One that cannot be timed any more gets no final time, and with that cannot win against those that did. Where the GPU is
        lost, none gets one.
        """
        judge.renew()
        regime = as_regime(self._request.regime)
        limits = self._executor.limits
        watch = open_watch(self._executor.bus_id)
        entrants = [Entrant.of(record.config, render(self.problem, record.config).plan, self.problem.rows, limits.sms)
                    for record in finalists]
        try:
            found = finals.run(
                lambda config, regime: judge.time(config, regime, FINAL_SAMPLES, FINAL_SECONDS), entrants, regime=regime,
                least_us=plausible_us(self.problem, limits), watch=watch, get_ready=judge.get_ready,
                enough=lambda: self.schedule.passed(1),
                on_round=lambda done, total: self._tell("timing the fastest again", done, total))
        except RunEnded:
            raise
        except DeviceLost as error:
            return self._lose("the finals", error)
        for finalist in found.finalists:
            self._records[finalist.config] = finals.timed(self._records[finalist.config], finalist, regime)
        self._fastest = found.winner
        tally = judge.drain()
        tally.add(watch.drain())
        self._said = (*found.said, *tally.said(), *(self._executor.said if isinstance(self._executor, Workers) else ()))

    # --- without -------------------------------------------------------------------------------------------------------------

    def _validate_best(self, predicted: Mapping[Config, float], judge: Judge) -> None:
        ranked = list(predicted)
        defaults = (nearest(make_config(name), ranked) for name in self.space.variants)
        chosen = dict.fromkeys((*ranked[:self._trials], *(config for config in defaults if config is not None)))
        shortlist = sorted(chosen, key=predicted.__getitem__)
        left = [config for config in shortlist if config not in self._records]
        total = len(left) + len(self._records)
        self._records = {config: self._predicted(record) for config, record in self._records.items()}
        search = Search(left, predicted, len(left), self._request.seed, left)
        self._try(search, judge, 1, lambda record: self._add(self._predicted(record), total))
        # In this order, in which the first of equals wins, whoever was finished first.
        self._records = {config: self._records[config] for config in (*predicted, *self._records) if config in self._records}
        for config in ranked:
            if config not in self._records:
                reason = "time was up" if config in chosen else "not among the best predicted"
                self._add(Record(config, Status.NOT_RUN, reason, predicted[config]), total)

    def _predicted(self, record: Record) -> Record:
        """With the time that the cost model says, now that the device compiler has said what the kernels use."""
        prediction = predict(self.problem, record.config, self._executor.limits, record.resources)
        return replace(record, time_us=prediction.time_us, resources=prediction.resources)

    def _report(self) -> Report | None:
        """What nvcc says of a candidate's kernels; None where this machine has none."""
        arch = self._executor.limits.arch
        try:
            nvcc = find_nvcc(arch)
        except ToolchainError:
            return None

        def report(config: Config) -> dict[str, Resources]:
            source = render(self.problem, config)
            return nvcc.compile(source.text, arch, self._store).resources(source.plan)

        return report

    # --- both ----------------------------------------------------------------------------------------------------------------

    def _pass_gate(self, judge: Judge) -> None:
        """The first of the fastest that passes wins. Once time is up, the next one does, and that it was not examined is said."""
        store = self._executor.store if isinstance(self._executor, Workers) else self._store.root
        gate = open_gate(judge, self._executor, self.problem, store, self._request.deterministic, self.schedule.closes)
        fastest = contenders(self._records.values(), self._fastest)
        for done, record in enumerate(fastest):
            self._fastest = record.config
            if done and self.schedule.closed():
                self._checks = (out_of_time(done),)
                return
            self._tell("examining the fastest", 0, 1)
            if self._proofs is not None:
                self._proofs.begin(self.problem, record.config)
            try:
                passage = gate.examine(record)
            except RunEnded:  # while it was examined: that it was not is what is said of it
                return
            except DeviceLost as error:
                self._records[record.config] = replace(record, status=Status.LAUNCH_ERROR, reason=str(error))
                self._fastest = None
                return self._lose(record.config, error)
            self._records[record.config] = passage.record
            if passage.passed:
                self._checks = passage.checks
                return
            self._said += (passage.rejection,)
            self._fastest = None

    def _prove_companions(self) -> None:
        """Waits for what was begun when the winner was to be examined: it comes before all that can be left out."""
        if self._proofs is not None and self.result().winner is not None:
            self._tell("checking the configs for other row counts", 0, 1)
            self._proofs.finish(self.schedule.left_for_proofs())

    def _ablate(self, judge: Judge, predicted: Iterable[Config]) -> None:
        """Looks what each parameter of the winner is worth, where that is asked for. Without a GPU that is predicted at once."""
        if self._request.ablation and (winner := self.result().winner) is not None:
            if self._executor.measures and self.schedule.stopped():
                self._said += ("what each parameter of the winner is worth was not looked at, since time was up",)
                return
            self._tell("changing one parameter at a time", 0, 1)
            try:
                with stopped_at(lambda: self.schedule.stops, judge.stop) if self._executor.measures else nullcontext():
                    self._ablation = ablate(winner, self.space, predicted, self._records, judge, self._executor,
                                            as_regime(self._request.regime), self.schedule.stops)
            except ToolchainError as error:  # the winner is none the worse for it
                self._said += (f"what each parameter of the winner is worth was not looked at: {error}",)

    def _try(self, search: Search, judge: Judge, share: float, on_record: Callable[[Record], Record]) -> None:
        """Tries candidates until such a part of the time is over, or, while none is valid, as long as may be; with all who share
        the study, if there is one."""
        def out_of_time() -> bool:
            return self.schedule.given_up() if self._best is None else self.schedule.passed(share)

        lanes = self._lanes()
        if self._storage is None:
            try_in_turn(strategy_for(search), judge, out_of_time, on_record, lanes=lanes, pace=self.schedule.pace)
            return
        from tuner.study.together import try_together

        try:
            try_together(self._storage, self.info, self.space, search, judge, out_of_time, on_record, lanes,
                         self.schedule.pace)
        except StorageLost as error:
            self._alone = f"{error}; this run went on alone with what it had"

    def _lanes(self) -> int:
        """How many candidates are judged at a time."""
        if isinstance(self._executor, Workers):
            return len(self._executor.lanes)
        return 1 if self._executor.measures else cores()

    def _judge(self) -> Judge:
        eps, seed, regime = self._request.eps, self._request.seed, as_regime(self._request.regime)
        report = None if self._executor.measures else self._report()
        if isinstance(self._executor, Workers):
            return self._executor.judge(self.problem, eps=eps, seed=seed, regime=regime, report=report)
        return Evaluator(self._executor, self.problem, eps=eps, seed=seed, regime=regime, report=report)

    def _add(self, record: Record, total: int) -> Record:
        self._records[record.config] = record
        self.on_record(record)
        if record.status is Status.OK and (self._best is None or record.best_us < self._best.best_us):
            self._best = record
        if record.status not in (Status.NOT_RUN, Status.REFUSED):
            tried = sum(1 for other in self._records.values() if other.status is not Status.REFUSED)
            self._tell("trying candidates", tried, total)
        return record

    def _tell(self, stage: str, done: int, total: int) -> None:
        self.on_event(Event(stage, done, total, self._best, rejections(self._records.values())))

    def _information(self) -> RunInfo:
        request, executor, space = self._request, self._executor, self.space
        return RunInfo(
            shape=str(request.shape), dtype=self.problem.dtype, param_dtype=self.problem.param_dtype,
            accuracy=self.problem.accuracy, wants=self.problem.wants_key, deterministic=request.deterministic,
            eps=float(request.eps), executor=executor.name, device=executor.device, target=executor.limits.arch,
            seed=request.seed, trials=self._trials, timeout_s=self._timeout, date=now(), command=request.command,
            version=version(), combinations=space.combinations, valid=len(space.valid), refused=space.refused,
            measures=executor.measures, rates=executor.rates, regime=as_regime(request.regime), sources=sources_digest(),
            versions=versions(executor.limits.arch))


def _may_win(record: Record) -> bool:
    return record.status is Status.OK

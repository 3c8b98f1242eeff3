"""One study that several processes search together, each on a device of its own.

A trial is a config. A process *claims* it: adds a running trial with all its parameters in one step, then looks whether an older
trial has the same config, and if so gives its own up. So no config is tried twice, whoever proposes it. When it has judged the
candidate, it ends the trial with its record, which every other process reads: complete with its time, or pruned where it was
rejected. A failed trial is one that nobody works on and that says nothing of its config: given up, released by a process that
ended before it came to it, or lost with its process (tuner/study/members.py). A config of which only failed trials are there is
claimed before all others. One with which two processes were lost while they judged it is recorded as a crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import optuna
from optuna.trial import FrozenTrial, TrialState

from codegen.config import Config
from codegen.errors import CodegenError
from tuner.errors import StorageLost
from tuner.pipeline import told
from tuner.records import Record, Status
from tuner.search import ModelSampler, as_distributions, as_params, config_of
from tuner.study.members import Members
from tuner.study.storage import Ledger

T = TypeVar("T")

POLL_S = 0.5
"""How often a process with nothing to do looks whether the others have finished."""

BLAMED = 2
"""Processes lost with a config before it counts as what ended them: one may be anybody's doing."""

_MEMBER, _BEGUN, _LOST, _RECORD = "member", "begun", "lost", "record"


@dataclass(slots=True)
class _Claim:
    trial_id: int
    record: Record | None = None


class Shared:
    """A strategy: see the top of this file. Used by one thread. Once the storage is lost it gives out nothing more.

    Args:
        ledger: the study.
        members: the processes that share it; this one is among them.
        sampler: proposes configs.
        budget: the largest number of configs that all processes together try.
        on_record: called with each record that another process has made.
        give_up: whether it is not worth waiting for others any more.

    Attributes:
        lost: how the storage was lost; None while it is there.
    """

    def __init__(self, ledger: Ledger, members: Members, sampler: ModelSampler, budget: int,
                 on_record: Callable[[Record], None], give_up: Callable[[], bool]) -> None:
        self._ledger = ledger
        self._members = members
        self._sampler = sampler
        self._budget = budget
        self._on_record = on_record
        self._give_up = give_up
        self.lost: StorageLost | None = None
        self._open: dict[Config, _Claim] = {}
        self._known: set[int] = set()

    def ask(self, count: int) -> list[Config]:
        """As Strategy.ask. While nothing is open here, waits for what others are trying: it may have to be tried again."""
        return self._unless_lost(partial(self._ask, count), [])

    def _ask(self, count: int) -> list[Config]:
        while True:
            trials = self._look()
            claimed: list[Config] = []
            most = min(count, self._share(trials) - len(self._open))
            while len(claimed) < most and (config := self._next(trials)) is not None:
                trial_id = self._ledger.add(self._trial(config))
                trials = self._ledger.trials()
                if self._claim(config, trial_id, trials):
                    claimed.append(config)
            if claimed or self._open or self._give_up() or not any(trial.state is TrialState.RUNNING for trial in trials):
                return claimed
            time.sleep(POLL_S)

    def begin(self, config: Config) -> None:
        """Tells the others that this process now runs the config, and may be lost with it."""
        self._unless_lost(partial(self._ledger.note, self._open[config].trial_id, _BEGUN, True), False)

    def add(self, record: Record) -> None:
        """The record of a config that was asked for, before it is told."""
        self._open[record.config].record = record

    def tell(self, config: Config, time_us: float | None) -> None:
        """As Strategy.tell."""
        claim = self._open.pop(config)
        assert claim.record is not None
        self._unless_lost(partial(self._end, claim.trial_id, claim.record), None)

    def release(self) -> None:
        """Gives all that is open to the other processes. Where the storage is lost, they will see that this one has gone."""
        for claim in self._open.values():
            self._unless_lost(partial(self._ledger.end, claim.trial_id, TrialState.FAIL), False)
        self._open.clear()

    def _unless_lost(self, act: Callable[[], T], otherwise: T) -> T:
        """What the act returns, unless the storage is lost. The search that is shared ends with it; what is judged is kept."""
        if self.lost is None:
            try:
                return act()
            except StorageLost as error:
                self.lost = error
        return otherwise

    def _share(self, trials: Sequence[FrozenTrial]) -> int:
        """How many configs this process may have open: one, or half of its part of what is left, so that all end together."""
        left = self._budget - sum(trial.state is not TrialState.FAIL for trial in trials)
        return max(1, (left + len(self._open)) // (2 * self._members.alive))

    def _next(self, trials: Sequence[FrozenTrial]) -> Config | None:
        """What to claim next; None where the budget is used up or nothing is left."""
        taken = [trial for trial in trials if trial.state is not TrialState.FAIL]
        if len(taken) >= self._budget:
            return None
        configs = {config_of(trial.params) for trial in taken}
        for trial in trials:
            config = config_of(trial.params)
            if trial.state is TrialState.FAIL and config is not None and config not in configs:
                return config
        return self._sampler.propose(trials, len(trials))

    def _trial(self, config: Config) -> FrozenTrial:
        distributions = as_distributions(config.variant, self._sampler.variants)
        return optuna.trial.create_trial(state=TrialState.RUNNING, params=as_params(config), distributions=distributions,
                                         user_attrs={_MEMBER: self._members.own})

    def _claim(self, config: Config, trial_id: int, trials: Sequence[FrozenTrial]) -> bool:
        """Whether the config is this process's to try, now that all can see its trial."""
        before = [trial for trial in trials if trial._trial_id < trial_id]
        standing = [trial for trial in before if trial.state is not TrialState.FAIL]
        if len(standing) >= self._budget or any(config_of(trial.params) == config for trial in standing):
            self._ledger.end(trial_id, TrialState.FAIL)
            return False
        if (lost := sum(bool(trial.user_attrs.get(_LOST)) for trial in before if config_of(trial.params) == config)) >= BLAMED:
            record = Record(config, Status.CRASH, f"{lost} processes that tried it were lost, and it was not tried again")
            self._end(trial_id, record)
            self._on_record(record)
            return False
        self._open[config] = _Claim(trial_id)
        return True

    def _end(self, trial_id: int, record: Record) -> None:
        self._known.add(trial_id)
        if not self._ledger.note(trial_id, _RECORD, record.as_json()):
            return  # the others thought that this process was lost, and have tried or will try the config themselves
        time_us = told(record)
        self._ledger.end(trial_id, TrialState.PRUNED if time_us is None else TrialState.COMPLETE, time_us)

    def _look(self) -> Sequence[FrozenTrial]:
        """All trials, after those of lost processes were ended. Hands on what others have finished."""
        trials = self._ledger.trials()
        running = [trial for trial in trials if trial.state is TrialState.RUNNING]
        lost = [trial for trial in running if self._members.lost(str(trial.user_attrs.get(_MEMBER)))]
        for trial in lost:
            if trial.user_attrs.get(_BEGUN):
                self._ledger.note(trial._trial_id, _LOST, True)
            self._ledger.end(trial._trial_id, TrialState.FAIL)
        trials = self._ledger.trials() if lost else trials
        for trial in trials:
            if trial._trial_id in self._known or trial.state not in (TrialState.COMPLETE, TrialState.PRUNED):
                continue
            self._known.add(trial._trial_id)
            if (record := _record_of(trial)) is not None:
                self._on_record(record)
        return trials


def _record_of(trial: FrozenTrial) -> Record | None:
    """The record of a finished trial; None where it has none that this program reads."""
    values: Mapping[str, object] = trial.user_attrs.get(_RECORD, {})
    try:
        return Record.from_json(values)
    except (CodegenError, AttributeError, KeyError, TypeError, ValueError):
        return None

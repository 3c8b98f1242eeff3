"""What each parameter of the winner is worth: change one, and time both again in turns.

For each parameter and each of its other values one kernel stands: of the candidates with that value the one most like the
winner, and of equally near ones the best predicted. It differs in that parameter alone, unless rules tie others to it, as they
tie `splits=1` to `reduction=single_block`. What the search has not tried is validated now, as any candidate is, but stays out of
the trials and cannot win any more, however fast it is.

Measured times are compared within rounds: what changes slowly meanwhile changes for the winner too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from codegen.config import Config
from codegen.space import variant_of
from codegen.variants import tried
from tuner.candidates import Space, nearest
from tuner.changed import Changed
from tuner.costmodel import predict
from tuner.errors import DeviceLost, LaunchError, RunEnded
from tuner.evaluate import SAMPLES, SECONDS, Judge
from tuner.executors import Executor
from tuner.pipeline import try_in_turn
from tuner.records import Record, Status
from tuner.strategy import Listed
from tuner.timing.health import Watch, open_watch
from tuner.timing.regimes import Regime
from tuner.workers.pool import Workers

ROUNDS = 3
"""So often each is timed, unless time is up."""

TRYING = 1 / 2
"""Part of the time in which kernels are tried that the search did not reach; the rest is for the rounds."""


def ablate(winner: Record, space: Space, predicted: Iterable[Config], records: Mapping[Config, Record], judge: Judge,
           executor: Executor | Workers, regime: Regime, ends: float) -> tuple[Changed, ...]:
    """By parameter of the winner, then by value, in the order of the choices.

    Args:
        winner: of the run.
        space: of the run.
        predicted: its candidates of which a time is predicted, shortest first.
        records: of those that were tried.
        judge: of them.
        executor: where they run; where that measures nothing, times are the cost model's.
        regime: that of the times.
        ends: of time.monotonic, when time is up.
    """
    found = changes(winner.config, space, predicted)
    if executor.measures:
        return _Bench(winner.config, judge, regime, open_watch(executor.bus_id), ends).measure(found, records)
    return tuple(_predicted(changed, winner, records, space) for changed in found)


def changes(winner: Config, space: Space, predicted: Iterable[Config]) -> list[Changed]:
    """The kernels to look at, none of them timed; see `ablate`."""
    family = [config for config in dict.fromkeys((*predicted, *space.valid)) if config.variant == winner.variant]
    found = []
    for name, own in winner.params:
        for value in tried(variant_of(winner.variant)).choices[name]:
            if value == own:
                continue
            like = nearest(winner, [config for config in family if config[name] == value])
            if like is None:
                alone = Config(winner.variant, tuple((key, value if key == name else old) for key, old in winner.params))
                found.append(Changed(name, alone, Status.REFUSED, space.why_not(alone)))
            else:
                found.append(Changed(name, like, Status.NOT_RUN, "time was up"))
    return found


def _predicted(changed: Changed, winner: Record, records: Mapping[Config, Record], space: Space) -> Changed:
    """With the time that the cost model gives, which knows more of those that were compiled."""
    if changed.status is Status.REFUSED:
        return changed
    record = records.get(changed.config) or Record(changed.config, Status.NOT_RUN, "not among the best predicted")
    changed = replace(changed, status=record.status, reason=record.reason)
    if record.status not in (Status.OK, Status.NOT_RUN):
        return changed
    us = record.time_us or predict(space.problem, changed.config, space.limits).time_us
    return replace(changed, us=us, ratios=(us / winner.best_us,))


class _Bench:
    """Times the winner and others in turns, until time is up.

    Args:
        winner: what all others are held against.
        judge: of the run's candidates.
        regime: that of the times.
        watch: over the GPU.
        ends: of time.monotonic.
    """

    def __init__(self, winner: Config, judge: Judge, regime: Regime, watch: Watch, ends: float) -> None:
        self._winner = winner
        self._judge = judge
        self._regime: Regime = regime
        self._watch = watch
        self._begins, self._ends = time.monotonic(), ends
        self._times: dict[Config, list[tuple[float, float]]] = {}

    def measure(self, found: Sequence[Changed], records: Mapping[Config, Record]) -> tuple[Changed, ...]:
        """With measured times. A GPU that is lost meanwhile ends it, with what there is by then."""
        wanted = dict.fromkeys(changed.config for changed in found if changed.status is not Status.REFUSED)
        tried = {config: records[config] for config in wanted if config in records}
        strategy = Listed(config for config in wanted if config not in tried)
        try:
            try_in_turn(strategy, self._judge, lambda: self._passed(TRYING), lambda record: tried.update({record.config: record}))
            timed = [config for config, record in tried.items() if record.status in (Status.OK, Status.SLOWER)]
            for _ in range(ROUNDS if timed else 0):
                self._round(timed)
        except RunEnded:
            return tuple(self._known(changed, tried) for changed in found)
        except DeviceLost as error:
            lost = f"the GPU was lost: {error}"
            return tuple(self._known(replace(changed, reason=changed.reason and lost), tried) for changed in found)
        return tuple(self._known(changed, tried) for changed in found)

    def _round(self, others: Sequence[Config]) -> None:
        own = self._time(self._winner)
        for config in others if own is not None else ():
            us = self._time(config)
            if own is not None and us is not None:
                self._times.setdefault(config, []).append((us, us / own))

    def _time(self, config: Config) -> float | None:
        """Microseconds; None where time is up, or it cannot be timed any more."""
        if self._passed(1):
            return None
        self._judge.get_ready()
        try:
            return self._watch.take(partial(self._judge.time, config, self._regime, SAMPLES, SECONDS)).timing.median
        except DeviceLost:
            raise
        except LaunchError:
            return None

    def _known(self, changed: Changed, tried: Mapping[Config, Record]) -> Changed:
        record, times = tried.get(changed.config), self._times.get(changed.config)
        if record is None:
            return changed
        if times:
            return replace(changed, status=record.status, reason=None, us=median(us for us, _ in times),
                           ratios=tuple(ratio for _, ratio in times))
        if record.status in (Status.OK, Status.SLOWER):
            return changed
        return replace(changed, status=record.status, reason=record.reason)

    def _passed(self, share: float) -> bool:
        return time.monotonic() >= self._begins + share * (self._ends - self._begins)

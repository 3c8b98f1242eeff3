"""What each parameter of the winner is worth: by the run's ablation, or else by what its search happened to try."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from codegen.config import Config, Value
from reports.run import Run
from tuner.records import Record, Status


@dataclass(frozen=True, slots=True)
class Alternative:
    """A kernel with another value of a parameter.

    Attributes:
        value: of the parameter.
        tied: what else is different, "splits=4"; mostly nothing.
        status: what became of it.
        reason: why it has no time, as a clause; empty where it has one, or that is not known.
        us: microseconds a call; None where there is no time.
        ratios: its times over the winner's, one for each round.
    """

    value: Value
    tied: str
    status: Status
    reason: str = ""
    us: float | None = None
    ratios: tuple[float, ...] = ()

    @property
    def times(self) -> float | None:
        """As many times as long as the winner it takes."""
        return median(self.ratios) if self.ratios else None


@dataclass(frozen=True, slots=True)
class Worth:
    """What one parameter of the winner is worth.

    Attributes:
        name: the parameter.
        value: the winner's.
        alternatives: of other values, by rising time; those without a time last.
        refused: values that no candidate has, and the first rule against each that comes up.
    """

    name: str
    value: Value
    alternatives: tuple[Alternative, ...]
    refused: tuple[tuple[str, str], ...] = ()


def worth(run: Run) -> list[Worth]:
    """By parameter. Empty where there is no winner, or it has no time of the search."""
    winner = run.winner
    if winner is None or winner.time_us is None:
        return []
    ablated = is_ablation(run)
    found = dict(_ablated(run, winner.config) if ablated else _searched(run, winner))
    return [Worth(name, value, tuple(sorted(found.get(name, ()), key=lambda one: (one.times is None, one.times or 0.0))),
                  _refused(run, name) if ablated else ()) for name, value in winner.config.params]


def is_ablation(run: Run) -> bool:
    """Whether it is one made for the purpose."""
    return run.winner is not None and bool(run.ending.ablation) and run.ending.winner == str(run.winner.config)


def _ablated(run: Run, winner: Config) -> Iterator[tuple[str, list[Alternative]]]:
    there = [one for one in run.ending.ablation if one.status is not Status.REFUSED and one.config.variant == winner.variant]
    for name, those in groupby(sorted(there, key=lambda one: one.parameter), key=lambda one: one.parameter):
        yield name, [Alternative(one.value, one.tied(winner), one.status, one.reason or "", one.us, one.ratios) for one in those]


def _refused(run: Run, name: str) -> tuple[tuple[str, str], ...]:
    by_reason: dict[str, list[str]] = {}
    for one in run.ending.ablation:
        if one.parameter == name and one.status is Status.REFUSED:
            by_reason.setdefault(one.reason or "", []).append(str(one.value))
    return tuple((", ".join(values), reason) for reason, values in by_reason.items())


def _searched(run: Run, winner: Record) -> Iterator[tuple[str, list[Alternative]]]:
    """The candidates that differ from the winner in one parameter alone.

    Both are compared by the times of the search: final times, which few have, are of another measurement.
    """
    found: dict[str, list[Alternative]] = {}
    predicted: Iterable[Record] = () if run.info.measures else run.untried
    for record in (*run.tried, *predicted):
        names = _differences(winner.config, record.config)
        if len(names) == 1:
            timed = record.status in (Status.OK, Status.NOT_RUN) and record.time_us is not None
            us = record.time_us if timed else None
            ratios = () if us is None or winner.time_us is None else (us / winner.time_us,)
            found.setdefault(names[0], []).append(
                Alternative(record.config[names[0]], "", record.status, record.reason or "", us, ratios))
    yield from found.items()


def _differences(winner: Config, other: Config) -> list[str]:
    """The parameters in which a config differs; none where it is of another family."""
    return [] if other.variant != winner.variant else [name for name, value in winner.params if other[name] != value]

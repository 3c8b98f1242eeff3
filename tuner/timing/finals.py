"""The last word on which kernel is the fastest: the finalists timed again in turns, and a stated decision between them.

Rounds. In each, every finalist is timed once in each regime, forwards and backwards by turns: a kernel that heats the GPU is not
always in front of the same other. What changes slowly meanwhile changes for all, so finalists are compared within rounds: by the
ratio of their times in the same round, of which the median and its interval (tuner.timing.stats) are taken.

Decision. In the regime that decides, the one with the smallest median leads. Another ties with it when the median of its ratios
to the leader lies below 1 + TIE_BAND and it is not proven slower, which takes an interval of 95 % above 1, so six rounds or more.
Of those that tie the one with the fewest steps wins, then the one with the least workspace, then the first by its text: a choice
that a repetition makes again.

Which samples count. Spells that were disturbed are left out (tuner.timing.health), and so are those in which the power limit or
anything else lowered the clock, where that is the exception for that finalist. Where too few spells would be left, all count, and
that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from codegen.config import Config
from codegen.plan import Plan
from codegen.space import parse_config
from tuner.errors import DeviceLost, LaunchError
from tuner.executors import Timing
from tuner.records import Record
from tuner.timing.health import Spell, Watch
from tuner.timing.regimes import REGIMES, Regime, deciding_first
from tuner.timing.stats import LEVEL, Summary, interval

ROUNDS = 9
"""So many rounds there are unless time is up: the interval of the median then leaves out the smallest and the largest."""

LEAST_ROUNDS = 3
"""A finalist of which fewer sound spells are left counts with all of them."""

TIE_BAND = 0.01
"""Medians of runs on different days differ by as much, so nothing within it is worth another launch."""

CLOCK_DROP = 0.03
"""A clock lower than a finalist's usual one by more than this share counts as lowered."""

TimeOne = Callable[[Config, Regime], Timing]
"""Times one finalist in a regime. Raises LaunchError where it cannot be timed any more."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A finalist before the finals.

    Attributes:
        config: which.
        steps: launches and fills of a call.
        workspace_bytes: scratch memory of a call.
    """

    config: Config
    steps: int
    workspace_bytes: int

    @classmethod
    def of(cls, config: Config, plan: Plan, rows: int, sms: int) -> Entrant:
        """From the plan of the config's source."""
        return cls(config, len(plan.steps), plan.workspace_bytes(rows, sms))

    @property
    def order(self) -> tuple[int, int, str]:
        """Who comes first where times tie."""
        return self.steps, self.workspace_bytes, str(self.config)


@dataclass(frozen=True, slots=True)
class Finalist:
    """A finalist after the finals.

    Attributes:
        config: which.
        times: by regime; empty where it dropped out.
        ties: whether it lies in the tie band of the one with the smallest median, which does so itself.
        reason: why it dropped out, as a clause; None where it did not.
    """

    config: Config
    times: Mapping[Regime, Summary] = field(default_factory=dict)
    ties: bool = False
    reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The finalist as JSON values."""
        return {"config": str(self.config), "times": {regime: times.as_json() for regime, times in self.times.items()},
                "ties": self.ties, "reason": self.reason}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finalist:
        """Raises KeyError, TypeError, ValueError: the values have another form."""
        times = {regime: Summary.from_json(values["times"][regime]) for regime in REGIMES if regime in values["times"]}
        return cls(parse_config(values["config"]), times, values["ties"], values["reason"])


@dataclass(frozen=True, slots=True)
class Finals:
    """What the finals found.

    Attributes:
        winner: the fastest; None where all dropped out.
        finalists: all of them, those that were timed by their median, those that dropped out last.
        regime: which decided.
        rounds: how many were finished.
        said: what is to be known of the decision and its times, as clauses.
    """

    winner: Config | None
    finalists: tuple[Finalist, ...]
    regime: Regime
    rounds: int
    said: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The finals as JSON values; `from_json` reads them back."""
        return {"winner": None if self.winner is None else str(self.winner), "regime": self.regime, "rounds": self.rounds,
                "said": list(self.said), "finalists": [finalist.as_json() for finalist in self.finalists]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finals:
        """Raises KeyError, TypeError, ValueError: the values have another form."""
        winner = None if values["winner"] is None else parse_config(values["winner"])
        return cls(winner, tuple(map(Finalist.from_json, values["finalists"])), values["regime"], values["rounds"],
                   tuple(values["said"]))


Spells = Mapping[Regime, Sequence[Spell]]
"""One finalist's spells, one for each round; the regime that does not decide may be missing."""


def run(time_one: TimeOne, entrants: Sequence[Entrant], *, regime: Regime = "warm", rounds: int = ROUNDS, least_us: float = 0.0,
        watch: Watch | None = None, get_ready: Callable[[], None] = lambda: None, enough: Callable[[], bool] = lambda: False,
        on_round: Callable[[int, int], None] = lambda done, total: None) -> Finals:
    """Times the finalists in turns and decides.

    Args:
        time_one: times one of them.
        entrants: the finalists.
        regime: which decides. Both are timed; one that cannot be timed in the other has no times there.
        rounds: how many.
        least_us: no call takes less, so a shorter time is not believed.
        watch: over the GPU; None: nothing is watched. What it counts is not among what the finals say.
        get_ready: called before each spell, and no part of it.
        enough: asked after each round, the first included, whether time is up.
        on_round: told before each round how many are done, and of how many.

    Raises:
        DeviceLost: the GPU was lost; nothing is decided.
    """
    table = _Table(time_one, watch or Watch(), get_ready, entrants, regime)
    done = 0
    while done < rounds and table.spells and not (done and enough()):
        on_round(done, rounds)
        table.add_round(backwards=done % 2 == 1)
        done += 1
    return decide(table.spells, table.failed, regime, done, least_us)


class _Table:
    """What was measured so far.

    Attributes:
        spells: of those that could be timed in every round.
        failed: why the others could not.
    """

    def __init__(self, time_one: TimeOne, watch: Watch, get_ready: Callable[[], None], entrants: Sequence[Entrant],
                 regime: Regime) -> None:
        self._time_one = time_one
        self._watch = watch
        self._get_ready = get_ready
        self._regime = regime
        self.spells: dict[Entrant, dict[Regime, list[Spell]]] = {
            entrant: {name: [] for name in deciding_first(regime)} for entrant in entrants}
        self.failed: dict[Entrant, str] = {}

    def add_round(self, backwards: bool) -> None:
        """Times each once more."""
        entrants = list(self.spells)
        for entrant in reversed(entrants) if backwards else entrants:
            for regime in list(self.spells[entrant]):
                self._get_ready()
                try:
                    spell = self._watch.take(partial(self._time_one, entrant.config, regime))
                except DeviceLost:
                    raise
                except LaunchError as error:
                    if regime == self._regime:
                        self.failed[entrant] = str(error)
                        del self.spells[entrant]
                        break
                    del self.spells[entrant][regime]
                else:
                    self.spells[entrant][regime].append(spell)


def decide(spells: Mapping[Entrant, Spells], failed: Mapping[Entrant, str], regime: Regime, rounds: int,
           least_us: float = 0.0) -> Finals:
    """The decision, from all that was measured.

    Args:
        spells: of those that were timed in every round.
        failed: why the others were not.
        rounds: how many there were.
        least_us: as in `run`.
    """
    counted = {entrant: {name: _counting(found) for name, found in by_regime.items()} for entrant, by_regime in spells.items()}
    times = {entrant: {name: Summary.of([spell.timing.samples for spell in found.values()]) for name, found in by_regime.items()}
             for entrant, by_regime in counted.items()}
    dropped = dict(failed)
    for entrant, by_regime in times.items():
        if (us := by_regime[regime].median) < least_us:
            dropped[entrant] = f"took {us:.3g} us, where the hardware takes {least_us:.3g} us at least"
    ranked = sorted((entrant for entrant in times if entrant not in dropped),
                    key=lambda entrant: (times[entrant][regime].median, entrant.order))
    tied = [entrant for entrant in ranked if _ties(counted[entrant][regime], counted[ranked[0]][regime])]
    winner = min(tied, key=lambda entrant: entrant.order, default=None)
    finalists = [Finalist(entrant.config, times[entrant], entrant in tied) for entrant in ranked]
    finalists += [Finalist(entrant.config, reason=reason) for entrant, reason in dropped.items()]
    said = [*_choice(tied), *_left_out(spells, counted)]
    return Finals(None if winner is None else winner.config, tuple(finalists), regime, rounds, tuple(said))


def timed(record: Record, finalist: Finalist, regime: Regime) -> Record:
    """A finalist's record with its final times; unchanged where it dropped out."""
    if not finalist.times:
        return record
    return replace(record, final_us=finalist.times[regime].median, times=finalist.times)


def _counting(spells: Sequence[Spell]) -> dict[int, Spell]:
    """The spells that count, by round."""
    every = dict(enumerate(spells))
    sound = {index: spell for index, spell in every.items() if spell.disturbed is None}
    if len(sound) < min(LEAST_ROUNDS, len(every)):
        return every
    clocks = [spell.sm_mhz for spell in sound.values() if spell.sm_mhz is not None]
    lowest = (1.0 - CLOCK_DROP) * median(clocks) if clocks else 0.0
    steady = {index: spell for index, spell in sound.items()
              if not spell.capped and (spell.sm_mhz is None or spell.sm_mhz >= lowest)}
    return steady if len(steady) >= LEAST_ROUNDS and 2 * len(steady) > len(sound) else sound


def _ties(spells: Mapping[int, Spell], leader: Mapping[int, Spell]) -> bool:
    """Whether a finalist lies in the tie band of the leader and is not proven slower."""
    ratios = [spells[index].timing.median / leader[index].timing.median for index in spells.keys() & leader.keys()]
    if not ratios:
        return False
    known = interval(ratios)
    return median(ratios) < 1.0 + TIE_BAND and not (known.low > 1.0 and known.level >= LEVEL)


def _choice(tied: Sequence[Entrant]) -> list[str]:
    if len(tied) < 2:
        return []
    return [f"{len(tied)} finalists cannot be told apart, their medians lying within {TIE_BAND:.0%}; of those, the one of fewest "
            "steps, then of least workspace, was taken"]


def _left_out(spells: Mapping[Entrant, Spells], counted: Mapping[Entrant, Mapping[Regime, Mapping[int, Spell]]]) -> list[str]:
    """Which spells do not count, and which do although they were disturbed."""
    said = []
    taken = sum(len(found) for by_regime in spells.values() for found in by_regime.values())
    kept = sum(len(found) for by_regime in counted.values() for found in by_regime.values())
    if kept < taken:
        said.append(f"{taken - kept} of {taken} spells of the finals do not count: they were disturbed, or the clock was lower "
                    "than is usual for the kernel")
    for entrant, by_regime in counted.items():
        if any(spell.disturbed for found in by_regime.values() for spell in found.values()):
            said.append(f"the times of {entrant.config} count although some were disturbed, since too few others are left")
    return said

"""The two regimes that a call is timed in. Both are recorded; one of them decides which kernel is the fastest.

warm    calls replayed back to back from a CUDA graph: what fits the caches is found there, as in a loop that does little else
cold    single calls, each after the L2 cache was written over, measured by events: what one call takes amid other work. The cache
        is full of lines that have to be written back, as after any other kernel that writes
"""

from __future__ import annotations

from typing import Literal, get_args

from tuner.errors import InputError

Regime = Literal["warm", "cold"]

REGIMES: tuple[Regime, ...] = get_args(Regime)


def as_regime(name: str) -> Regime:
    """The regime of that name.

    Raises:
        InputError: there is none.
    """
    for regime in REGIMES:
        if name == regime:
            return regime
    raise InputError(f"there is no regime {name!r}; choose from {', '.join(REGIMES)}")


def deciding_first(regime: Regime) -> tuple[Regime, ...]:
    """Both, the one that decides in front."""
    return (regime, *(other for other in REGIMES if other != regime))

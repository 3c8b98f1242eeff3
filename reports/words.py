"""How numbers are written."""

from __future__ import annotations

import math
import shlex

LEVEL = ("the two times lie no further apart than their noises together, and the noise of a time is how far the medians of its "
         "two measurements lie apart")
"""What tuner.bench.results.Row.standing means by it."""


def plain(value: float) -> str:
    """Three significant digits, or all before the point: 1.20e-05, 0.0512, 0.510, 1.96, 25.5, 13,073."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.2e}"
    exponent = int(f"{value:.2e}".partition("e")[2])  # of the rounded value: 9.996 is 10.0
    text = f"{value:.{max(0, 2 - exponent)}f}"
    return f"{float(text):,.0f}" if abs(float(text)) >= 1e4 else text


def micro(value: float) -> str:
    """Microseconds for a table: as `plain`, but below a thousandth only 0.001 or 0."""
    return plain(value) if value >= 1e-3 or not math.isfinite(value) else ("0.001" if value >= 5e-4 else "0")


def us(value: float) -> str:
    """A time with its unit, given in microseconds: 25.5 us, 0.77 ns."""
    return f"{value * 1e3:.2g} ns" if 0 < value < 0.01 else f"{plain(value)} us"


def without_place(command: str) -> str:
    """A command without the option that says where its files went."""
    words = shlex.split(command)
    kept = [word for before, word in zip(["", *words], words, strict=False) if "--out" not in (before, word)]
    return shlex.join(word for word in kept if not word.startswith("--out="))

"""How numbers are written."""

from __future__ import annotations

import math
import shlex

LEVEL = ("the two times lie no further apart than their noises together, and the noise of a time is how far the medians of its "
         "two measurements lie apart")
"""What tuner.bench.results.Row.standing means by it."""


def plain(value: float) -> str:
    """Three digits: 1.2e-05, 0.0512, 1.96, 25.5, 405, 1300, 32,400."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    value = float(f"{value:.2e}")
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}" if abs(value) >= 1e4 else f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text and places > 2 else text


def micro(value: float) -> str:
    """Microseconds for a table: as `plain`, but below a thousandth only 0.001 or 0."""
    return plain(value) if value >= 1e-3 or not math.isfinite(value) else f"{value:.3f}".rstrip("0").rstrip(".")


def us(value: float) -> str:
    """A time with its unit, given in microseconds: 25.5 us, 0.77 ns."""
    return f"{value * 1e3:.2g} ns" if 0 < value < 0.01 else f"{plain(value)} us"


def without_place(command: str) -> str:
    """A command without the option that says where its files went."""
    words = shlex.split(command)
    kept = [word for before, word in zip(["", *words], words, strict=False) if "--out" not in (before, word)]
    return shlex.join(word for word in kept if not word.startswith("--out="))

"""How numbers are written."""

from __future__ import annotations

import math


def plain(value: float) -> str:
    """Three digits, or all before the point: 1.2e-05, 0.0512, 1.96, 25.5, 13073."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text and places > 2 else text


def us(value: float) -> str:
    """Microseconds with their unit."""
    return f"{plain(value)} us"

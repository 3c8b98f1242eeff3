"""Figures of Matplotlib as SVG that is part of a page: its colours and fonts, ids of its own, words for those who cannot see.

A page has light and dark colours, which are known where it is read only. So figures are drawn in stand-ins, one for each colour
of style.css, which become its variables here.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID, ACCENT, BAD, BAND = (f"#0101{number:02x}" for number in range(16, 22))
SERIES = tuple(f"#0202{number:02x}" for number in range(16, 26))
"""Of families."""

VARIABLES = dict(zip((INK, MUTED, GRID, ACCENT, BAD, BAND), ("ink", "muted", "grid", "accent", "bad", "band"), strict=True))
VARIABLES |= {stand_in: f"series-{number}" for number, stand_in in enumerate(SERIES)}

MARKERS = "osD^vPX*<>"
"""Of families, which nobody has to tell apart by colour alone."""

WIDE, NARROW = 8.6, 4.1
"""Widths in inches of the two drawings of a figure: for a screen, and for a phone."""

LETTER = 4.6
"""Width of a letter of a label, points."""

STYLE: Any = {
    "svg.fonttype": "none", "font.family": ["DejaVu Sans"], "font.size": 9, "text.color": INK, "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": MUTED, "ytick.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none", "figure.facecolor": "none",
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True, "legend.frameon": False,
    "lines.linewidth": 1.6, "savefig.facecolor": "none", "legend.labelcolor": INK}

Draw = Callable[[Axes, bool], None]
"""Draws into axes; told whether they are narrow."""


def figure(name: str, title: str, words: str, height: float, draw: Draw) -> str:
    """A figure as HTML: two drawings, of which the page shows the one that fits.

    Args:
        name: unique in the page; all ids begin with it.
        title: its name.
        words: what it shows, for those who cannot see it.
        height: in inches.
        draw: called for each drawing.
    """
    parts = []
    for narrow in (False, True):
        kind = "narrow" if narrow else "wide"
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
            drawing = Figure(figsize=(NARROW if narrow else WIDE, height), layout="constrained")
            draw(drawing.add_subplot(), narrow)
            buffer = io.StringIO()
            drawing.savefig(buffer, format="svg", metadata={"Date": None})
        parts.append(f'<div class="{kind}">{_inline(buffer.getvalue(), f"{name}-{kind}", title, words)}</div>')
    return "".join(parts)


def legend(axes: Axes, columns: int) -> None:
    """Above the axes, where it hides nothing."""
    axes.legend(ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, fontsize=8, handletextpad=0.4,
                columnspacing=1.2)


def label_row(axes: Axes, row: int, points: Iterable[tuple[float, str]], narrow: bool) -> None:
    """Texts above points of a row, from the right: those for which there is room. The horizontal axis must have its limits."""
    place = axes.transScale.transform
    left, right = (place((end, 1.0))[0] for end in axes.get_xlim())
    a_point = (right - left) / (72 * 0.75 * (NARROW if narrow else WIDE))
    free = math.inf
    for value, text in sorted(points, reverse=True):
        at, half = place((value, 1.0))[0], 0.5 * (LETTER * len(text) + 4.0) * a_point
        if at + half < free:
            axes.annotate(text, (value, row), (0, 5.5), textcoords="offset points", ha="center", fontsize=7.5, zorder=2.5)
            free = at - half


def _inline(text: str, prefix: str, title: str, words: str) -> str:
    """The file of a figure as an element of a page."""
    body = text[text.index("<svg"):]
    box = re.search(r'viewBox="([^"]*)"', body)
    body = body[body.index(">") + 1:]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->|<\?.*?\?>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = body.replace('xlink:href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-")
    body = re.sub(r"#0[12]0[12][0-9a-f]{2}\b", lambda found: f"var(--{VARIABLES[found[0]]})", body)
    body = body.replace("'DejaVu Sans Mono'", "var(--mono)").replace("'DejaVu Sans'", "var(--sans)")
    body = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), body)
    body = re.sub(r"\n\s*", "\n", body)
    return (f'<svg role="img" viewBox="{box[1] if box else ""}" aria-labelledby="{prefix}-title {prefix}-desc">'
            f'<title id="{prefix}-title">{escape(title)}</title><desc id="{prefix}-desc">{escape(words)}</desc>{body}')

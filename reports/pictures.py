"""Pictures of published results that stand alone: SVG files for a README, readable in light and dark and without any program.

They are drawn from a benchmark's rows alone, with the light colours of style.css; a rule in the file changes each of them into
its dark one for readers who prefer that. All numbers stand in the file's description too, in words.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from codegen.dtypes import OWN_CLASS
from reports.svg import ACCENT, BAD, INK, MUTED, SERIES, STYLE, VARIABLES, WIDE
from reports.words import us
from tuner.bench.results import Row

Draw = Callable[[Sequence[Axes]], None]
"""Draws into the axes of a picture, from left to right."""

HEAD = 0.72
"""Height of what stands above the axes, inches."""

ROOM = 6 * " "
"""Between the name of a shape and its sizes; the name will be in bold letters, which are wider."""

BAR, GAP = 0.235, 0.45
"""Height of a bar with the room round it, inches, and the room between two shapes, of that."""


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands above a picture, and what it shows.

    Attributes:
        title: its name.
        below: what to know to read it.
        words: all its numbers, for those who cannot see it.
        keys: of its colours.
    """

    title: str
    below: str
    words: str
    keys: Sequence[Artist]


def ratios(rows: Sequence[Row], device: str) -> str:
    """How many times as fast as the best peer, for each shape in each data type and class.

    Args:
        rows: of a benchmark; those without a peer's time are left out.
        device: where they were measured.
    """
    shown = [row for row in rows if row.ratio is not None]
    kinds = list(dict.fromkeys(kind_of(row) for row in shown))
    named: dict[tuple[str, str], list[Row]] = {}
    for row in shown:
        named.setdefault((row.case.name, str(row.case.shape)), []).append(row)

    def draw(panes: Sequence[Axes]) -> None:
        (axes,) = panes
        at, places = 0.0, []
        for mine in named.values():
            places.append(at + (len(mine) - 1) / 2)
            for row in mine:
                _bar(axes, at, row, SERIES[kinds.index(kind_of(row)) % len(SERIES)])
                at += 1
            at += GAP
        axes.axvline(1, color=INK, linewidth=1.4, zorder=3)
        axes.set_yticks(places, [f"{name}{ROOM}{shape}" for name, shape in named])
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="x", length=0)
        axes.set_ylim(at - GAP - 0.3, -0.7)
        axes.set_xlim(left=0)
        axes.margins(x=0.11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.grid(axis="y", visible=False)

    words = "; ".join(f"{row.case.title}: {row.ratio:.2f}, {row.standing}" for row in shown)
    keys = [Patch(color=SERIES[number % len(SERIES)], label=kind) for number, kind in enumerate(kinds)]
    heading = Heading("The backward pass, times as fast as PyTorch",
                      f"one {device}; 1× is the faster of autograd and torch.compile; bold: faster, red: slower", words, keys)
    return _picture("ratios", heading, BAR * (len(shown) + GAP * len(named)) + 0.35, 1, draw)


def over_rows(rows: Sequence[Row], device: str) -> str:
    """Times over the number of rows, a pane for each H, O, data type and class: ours, the peers', and the floor.

    Args:
        rows: of a benchmark; those without a time of ours are left out.
        device: where they were measured.
    """
    panes: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.case.shape.rows):
        if row.ours.warm is not None:
            panes.setdefault(_pane(row), []).append(row)
    names = list(dict.fromkeys(name for group in panes.values() for row in group for name in _contestants(row)))
    looks = {name: _look(name, number) for number, name in enumerate(names)}

    def draw(axes: Sequence[Axes]) -> None:
        for one, (title, group) in zip(axes, panes.items(), strict=False):
            _times(one, title, group, looks)
        for empty in axes[len(panes):]:
            empty.set_visible(False)

    words = "; ".join(
        f"{title}, {row.case.shape.rows} rows: " + ", ".join(f"{name} {us(time)}" for name, time in _contestants(row).items())
        for title, group in panes.items() for row in group)
    keys = [Line2D([], [], label=name, **look) for name, look in looks.items()]
    heading = Heading("Microseconds a call by rows", f"one {device}, warm; lower is better, and both scales are logarithmic",
                      words, keys)
    return _picture("rows", heading, 3.5 * -(-len(panes) // 2), len(panes), draw)


def kind_of(row: Row) -> str:
    """The row's data type, with its class where that is not the data type's own."""
    dtype, accuracy = row.case.problem.dtype, row.case.problem.accuracy
    return dtype if accuracy == OWN_CLASS[dtype] else f"{dtype}, class {accuracy}"


def _pane(row: Row) -> str:
    shape = row.case.shape
    return f"H = {shape.hidden}, O = {shape.out}, {kind_of(row)}"


def _contestants(row: Row) -> dict[str, float]:
    """Microseconds of one call, by name; what was not measured is left out."""
    times = {"ours": row.ours, **row.peers}
    return {name: entry.warm.median for name, entry in times.items() if entry.warm is not None} | {"floor": row.floor.us}


def _look(name: str, number: int) -> dict[str, Any]:
    """How a contestant's line is drawn."""
    if name == "ours":
        return {"color": ACCENT, "marker": "o", "linewidth": 2.4, "markersize": 5, "zorder": 5}
    if name == "floor":
        return {"color": MUTED, "linestyle": (0, (4, 3)), "zorder": 2}
    return {"color": SERIES[number % len(SERIES)], "marker": "o", "markersize": 3.5, "zorder": 3}


def _times(axes: Axes, title: str, group: Sequence[Row], looks: Mapping[str, dict[str, Any]]) -> None:
    found = [_contestants(row) for row in group]
    for name, look in looks.items():
        points = [(row.case.shape.rows, times[name]) for row, times in zip(group, found, strict=True) if name in times]
        if points:
            axes.plot(*zip(*points, strict=True), **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([row.case.shape.rows for row in group])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.minorticks_off()
    axes.tick_params(axis="x", labelsize=7.5)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("rows")


def _bar(axes: Axes, at: float, row: Row, colour: str) -> None:
    value = row.ratio or 0.0
    axes.barh(at, value, height=0.84, color=colour, zorder=2)
    end = value if value < 0.75 else max(value, 1.0)  # the line at 1 would cross the figure
    axes.annotate(f"{value:.2f}×", (end, at), (5, 0), textcoords="offset points", va="center", fontsize=8.5,
                  color=BAD if row.standing == "slower" else INK, fontweight="bold" if row.standing == "faster" else "normal")


def _picture(name: str, heading: Heading, height: float, panes: int, draw: Draw) -> str:
    """The file of a picture, the same for the same rows; `height` is that below the heading, inches."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        drawing = Figure(figsize=(WIDE, height + HEAD), layout="constrained")
        share = HEAD / (height + HEAD)
        drawing.get_layout_engine().set(w_pad=0.12, h_pad=0.07, rect=(0, 0, 1, 1 - share))  # type: ignore[union-attr, call-arg]
        draw(list(drawing.subplots(-(-panes // 2), min(2, panes), squeeze=False).flat))
        drawing.text(0.16 / WIDE, 1 - 0.4 * share, heading.title, fontsize=13, weight="bold", color=INK)
        drawing.text(0.16 / WIDE, 1 - 0.72 * share, heading.below, fontsize=9, color=MUTED)
        key = drawing.legend(handles=list(heading.keys), loc="upper right", bbox_to_anchor=(1 - 0.1 / WIDE, 1 - 0.1 * share),
                             fontsize=9, ncols=6, handletextpad=0.5, columnspacing=1.2, handlelength=1.2, labelcolor=INK)
        key.set_in_layout(False)
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None})
    return _standing_alone(buffer.getvalue(), heading.title, heading.words)


def _standing_alone(text: str, title: str, words: str) -> str:
    """Matplotlib's file with real colours, a card behind everything, and its description."""
    colours = _colours()
    light = {stand_in: colours[variable][0] for stand_in, variable in VARIABLES.items()}
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg"):], flags=re.DOTALL)
    body = re.sub(r"#0[12]0[12][0-9a-f]{2}\b", lambda found: light[found[0]], body)
    body = body.replace("'DejaVu Sans'", "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif")
    body = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), body)
    sizes = f'<tspan style="fill: {light[MUTED]}">'
    body = re.sub(rf">(\S+){ROOM}([\d,]+)<", rf'><tspan style="font-weight: 600">\1</tspan>&#160; {sizes}\2</tspan><', body)
    opening, _, rest = body.partition(">")
    head = (f'<title>{escape(title)}</title><desc>{escape(words)}</desc>\n<style>{_dark_rules()}</style>\n'
            f'<rect width="100%" height="100%" rx="8" style="fill: {colours["card"][0]}"/>')
    return re.sub(r"\n\s*", "\n", f"{opening}>{head}{rest}")


@cache
def _colours() -> dict[str, tuple[str, str]]:
    """The light and the dark value of each colour of style.css."""
    style = files("reports").joinpath("style.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", style,
                                                                                                   flags=re.DOTALL)[:2])
    return {name: (colour, dark[name]) for name, colour in light.items() if name in dark}


def _dark_rules() -> str:
    """A rule for each colour that Matplotlib's style attributes name."""
    used = {colour: dark for name, (colour, dark) in _colours().items() if name in {"card", *VARIABLES.values()}}
    rules = "".join(f'[style*="{which}: {colour}"]{{{which}:{dark}!important}}'
                    for colour, dark in used.items() for which in ("fill", "stroke"))
    return f"@media (prefers-color-scheme: dark){{{rules}}}"

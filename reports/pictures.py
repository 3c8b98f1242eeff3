"""Pictures of published results that stand alone: SVG files for a README, readable in light and dark and without any program.

They are drawn from a benchmark's rows alone, with the light colours of style.css; a rule in the file changes each of them into
its dark one for readers who prefer that. All numbers stand in the file's description too, in words.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from codegen.dtypes import OWN_CLASS
from reports.svg import ACCENT, INK, MUTED, SERIES, STYLE, VARIABLES, WIDE
from reports.words import us
from tuner.bench.results import Row

Draw = Callable[[Sequence[Axes]], None]
"""Draws into the axes of a picture, from left to right."""


def ratios(rows: Sequence[Row]) -> str:
    """How many times as fast as the best peer, for each shape in each data type and class.

    Args:
        rows: of a benchmark; those without a peer's time are left out.
    """
    shown = [row for row in rows if row.ratio is not None]
    kinds = list(dict.fromkeys(kind_of(row) for row in shown))
    named: dict[str, list[Row]] = {}
    for row in shown:
        named.setdefault(f"{row.case.name}  {row.case.shape}", []).append(row)
    height = 0.8 / max(1, len(kinds))

    def draw(panes: Sequence[Axes]) -> None:
        (axes,) = panes
        for at, mine in enumerate(named.values()):
            for number, row in enumerate(mine):
                _bar(axes, at + (number + 0.5 - len(mine) / 2) * height, 0.86 * height, row.ratio or 0.0,
                     SERIES[kinds.index(kind_of(row)) % len(SERIES)])
        axes.axvline(1, color=INK, linewidth=1.2, zorder=3)
        axes.set_yticks(range(len(named)), list(named))
        axes.set_ylim(len(named) - 0.45, -0.55)
        axes.set_xlim(left=0)
        axes.margins(x=0.08)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("times as fast as the faster of PyTorch's autograd and torch.compile")
        _legend(axes, [Patch(color=SERIES[number % len(SERIES)], label=kind) for number, kind in enumerate(kinds)])

    words = "; ".join(f"{row.case.title}: {row.ratio:.2f}" for row in shown)
    return _picture("ratios", "Times as fast as the best peer, by shape", words, (WIDE, 0.9 + 0.42 * len(named)), 1, draw)


def over_rows(rows: Sequence[Row]) -> str:
    """Times over the number of rows, a pane for each H, O, data type and class: ours, the peers', and the floor.

    Args:
        rows: of a benchmark; those without a time of ours are left out.
    """
    panes: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.case.shape.rows):
        if row.ours.warm is not None:
            panes.setdefault(_pane(row), []).append(row)

    def draw(axes: Sequence[Axes]) -> None:
        for one, (title, group) in zip(axes, panes.items(), strict=False):
            _times(one, title, group)
        for empty in axes[len(panes):]:
            empty.set_visible(False)
        _legend(axes[0], axes[0].get_legend_handles_labels()[0])

    words = "; ".join(
        f"{title}, {row.case.shape.rows} rows: " + ", ".join(f"{name} {us(time)}" for name, time in _contestants(row).items())
        for title, group in panes.items() for row in group)
    size = WIDE, 3.7 * -(-len(panes) // 2)
    return _picture("rows", "Microseconds a call over the number of rows", words, size, len(panes), draw)


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


def _times(axes: Axes, title: str, group: Sequence[Row]) -> None:
    found = [_contestants(row) for row in group]
    for number, name in enumerate(dict.fromkeys(name for times in found for name in times)):
        points = [(row.case.shape.rows, times[name]) for row, times in zip(group, found, strict=True) if name in times]
        look: dict[str, Any] = {"color": SERIES[number % len(SERIES)], "marker": "o", "markersize": 3.5, "zorder": 3}
        if name == "ours":
            look |= {"color": ACCENT, "linewidth": 2.4, "markersize": 5, "zorder": 5}
        elif name == "floor":
            look = {"color": MUTED, "linestyle": (0, (4, 3)), "zorder": 2}
        axes.plot(*zip(*points, strict=True), label=name, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([row.case.shape.rows for row in group])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.minorticks_off()
    axes.tick_params(axis="x", labelsize=7.5)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("rows")
    axes.set_ylabel("microseconds a call, warm")


def _bar(axes: Axes, at: float, height: float, value: float, colour: str) -> None:
    axes.barh(at, value, height=height, color=colour, zorder=2)
    end = value if value < 0.8 else max(value, 1.0)  # the line at 1 would cross the figure
    axes.annotate(f"{value:.2f}", (end, at), (4, 0), textcoords="offset points", va="center", fontsize=8)


def _legend(axes: Axes, handles: Sequence[Any]) -> None:
    """Above the whole picture, where it hides nothing."""
    drawing = axes.figure
    assert isinstance(drawing, Figure)
    drawing.legend(handles=handles, loc="outside upper left", fontsize=8, ncols=6, handletextpad=0.4, columnspacing=1.2,
                   handlelength=1.4, labelcolor=INK)


def _picture(name: str, title: str, words: str, size: tuple[float, float], panes: int, draw: Draw) -> str:
    """The file of a picture, the same for the same rows."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        drawing = Figure(figsize=size, layout="constrained")
        drawing.get_layout_engine().set(w_pad=0.12, h_pad=0.07)  # type: ignore[union-attr, call-arg]
        draw(list(drawing.subplots(-(-panes // 2), min(2, panes), squeeze=False).flat))
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None})
    return _standing_alone(buffer.getvalue(), title, words)


def _standing_alone(text: str, title: str, words: str) -> str:
    """Matplotlib's file with real colours, a card behind everything, and its description."""
    colours = _colours()
    light = {stand_in: colours[variable][0] for stand_in, variable in VARIABLES.items()}
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg"):], flags=re.DOTALL)
    body = re.sub(r"#0[12]0[12][0-9a-f]{2}\b", lambda found: light[found[0]], body)
    body = body.replace("'DejaVu Sans'", "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif")
    body = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), body)
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

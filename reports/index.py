"""One page over all published results of a GPU: the benchmark's rows against its peers, and the tuning runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from markupsafe import Markup
from matplotlib.axes import Axes

from reports.page import fill
from reports.run import TRIALS, read_run
from reports.svg import ACCENT, BAD, INK, figure
from reports.words import plain
from tuner.bench.results import Results, Row
from tuner.bench.sheet import JSON as BENCH_JSON
from tuner.bench.sheet import read_results
from tuner.errors import InputError
from tuner.pages import PAGE
from tuner.records import write_text
from tuner.wording import problem_text

INDEX = "index.html"


def build_index(root: Path) -> Path:
    """Writes index.html into the folder of a GPU's results.

    Raises:
        InputError: there are no results, or some that cannot be read.
        OSError: the folder cannot be written.
    """
    results = _results(root / BENCH_JSON)
    runs = [read_run(path.parent) for path in sorted(root.glob(f"*/{TRIALS}"))]
    if results is None and not runs:
        raise InputError(f"there is neither a {BENCH_JSON} nor a folder with a {TRIALS} in {root}; name a folder of results with "
                         "--root")
    rows = [] if results is None else list(results.rows)
    parts = () if results is None else results.parts
    against = [row for row in rows if row.ratio is not None]
    device = parts[0].device if parts else runs[0].gpu
    pages = {run.folder: f"{run.folder.name}/{PAGE}" for run in runs if (run.folder / PAGE).exists()}
    chart = Markup(_ratios(against)) if against else ""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    page = root / INDEX
    write_text(page, fill("index.html.j2", device=device, rows=rows, peers=peers, parts=parts, against=against, runs=runs,
                          pages=pages, chart=chart, problem=problem_text))
    return page


def _results(path: Path) -> Results | None:
    """The benchmark's; None where there is none."""
    try:
        return read_results(path)
    except InputError as error:
        raise InputError(f"{path} is no benchmark of this program; move it away, or run python -m tuner bench again") from error


def _ratios(rows: Sequence[Row]) -> str:
    """A bar for each row: the best peer's time over ours."""
    words = "; ".join(f"{row.case.title}: {row.ratio or 0:.2f}" for row in rows)
    return figure("ratios", "Times as fast as the best peer, by shape and class", words, 0.8 + 0.3 * len(rows),
                  partial(_draw, rows))


def _draw(rows: Sequence[Row], axes: Axes, narrow: bool) -> None:
    for at, row in enumerate(rows):
        ratio = row.ratio or 0.0
        axes.barh(at, ratio, height=0.64, color=ACCENT if ratio >= 1 else BAD)
        end = max(ratio, 1.0) if ratio > 0.8 else ratio  # the line at 1 would cross the figure
        axes.annotate(plain(ratio), (end, at), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.set_yticks(range(len(rows)), [f"{row.case.name}, {row.case.problem.accuracy}" for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1, y=0.01)
    axes.set_xlim(left=0)
    axes.set_xlabel("times as fast as the best peer")

"""One page over all published results of a GPU: the benchmark's rows against its peers, and the tuning runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from markupsafe import Markup
from matplotlib.axes import Axes

from reports.benchmark import read_benchmark
from reports.page import fill
from reports.run import TRIALS, Say, read_run, silent
from reports.svg import INK, MARKERS, SERIES, figure, label_row, legend
from reports.words import LEVEL
from tuner.bench.results import Row, Standing
from tuner.bench.sheet import JSON as BENCH_JSON
from tuner.errors import InputError
from tuner.pages import PAGE
from tuner.publish import REPORT
from tuner.records import write_text
from tuner.wording import problem_text

INDEX = "index.html"

LOOKS: dict[Standing | None, str] = {"faster": "good", "level": "", "slower": "bad", None: ""}
"""A class of style.css for each standing."""


def build_index(root: Path, say: Say = silent) -> Path:
    """Writes index.html into the folder of a GPU's results.

    Args:
        say: as in read_run.

    Raises:
        InputError: there are no results, or some that cannot be read.
        OSError: the folder cannot be written.
    """
    page = root / INDEX
    write_text(page, index_page(root, say))
    return page


def index_page(root: Path, say: Say = silent) -> str:
    """The page. It says nothing of when and by what it was built: the same results make the same page.

    Raises:
        InputError: there are no results, or some that cannot be read.
    """
    results = read_benchmark(root / BENCH_JSON)
    runs = [read_run(path.parent, say) for path in sorted(root.glob(f"*/{TRIALS}"))]
    if results is None and not runs:
        raise InputError(f"there is neither a {BENCH_JSON} nor a folder with a {TRIALS} in {root}; name a folder of results with "
                         "--root")
    rows = [] if results is None else list(results.rows)
    parts = () if results is None else results.parts
    against = [row for row in rows if row.ratio is not None]
    pages = {run.folder: f"{run.folder.name}/{name}" for run in runs for name in (REPORT, PAGE) if (run.folder / name).exists()}
    chart = Markup(_ratios(against)) if against else ""
    return fill(
        "index.html.j2", version="", device=parts[0].device if parts else runs[0].gpu, rows=rows, parts=parts, against=against,
        classes=_classes(rows), shapes=list(dict.fromkeys((row.case.name, str(row.case.shape)) for row in rows)),
        by_place={(row.case.name, str(row.case.shape), _class(row)): row for row in rows},
        peers=list(dict.fromkeys(name for row in rows for name in row.peers)), runs=runs, pages=pages, chart=chart,
        look=LOOKS, level=sum(row.standing == "level" for row in against), means=LEVEL,
        problem=problem_text, missing=() if results is None else results.missing)


def _class(row: Row) -> tuple[str, str]:
    """Data type and accuracy class."""
    return row.case.problem.dtype, row.case.problem.accuracy


def _classes(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Those there are, in the order in which they come up."""
    return list(dict.fromkeys(map(_class, rows)))


def _ratios(rows: Sequence[Row]) -> str:
    """The best peer's time over ours: a line for each shape, a point for each class."""
    shapes = list(dict.fromkeys(row.case.name for row in rows))
    words = "; ".join(f"{row.case.title}: {row.ratio:.2f}, {row.standing}" for row in rows)
    return figure("ratios", "Times as fast as the best peer, by shape and class", words, 0.9 + 0.36 * len(shapes),
                  partial(_draw, rows, shapes))


def _draw(rows: Sequence[Row], shapes: Sequence[str], axes: Axes, narrow: bool) -> None:
    axes.axvline(1, color=INK, linewidth=1.2)
    for number, (dtype, accuracy) in enumerate(_classes(rows)):
        mine = [row for row in rows if _class(row) == (dtype, accuracy)]
        axes.plot([row.ratio or 0.0 for row in mine], [shapes.index(row.case.name) for row in mine],
                  MARKERS[number % len(MARKERS)], color=SERIES[number % len(SERIES)], markersize=7, markeredgewidth=0,
                  label=f"{dtype}, class {accuracy}", gid=f"ratios-{dtype}-{accuracy}", zorder=3)
    greatest = max(row.ratio or 0.0 for row in rows)
    axes.set_xlim(0, 1.12 * greatest)
    for at, name in enumerate(shapes):
        label_row(axes, at, [(row.ratio or 0.0, f"{row.ratio:.2f}") for row in rows if row.case.name == name], narrow)
    axes.set_yticks(range(len(shapes)), shapes)
    axes.set_ylim(len(shapes) - 0.5, -0.8)
    axes.set_xlabel("times as fast as the best peer")
    legend(axes, 1 if narrow else 4)

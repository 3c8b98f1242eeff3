"""Several runs beside each other, and whether a later one is slower than the first of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup
from matplotlib.axes import Axes

from reports.page import fill
from reports.run import Run
from reports.svg import ACCENT, BAD, MUTED, figure
from reports.words import plain, us
from tuner.wording import problem_text


@dataclass(frozen=True, slots=True)
class Change:
    """One run against the first that is about the same problem on the same device.

    Attributes:
        before, after: both.
        before_us: the time of the earlier winner, microseconds.
        ratio: the time of the later winner over that of the earlier; None where the later run has no winner.
        regressed: whether that is too much.
    """

    before: Run
    after: Run
    before_us: float
    ratio: float | None
    regressed: bool

    @property
    def sentence(self) -> str:
        """What became of it."""
        about = f"{problem_text(self.after.info)} on {self.after.gpu}"
        before = f"{us(self.before_us)} in {self.before.folder}"
        if self.ratio is None:
            return f"{about}: no valid kernel in {self.after.folder} against {before}"
        after = f"{us(self.ratio * self.before_us)} in {self.after.folder}"
        return f"{about}: {after} against {before}, {abs(self.ratio - 1):.1%} {'slower' if self.ratio > 1 else 'faster'}"


def comparable(run: Run) -> tuple[object, ...]:
    """What two runs must agree in for their measured times to be comparable."""
    info = run.info
    return (info.shape, info.dtype, info.param_dtype, info.wants, info.deterministic, info.accuracy, info.regime, info.target,
            info.device)


def changes(runs: Sequence[Run], tolerance: float) -> list[Change]:
    """Each measured run against the first of its kind that has a winner, in the order in which they are given.

    Args:
        tolerance: so much longer, as a share, the later winner may take.
    """
    first: dict[tuple[object, ...], Run] = {}
    found = []
    for run in runs:
        if not run.info.measures:
            continue
        before = first.get(comparable(run))
        if before is not None and before.winner is not None:
            least = before.winner.best_us
            ratio = None if run.winner is None else run.winner.best_us / least
            found.append(Change(before, run, least, ratio, ratio is None or ratio > 1 + tolerance))
        elif run.winner is not None:
            first[comparable(run)] = run
    return found


def compare_page(runs: Sequence[Run], found: Sequence[Change], tolerance: float) -> str:
    """The page of several runs, and of what `changes` found with that tolerance."""
    chart = Markup(_times(runs, {id(change.after) for change in found if change.regressed}))
    return fill("compare.html.j2", runs=runs, changes=found, tolerance=tolerance, chart=chart, problem=problem_text,
                devices=len({run.gpu for run in runs}), problems=len({problem_text(run.info) for run in runs}))


def _times(runs: Sequence[Run], regressed: set[int]) -> str:
    """A bar for each run: its winner's time over its floor, which makes shapes and GPUs comparable."""
    return figure(
        "times", "The winners' times over their floors",
        "; ".join(f"{run.folder.name}: {plain(_over(run))} times its floor, {run.kind}" for run in runs), 0.7 + 0.34 * len(runs),
        partial(_draw, runs, regressed))


def _draw(runs: Sequence[Run], regressed: set[int], axes: Axes, narrow: bool) -> None:
    for row, run in enumerate(runs):
        colour = BAD if id(run) in regressed else ACCENT if run.info.measures else MUTED
        axes.barh(row, _over(run), height=0.62, color=colour)
        said = "none valid" if run.winner is None else plain(_over(run))
        said += ", a regression" if id(run) in regressed else "" if run.info.measures else ", predicted"
        axes.annotate(said, (_over(run), row), (4, 0), textcoords="offset points", va="center", fontsize=8)
    names = [f"{number}  {run.info.shape}" if narrow else f"{number}  {run.info.shape} {run.info.dtype}, {run.gpu}"
             for number, run in enumerate(runs, 1)]
    axes.set_yticks(range(len(runs)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, (1.5 if narrow else 1.25) * max(1.0, *map(_over, runs)))
    axes.set_xlabel("times the floor")


def _over(run: Run) -> float:
    return 0.0 if run.winner is None else run.winner.best_us / run.floor_us

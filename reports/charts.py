"""The figures of a run's page. Each number in them stands in a table of the page too."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from codegen.variants import VARIANTS
from reports.analysis import Family, Step
from reports.importance import Importance
from reports.roofline import Ceiling, Point, Spent
from reports.run import Run
from reports.svg import ACCENT, BAD, BAND, INK, MARKERS, MUTED, SERIES, figure, label_row, legend
from reports.words import plain, us
from reports.worth import Worth
from tuner.records import Status

GOLDEN = 0.618033988749895
"""Multiples of it spread points evenly over a strip, the same way in every build."""



def look_of(number: int) -> tuple[str, str]:
    """Colour and marker of a family; of up to a hundred no two have both in common."""
    return SERIES[number % len(SERIES)], MARKERS[(number + number // len(SERIES)) % len(MARKERS)]


LOOKS = {name: look_of(number) for number, name in enumerate(VARIANTS)}
"""The same in every page."""


def family_times(run: Run, families: Sequence[Family]) -> str:
    """Times of all candidates by family."""
    shown = [family for family in families if family.valid or family.predicted_us]
    size = _size(run)

    def draw(axes: Axes, narrow: bool) -> None:
        for row, family in enumerate(shown):
            colour, marker = LOOKS[family.name]
            if family.predicted_us:
                axes.plot([family.predicted_us[0], family.predicted_us[-1]], [row, row], color=BAND, linewidth=14,
                          solid_capstyle="butt", zorder=1)
            times = [record.best_us for record in family.valid]
            heights = [row + 0.62 * ((0.5 + number * GOLDEN) % 1.0 - 0.5) for number in range(len(times))]
            axes.plot(times, heights, marker, color=colour, markersize=size, markeredgewidth=0, alpha=0.65, zorder=2,
                      gid=f"family-{family.name}")
            if family.median_us is not None and len(times) > 2:
                axes.plot([family.median_us] * 2, [row - 0.4, row + 0.4], color=INK, linewidth=1.4, zorder=3)
        if run.winner is not None:
            _ring(axes, run.winner.best_us, next(row for row, family in enumerate(shown) if family.best is not None
                                                 and family.name == run.winner.config.variant))
        axes.axvline(run.floor_us, color=ACCENT, linestyle=(0, (4, 3)), linewidth=1.2)
        axes.annotate("floor", (run.floor_us, 1), (3, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                      color=ACCENT, fontsize=8)
        axes.set_yticks(range(len(shown)), [family.name for family in shown], family="DejaVu Sans Mono")
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        _log_axis(axes, "x", narrow)
        axes.set_xlabel(f"microseconds a call, {run.kind}")

    return figure("families", f"Times of all valid candidates by family, {run.kind}",
                  "; ".join(f"{family.name}: {len(family.valid)} valid, best {us(family.best.best_us)}" if family.best else
                            f"{family.name}: none valid" for family in shown) + f"; the floor is {us(run.floor_us)}",
                  0.75 + 0.52 * len(shown), draw)


def search_history(run: Run, families: Sequence[Family], steps: Sequence[Step]) -> str:
    """Every candidate in the order in which it was tried, and the best so far."""
    size = _size(run)

    def draw(axes: Axes, narrow: bool) -> None:
        for family in sorted(families, key=lambda family: family.name):
            colour, marker = LOOKS[family.name]
            mine = [(number, record.time_us) for number, record in enumerate(run.tried, 1)
                    if record.status is Status.OK and record.config.variant == family.name]
            if mine:
                axes.plot(*zip(*mine, strict=True), marker, color=colour, markersize=size, markeredgewidth=0, alpha=0.65,
                          label=family.name, gid=f"history-{family.name}")
        rejected = [number for number, record in enumerate(run.tried, 1) if record.status is not Status.OK]
        if rejected:
            axes.plot(rejected, [0.985] * len(rejected), "|", color=BAD, markersize=7, transform=axes.get_xaxis_transform(),
                      label="rejected", gid="history-rejected")
        if steps:
            ends = [step.number for step in steps] + [len(run.tried)]
            best = [step.time_us for step in steps] + [steps[-1].time_us]
            axes.plot(ends, best, color=INK, drawstyle="steps-post", label="best so far", zorder=5)
            axes.plot(ends[:-1], best[:-1], "o", color=INK, markersize=4, zorder=6, gid="history-best")
        legend(axes, 2 if narrow else 6)
        _log_axis(axes, "y", narrow)
        axes.set_xlim(0, 1.04 * len(run.tried) + 1)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlabel("candidate, in the order in which they were tried")
        axes.set_ylabel(f"microseconds, {run.kind}")

    return figure("history", "The search: each candidate's time, and the best so far",
                  "; ".join(f"candidate {step.number}: {us(step.time_us)}, {step.record.config}" for step in steps), 3.6, draw)


def roofline(run: Run, points: Sequence[Point], ceilings: Sequence[Ceiling]) -> str:
    """Candidates under the ceilings of the GPU."""
    own = next((point for point in points if point.record is run.winner), None)
    arithmetic = max(ceiling.tflops for ceiling in ceilings if ceiling.unit == "TFLOP/s" and ceiling.tflops is not None)
    shown = [ceiling for ceiling in ceilings if (ceiling.tflops or 0.0) <= arithmetic]  # one launch may lie far above all
    size = _size(run)

    def draw(axes: Axes, narrow: bool) -> None:
        reach = [point.intensity for point in points]
        left, right = min(reach) / 3, max(reach) * 3
        levels = [ceiling.tflops for ceiling in shown if ceiling.tflops is not None]
        slopes = [ceiling.value for ceiling in shown if ceiling.unit == "TB/s"]
        right = max(right, 30 * max(levels) / min(slopes))
        for ceiling in shown:
            dashes = "solid" if ceiling.unit == "TFLOP/s" or ceiling.name == "device memory" else (0, (4, 3))
            if ceiling.tflops is None:
                end = max(levels) / ceiling.value
                axes.plot([left, end], [left * ceiling.value, end * ceiling.value], color=MUTED, linewidth=1.1, linestyle=dashes,
                          label=f"{ceiling.name}, {_figure(ceiling)}")
            else:
                ridge = max(left, ceiling.tflops / max(slopes))
                axes.plot([ridge, right], [ceiling.tflops] * 2, color=MUTED, linewidth=1.1, linestyle=dashes)
                axes.annotate(f"{ceiling.name}, {_figure(ceiling)}", (right, ceiling.tflops), (0, 2.5), ha="right",
                              textcoords="offset points", fontsize=7.5, color=MUTED)
        for name, (colour, marker) in LOOKS.items():
            mine = [(point.intensity, point.tflops) for point in points if point.record.config.variant == name]
            if mine:
                axes.plot(*zip(*mine, strict=True), marker, color=colour, markersize=size, markeredgewidth=0, alpha=0.65,
                          label=name, gid=f"roofline-{name}")
        if own is not None:
            _ring(axes, own.intensity, own.tflops)
        legend(axes, 2 if narrow else 6)
        _log_axis(axes, "x", narrow)
        _log_axis(axes, "y", narrow)
        axes.set_xlim(left, right)
        axes.set_xlabel("operations a byte")
        axes.set_ylabel("TFLOP/s")

    reached = "" if own is None else (f"; the winner reaches {plain(own.tflops)} TFLOP/s at {plain(own.intensity)} operations a "
                                      "byte")
    return figure("roofline", "Roofline", "Ceilings: " + ", ".join(f"{one.name} {_figure(one)}" for one in ceilings) + reached,
                  4.0, draw)


def time_spent(run: Run, spent: Spent) -> str:
    """The winner's time, the cost model's steps and the floors, one above the other."""
    floor = run.floor
    floors = [("bytes at copy bandwidth", floor.bytes_us), ("one launch", floor.launch_us)]
    if floor.matrix_us is not None:
        floors.append(("16-bit products", floor.matrix_us))
    whole = [("measured", spent.time_us, INK)] if run.info.measures else []
    steps = len(whole)
    bars = [*whole, ("cost model", spent.predicted_us, ""), *((name, value, MUTED) for name, value in floors)]

    def draw(axes: Axes, narrow: bool) -> None:
        left = 0.0
        for number, step in enumerate(spent.steps):
            axes.barh(steps, step.time_us, left=left, height=0.6, color=SERIES[number % len(SERIES)], label=step.name)
            left += step.time_us
        for row, (_, value, colour) in enumerate(bars):
            if row != steps:
                axes.barh(row, value, height=0.6, color=colour)
            axes.annotate(us(value), (value, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.14)
        axes.set_xlim(left=0)
        axes.set_xlabel("microseconds a call")
        legend(axes, 1 if narrow else 4)

    return figure("spent", "The winner's time beside the cost model's steps and the floors",
                  f"{us(spent.time_us)} {run.kind}; cost model: "
                  + ", ".join(f"{step.name} {us(step.time_us)}" for step in spent.steps)
                  + "; floors: " + ", ".join(f"{name} {us(value)}" for name, value in floors), 0.9 + 0.36 * len(bars), draw)


def parameter_importance(found: Importance) -> str:
    """A bar for each parameter."""
    def draw(axes: Axes, narrow: bool) -> None:
        rows = range(len(found.shares))
        axes.barh(rows, [100 * share for _, share in found.shares], height=0.62, color=ACCENT)
        for row, (_, share) in enumerate(found.shares):
            axes.annotate(f"{share:.0%}", (100 * share, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(rows, [name for name, _ in found.shares], family="DejaVu Sans Mono")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.12)
        axes.set_xlabel("percent")

    return figure("importance", f"Importance of the parameters of {found.family}",
                  ", ".join(f"{name} {share:.0%}" for name, share in found.shares), 0.6 + 0.32 * len(found.shares), draw)


def change_one(worths: Sequence[Worth]) -> str:
    """For each parameter of the winner, how much longer its other values take."""
    reach = [1.0, *(ratio for one in worths for other in one.alternatives for ratio in other.ratios)]
    low, high = min(reach), max(max(reach), 1.01 * min(reach))

    def draw(axes: Axes, narrow: bool) -> None:
        axes.axvline(1, color=ACCENT, linewidth=1.4)
        axes.set_xlim(low / (high / low) ** 0.06, high * (high / low) ** 0.08)
        _log_axis(axes, "x", narrow)
        for row, one in enumerate(worths):
            timed = [(other.times, other) for other in one.alternatives if other.times is not None]
            if not timed:
                continue
            times = [ratio for ratio, _ in timed]
            axes.plot([min(1, *times), max(1, *times)], [row, row], color=BAND, linewidth=5, solid_capstyle="round", zorder=1)
            for _, other in timed:
                axes.plot([min(other.ratios), max(other.ratios)], [row, row], color=SERIES[0], linewidth=1.6, zorder=2)
            axes.plot(times, [row] * len(times), "o", color=SERIES[0], markersize=5.5, markeredgewidth=0, zorder=3,
                      gid=f"worth-{one.name}")
            label_row(axes, row, [(ratio, str(other.value)) for ratio, other in timed], narrow)
        axes.set_yticks(range(len(worths)), [f"{one.name}={one.value}" for one in worths], family="DejaVu Sans Mono")
        axes.set_ylim(len(worths) - 0.4, -0.8)
        axes.set_xlabel("times as long as the winner")

    return figure("worth", "What each parameter of the winner is worth: times as long with another value",
                  "; ".join(f"{one.name}={one.value}: " + (", ".join(f"{other.value} {plain(other.times)}"
                            for other in one.alternatives if other.times is not None) or "no time of another value")
                            for one in worths), 0.7 + 0.37 * len(worths), draw)


def _size(run: Run) -> float:
    """Of markers: few may be seen from afar, many must not hide each other."""
    return 4.0 if len(run.tried) > 100 else 6.5


def _ring(axes: Axes, x: float, y: float) -> None:
    """Round the winner."""
    axes.plot(x, y, "o", markersize=10, markerfacecolor="none", markeredgecolor=INK, zorder=5, label="winner")


def _figure(ceiling: Ceiling) -> str:
    return f"{plain(ceiling.value)} {ceiling.unit}"


def _log_axis(axes: Axes, which: str, narrow: bool) -> None:
    """A logarithmic axis with plain numbers, the fewer of each decade the more decades there are."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    span = high / low * (3 if narrow and which == "x" else 1)
    each = (1, 1.5, 2, 3, 4, 5, 7) if span < 8 else (1, 2, 5) if span < 1000 else (1,)
    axis.set_major_locator(LogLocator(subs=each, numticks=5 if narrow and which == "x" else 12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:.6g}"))
    axis.set_minor_locator(NullLocator())

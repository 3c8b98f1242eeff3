"""The states of a GPU's clock under one kernel: its times in short series after pauses and back to back, with the gauges beside.

    python -m tuner.bench.clocks [--shapes bertL,tall,small] [--dtype float32] [--config CONFIG] [--out DIR]

A kernel that draws much power runs at a high clock for a moment and at a lower one from then on; which of both a time belongs to
depends on what ran just before. Each time is a measurement as the search takes them, after a pause or without one, and NVML is
read when it ends. Writes clocks.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from codegen.config import Config
from codegen.dtypes import DTYPES
from codegen.problem import Problem
from tuner.arguments import OK, Parser, as_config, exit_status
from tuner.bench.cli import open_gpu
from tuner.bench.ours import prove
from tuner.bench.shapes import parse_shapes
from tuner.errors import InputError, ToolchainError
from tuner.executors import Executor
from tuner.inputs import random_inputs, read_only
from tuner.known import reports_folder
from tuner.provenance import now, version
from tuner.records import write_text
from tuner.timing.health import Gauge, Reading
from tuner.wisdom.recall import choose

MARKDOWN = "clocks.md"
SHAPES = "bertL,tall,small"
SAMPLES, SECONDS = 15, 0.04
"""Of one measurement: a short series, as the search takes it."""

BACK_TO_BACK = "back to back"
STEPS = (("first", 0.0, 1), (BACK_TO_BACK, 0.0, 4), ("after 1.5 s", 1.5, 1), (BACK_TO_BACK, 0.0, 4), ("after 0.3 s", 0.3, 1),
         ("after 0.8 s", 0.8, 1), (BACK_TO_BACK, 0.0, 2))
"""What is measured in turn: what it is called, the pause before each measurement in seconds, and how many there are."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One measurement.

    Attributes:
        step: what came before it.
        us: of one call, the median.
        reading: of the gauges, when it ended.
    """

    step: str
    us: float
    reading: Reading


def main(arguments: Sequence[str]) -> int:
    """Runs the command line, given its arguments, and returns the exit status: 0, or 1 without a GPU or NVML, 2 for usage."""
    parser = Parser(prog="clocks", allow_abbrev=False, description=(
        "Times a kernel in short series after pauses and back to back, with the GPU's clock and what lowers it beside each."))
    parser.add_argument("--shapes", action="append", metavar="A,B|B,S,H,O|FILE",
                        help=f"as of python -m tuner bench (default {SHAPES})")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of all tensors (default float32)")
    parser.add_argument("--config", action="append", default=[], metavar="CONFIG",
                        help="the kernel of a single shape, or several such options (default: the best one known)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default reports/<device>)")
    options = parser.parse_args(arguments)
    return exit_status("clocks", lambda: _run(options, arguments))


def states(measure: Callable[[], float], gauge: Gauge, pause: Callable[[float], None] = time.sleep) -> Iterator[Seen]:
    """Goes through STEPS.

    Args:
        measure: times the kernel once, microseconds of a call.
        gauge: of its GPU.
        pause: waits so many seconds.
    """
    for step, seconds, count in STEPS:
        for _ in range(count):
            if seconds:
                pause(seconds)
            yield Seen(step, measure(), gauge.read())


def table(seen: Iterable[Seen]) -> list[str]:
    """Markdown: a row a measurement."""
    lines = ["| | us | SM clock, MHz | W | degrees Celsius | lowered by |", "|---|---|---|---|---|---|"]
    for one in seen:
        figures = (one.reading.sm_mhz, one.reading.power_w, one.reading.temperature_c)
        told = " | ".join("" if figure is None else f"{figure:.0f}" for figure in figures)
        lines.append(f"| {one.step} | {_plain(one.us)} | {told} | {', '.join(sorted(one.reading.reasons)) or 'nothing'} |")
    return lines


def summary(seen: Sequence[Seen]) -> str:
    """The two states as a sentence: after pauses, and back to back."""
    rested, busy = ([one for one in seen if (one.step == BACK_TO_BACK) is same] for same in (False, True))
    times = median(one.us for one in busy) / median(one.us for one in rested)
    return f"After pauses {_state(rested)}; {BACK_TO_BACK} {_state(busy)}: {times:.2f} times as long."


def _state(group: Sequence[Seen]) -> str:
    clocks = [one.reading.sm_mhz for one in group if one.reading.sm_mhz is not None]
    reasons = sorted(frozenset[str]().union(*(one.reading.reasons for one in group)))
    return (f"{_range([one.us for one in group])} us" + (f" at {_range(clocks)} MHz" if clocks else "")
            + (f" ({', '.join(reasons)})" if reasons else ""))


def _range(values: Sequence[float]) -> str:
    low, high = _plain(min(values)), _plain(max(values))
    return low if low == high else f"{low} to {high}"


def _plain(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    shapes = parse_shapes(options.shapes or [SHAPES])
    configs = [as_config(text) for text in options.config]
    if configs and len(shapes) != 1:
        raise InputError("--config is a kernel of one shape; name that one with --shapes")
    with closing(open_gpu()) as executor:
        gauge = _gauge(executor)
        lines: list[str] = []
        for named in shapes:
            problem = Problem.of(named.shape, dtype=options.dtype)
            for config in configs or [choose(problem, executor)]:
                lines += _section(executor, gauge, problem, named.name, config)
        folder = options.out or reports_folder() / executor.slug
        command = shlex.join(["python", "-m", "tuner.bench.clocks", *arguments])
        head = [f"# Times and clocks, {executor.device}", "",
                f"{now()}, revision {version()}; `{command}`. Each time is of one call, warm, the median of up to {SAMPLES} "
                f"samples in {SECONDS:g} s; NVML is read when the last of them ends.", ""]
        write_text(folder / MARKDOWN, "\n".join([*head, *lines]))
    print(f"written: {folder / MARKDOWN}")
    return OK


def _gauge(executor: Executor) -> Gauge:
    """Raises ToolchainError: NVML cannot be used, so that there would be no clocks."""
    if executor.bus_id is None:
        raise ToolchainError(f"{executor.device} has no gauges")
    from tuner.timing.nvml import NvmlGauge

    return NvmlGauge(executor.bus_id)


def _section(executor: Executor, gauge: Gauge, problem: Problem, name: str, config: Config) -> list[str]:
    """What was seen of one kernel, as a part of the page; its sentence is printed too."""
    program = prove(problem, executor, config, seed=0).program
    executor.close()  # what validation left on the GPU
    data = random_inputs(problem.rows, problem.hidden, problem.out)
    inputs = read_only(data.rounded_to(problem.dtype, problem.param_dtype))

    def measure() -> float:
        return median(program.time(inputs, problem.wants, samples=SAMPLES, budget_s=SECONDS).samples)

    seen = list(states(measure, gauge))
    print(f"{name}: {summary(seen)}", flush=True)
    return [f"## {name}, {problem.dtype}", "", f"`{config}`", "", *table(seen), "", summary(seen), ""]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Where the time of benchmarked kernels goes, by Nsight Compute's counters: `python -m tuner.bench.profile`.

    python -m tuner.bench.profile [--from bench.json] [--shapes gpt2,pair] [--dtypes bfloat16] [--out DIR]

takes the kernels of a bench.json, runs one call of each under `ncu` in a process of its own, and writes profile.json and
profile.md: every launch with its time, how busy memory, caches and tensor cores were, what warps waited for, and which part of
the time between the kernel and its floor is the largest. Counting is allowed to root, or to all where the driver's
NVreg_RestrictProfilingToAdminUsers is 0.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.config import Config
from codegen.errors import CodegenError
from codegen.plan import Launch
from codegen.render import render
from codegen.space import parse_config
from tuner.arguments import FAILED, OK, Parser, check_folder, exit_status, parse_names
from tuner.bench import profiled
from tuner.bench.cli import open_gpu
from tuner.bench.counters import METRICS, SECTIONS, UNITS, Counted, read_counters
from tuner.bench.results import Row
from tuner.bench.shares import parts
from tuner.bench.sheet import JSON as BENCH_JSON
from tuner.bench.sheet import read_results
from tuner.errors import InputError, ToolchainError
from tuner.executors import Executor
from tuner.known import reports_folder
from tuner.provenance import now, version
from tuner.records import write_text
from tuner.store import default_root
from tuner.tools import started
from tuner.versions import versions
from tuner.workers.messages import Job, Place

NAME = "ncu"
MOST_SECONDS = 180.0
"""A kernel gets no more: making the data and several runs of each launch, which counters need."""

Count = Callable[[Row, Config], list[Counted]]


@dataclass(frozen=True, slots=True)
class Profile:
    """What was counted for one row of the benchmark; `reason` says why nothing was, as a clause."""

    row: Row
    launches: tuple[Counted, ...] = ()
    reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The profile as JSON values."""
        name, dtype, accuracy = self.row.case.key
        return {"name": name, "dtype": dtype, "accuracy": accuracy, "config": self.row.config, "reason": self.reason,
                "launches": [launch.as_json() for launch in self.launches]}


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit status: 0, 1 where a kernel could not be profiled, 2 for usage."""
    parser = Parser(prog="profile", allow_abbrev=False,
                    description="Where the time of benchmarked kernels goes, by Nsight Compute's counters.")
    parser.add_argument("--from", dest="bench", type=Path, metavar="FILE",
                        help=f"which kernels (default reports/<device>/{BENCH_JSON})")
    parser.add_argument("--shapes", type=parse_names, default=(), metavar="A,B", help="of these names only (default: all)")
    parser.add_argument("--dtypes", type=parse_names, default=(), metavar="A,B", help="of these data types only (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default reports/<device>)")
    options = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", "tuner.bench.profile", *arguments])
    return exit_status("profile", lambda: _run(options, command), interrupted="interrupted; what was counted is written")


def _run(options: argparse.Namespace, command: str) -> int:
    program = shutil.which(NAME)
    if program is None:
        raise ToolchainError(f"{NAME} is not on the PATH; it comes with the CUDA toolkit as Nsight Compute")
    with closing(open_gpu()) as executor:
        folder = reports_folder() / executor.slug
        rows = _rows(options.bench or folder / BENCH_JSON, options.shapes, options.dtypes)
        out = options.out or folder
        check_folder(out)
        head = {"device": executor.device, "date": now(), "version": version(), "command": command,
                "versions": versions(executor.limits.arch, {})}
        profiles: list[Profile] = []
        for row in rows:
            profiles.append(profile(row, lambda row, config: _count(program, executor, row, config)))
            print(_said(profiles[-1]), flush=True)
            write_text(out / "profile.json", json.dumps({**head, "rows": [one.as_json() for one in profiles]}, indent=1) + "\n")
            write_text(out / "profile.md", page(profiles, executor.device, str(head["date"]), str(head["version"]), command))
    print(f"written: {out / 'profile.md'}, {out / 'profile.json'}")
    return FAILED if any(one.reason is not None for one in profiles) else OK


def _rows(path: Path, names: Sequence[str], dtypes: Sequence[str]) -> list[Row]:
    """The rows with a kernel, of those names and types where any are given."""
    results = read_results(path)
    if results is None:
        raise InputError(f"there is no {path}; run `python -m tuner bench` first, or name its file with --from")
    known = {row.case.name for row in results.rows}
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"{path} has no row called {unknown[0]!r}; it has {', '.join(sorted(known))}")
    found = [row for row in results.rows if row.config is not None and row.ours.warm is not None
             and (not names or row.case.name in names) and (not dtypes or row.case.problem.dtype in dtypes)]
    if not found:
        raise InputError(f"{path} has no kernel of that kind")
    return found


def profile(row: Row, count: Count) -> Profile:
    """What the counters say of a row's kernel.

    Args:
        row: with a config.
        count: the launches of one call.
    """
    assert row.config is not None
    try:
        return Profile(row, tuple(count(row, parse_config(row.config))))
    except (CodegenError, ToolchainError) as error:  # also of a config that there is no more
        return Profile(row, reason=str(error))


def _count(program: str, executor: Executor, row: Row, config: Config) -> list[Counted]:
    """Runs one call under ncu.

    Raises:
        ToolchainError: it fails, takes too long, or counts nothing.
    """
    assert executor.bus_id is not None
    problem = row.case.problem
    kernels = {step.kernel for step in render(problem, config).plan.steps if isinstance(step, Launch)}
    place = Place("cuda", executor.limits.arch, default_root(), limits=executor.limits)
    counting = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--cache-control", "none",
                "--profile-from-start", "off", "--metrics", ",".join(METRICS)]
    for section in SECTIONS:
        counting += ["--section", section]
    command = [program, *counting, sys.executable, "-P", "-m", profiled.__name__, str(config), str(row.case.shape),
               executor.bus_id, json.dumps(Job(problem, 1e-5, 0).as_json()), json.dumps(place.as_json())]
    with started(command) as run:
        status, output = run.wait(time.monotonic() + MOST_SECONDS), run.output()
    if status is None:
        raise ToolchainError(f"{NAME} did not end within {MOST_SECONDS:.0f} s")
    if status != 0:
        said = [re.sub(r"^==\w+==\s*", "", line).strip() for line in output.splitlines() if not line.startswith('"')]
        raise ToolchainError(f"{NAME} failed: {next((line for line in reversed(said) if line), f'status {status}')}")
    if not (launches := read_counters(output, kernels)):
        raise ToolchainError(f"{NAME} has counted none of its launches")
    return launches


def page(profiles: Sequence[Profile], device: str, date: str, revision: str, command: str) -> str:
    """All of it in Markdown."""
    units = list(UNITS)
    lines = [
        f"# Where the time goes, {device}", "", f"{date}, revision {revision}.", "", f"    {command}", "",
        "Each launch by itself, counted by Nsight Compute, with clocks and caches as they were: its time, the clock of the SMs, "
        "what went to and from memory and L2, how busy each part of the GPU was, and what warps waited for most, as shares of "
        "their time; where warps have roles, much of that is one role waiting for another. *ours* is the time of a call in a row "
        "of them, from bench.md. Between the floor and it lie the parts named, the largest first; they and the floor come to "
        "about that time.", ""]
    for one in profiles:
        row = one.row
        warm = row.ours.warm
        assert warm is not None
        lines += [f"## {row.case.title}", "", f"`{row.config}`", ""]
        if one.reason is not None:
            lines += [f"Not profiled: {one.reason}.", ""]
            continue
        lines += [f"Floor {row.floor.us:.3g} us, ours {warm.median:.3g} us.", "",
                  "| launch | us | GHz | memory, MB | L2, MB | " + " | ".join(units) + " | warps wait for |",
                  "|---" * (6 + len(units)) + "|"]
        for launch in one.launches:
            busy = [f"{launch.busy[unit]:.0%}" if unit in launch.busy else "–" for unit in units]
            waits = ", ".join(f"{wait} {launch.waits[wait]:.0%}" for wait in launch.main_waits())
            lines.append(f"| `{launch.kernel}` | {launch.us:.3g} | {launch.ghz:.2f} | {launch.memory_bytes / 1e6:.3g} | "
                         f"{launch.l2_bytes / 1e6:.3g} | {' | '.join(busy)} | {waits or '–'} |")
        lines += ["", *(f"* {part.us:.3g} us: {part.what}" for part in parts(one.launches, row.floor, warm.median)[:4]), ""]
    return "\n".join(lines)


def _said(one: Profile) -> str:
    """One line for a terminal."""
    warm = one.row.ours.warm
    assert warm is not None
    if one.reason is not None:
        return f"{one.row.case.title}: {one.reason}"
    largest = next(iter(parts(one.launches, one.row.floor, warm.median)), None)
    return f"{one.row.case.title}: " + ("at its floor" if largest is None else
                                        f"{largest.us:.3g} of {warm.median - one.row.floor.us:.3g} us: {largest.what}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Compares searches on recorded spaces: `python -m tuner.replay.compare FILE... --seeds 30 --out DIR`.

Each search tries up to 200 configs of each space, once for each seed. It is judged by the fraction of the optimum that the best
of its first 25, 50, 100 and 200 reached. Against each other search, the mean difference at 100, over all spaces, comes with its
95 % bootstrap interval (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13: percentiles), seeds resampled
within each space.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tuner.arguments import OK, Parser, check_folder, exit_status
from tuner.errors import InputError
from tuner.pipeline import IN_FLIGHT
from tuner.provenance import now, version
from tuner.records import write_text
from tuner.replay.field import Field
from tuner.replay.recorded import load
from tuner.replay.rivals import OURS, rivals

AFTER = (25, 50, 100, 200)
JUDGED = 2  # AFTER[JUDGED] is where searches are compared
NEAR = 1 / 1.05
"""Within five per cent of the optimum."""

RESAMPLES = 10_000

Reached = NDArray[np.float64]
"""Fractions of the optimum, [seeds, AFTER]."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far our search is ahead of another at AFTER[JUDGED], as fractions of the optimum.

    Attributes:
        mean: over all spaces and seeds.
        low, high: the 95 % bootstrap interval of the mean.
    """

    mean: float
    low: float
    high: float


def difference(ours: Sequence[Reached], theirs: Sequence[Reached]) -> Difference:
    """Of two searches on the same spaces, each [seeds, AFTER]."""
    rng = np.random.default_rng(0)

    def resampled(of_spaces: Sequence[Reached]) -> NDArray[np.float64]:
        means = [space[rng.integers(0, len(space), (RESAMPLES, len(space))), JUDGED].mean(axis=1) for space in of_spaces]
        return np.asarray(np.mean(means, axis=0), np.float64)

    means = resampled(ours) - resampled(theirs)
    mean = np.mean([space[:, JUDGED].mean() for space in ours]) - np.mean([space[:, JUDGED].mean() for space in theirs])
    low, high = np.quantile(means, (0.025, 0.975))
    return Difference(float(mean), float(low), float(high))


@cache
def _field(path: Path) -> Field:
    return Field(load(path))


@dataclass(frozen=True, slots=True)
class Runs:
    """One search on one space, once for each seed.

    Attributes:
        reached: what it reached.
        tried: how many configs it had tried when it ended, [seeds].
    """

    reached: Reached
    tried: NDArray[np.int64]


Found = Mapping[str, Mapping[Path, Runs]]
"""By search and space."""


def _play(path: Path, name: str, seed: int) -> tuple[list[float], int, float]:
    """What one search reached, how many configs it tried, and the seconds it took."""
    field, began = _field(path), time.perf_counter()
    tried = rivals()[name](field, AFTER[-1], seed)
    return [field.reached(tried, after) for after in AFTER], len(tried), time.perf_counter() - began


def compare(paths: Sequence[Path], names: Sequence[str], seeds: int, workers: int) -> Found:
    """Plays each search on each space."""
    # Ctrl-C at a terminal is for all processes: these end by it without a word.
    with ProcessPoolExecutor(workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL)) as pool:
        runs = {name: {path: [pool.submit(_play, path, name, seed) for seed in range(seeds)] for path in paths} for name in names}
        found: dict[str, dict[Path, Runs]] = {}
        for name, of_paths in runs.items():
            found[name] = {}
            for path, futures in of_paths.items():
                reached, tried, seconds = zip(*(future.result() for future in futures), strict=True)
                found[name][path] = Runs(np.array(reached), np.array(tried))
                print(f"{name} on {path.name}: {_row(found[name][path])}; {np.mean(seconds):.1f} s a run", flush=True)
    return found


def _row(runs: Runs) -> str:
    return " ".join(f"{100 * value:.1f}" for value in runs.reached.mean(axis=0)) + f" %, near {_near(runs):.0%}"


def _near(runs: Runs) -> float:
    return float((runs.reached[:, JUDGED] >= NEAR).mean())


def _ahead_of(found: Found, name: str) -> Difference:
    """How far our search is ahead of that one."""
    ours, theirs = ([runs.reached for runs in found[one].values()] for one in (OURS, name))
    return difference(ours, theirs)


def report(found: Found, seeds: int, command: str) -> str:
    """The comparison for a reader, in Markdown."""
    paths = list(next(iter(found.values())))
    devices = dict.fromkeys(_field(path).recorded.origin.device for path in paths)
    after = " | ".join(str(count) for count in AFTER)
    lines = [
        "# Searches on recorded spaces", "",
        f"{now()}, revision {version()}, times of {', '.join(devices)}:", "", f"    {command}", "",
        f"{seeds} seeds. Per cent of the optimum that the best of the first "
        f"{', '.join(map(str, AFTER))} configs reached, in the mean; *near*: runs within 5 % of it after {AFTER[JUDGED]}; "
        "*tried*: configs a search had tried when it ended, in the mean.", "",
        f"`{OURS}` is the tuner's search, with {IN_FLIGHT} configs in flight, as in a tuning run; all others know every time "
        "before they choose. `predicted` is the cost model's order alone. Some of that model's constants were chosen with times "
        "of this GPU, so there is also `unaided`, the tuner's search without it. `kt` are strategies of Kernel Tuner in its "
        "simulation mode. Some of these ask for the same configs again and again where all that lies round their best was "
        "tried, or fail where a neighbour was not recorded, or a space is small; then they have ended."]
    for path in paths:
        field = _field(path)
        lines += ["", f"## {field.recorded.origin.shape} {field.recorded.origin.dtype}", "",
                  f"{len(field.candidates)} candidates, {len(field.times)} with a time, the best {field.best_us:.4g} us; "
                  f"recorded: {field.recorded.extent()}, in {path.name}.", "",
                  f"| search | {after} | near | tried |", "|---|" + "---|" * (len(AFTER) + 2)]
        for name, of_paths in found.items():
            values = " | ".join(f"{100 * value:.1f}" for value in of_paths[path].reached.mean(axis=0))
            lines.append(f"| {name} | {values} | {_near(of_paths[path]):.0%} | {of_paths[path].tried.mean():.0f} |")
    if OURS in found and len(found) > 1:
        lines += ["", f"## {OURS} against each other, after {AFTER[JUDGED]}, all spaces", "",
                  "| search | difference, % of the optimum | 95 % interval |", "|---|---|---|"]
        for name in found:
            if name != OURS:
                one = _ahead_of(found, name)
                lines.append(f"| {name} | {100 * one.mean:+.2f} | {100 * one.low:+.2f} to {100 * one.high:+.2f} |")
    return "\n".join(lines) + "\n"


def as_json(found: Found, seeds: int) -> str:
    """The same for programs, with every run."""
    runs = {name: {path.name: np.round(one.reached, 5).tolist() for path, one in of_paths.items()}
            for name, of_paths in found.items()}
    tried = {name: {path.name: one.tried.tolist() for path, one in of_paths.items()} for name, of_paths in found.items()}
    differences = {name: asdict(_ahead_of(found, name)) for name in found if OURS in found and name != OURS}
    return json.dumps({"date": now(), "version": version(), "seeds": seeds, "ahead": IN_FLIGHT, "after": AFTER,
                       "reached": runs, "tried": tried, "ahead_of": differences}) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    0: the comparison is written. 1: it cannot be. 2: the arguments make no sense. 130: interrupted.
    """
    known = rivals()
    parser = Parser(prog="compare", allow_abbrev=False, description=(
        "Plays the tuner's search and others on recorded spaces, and writes search.md and search.json."))
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a space that `python -m tuner record` wrote")
    parser.add_argument("--seeds", type=int, default=30, help="runs of each search (default 30)")
    parser.add_argument("--rivals", default=",".join(known), metavar="A,B", help=f"which searches, of {', '.join(known)}")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where to write (default: here)")
    options = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", "tuner.replay.compare", *(sys.argv[1:] if arguments is None else arguments)])
    return exit_status("compare", lambda: _compare(options, list(known), command))


def _compare(options: argparse.Namespace, known: Sequence[str], command: str) -> int:
    names = [name.strip() for name in options.rivals.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"there is no search {unknown[0]!r}; choose from {', '.join(known)}")
    if options.seeds < 1 or options.workers < 1:
        raise InputError("there must be one seed and one process at least")
    for path in options.files:
        if not _field(path).times:
            raise InputError(f"{path} has no time; record more of it")
    check_folder(options.out)
    found = compare(options.files, names, options.seeds, options.workers)
    write_text(options.out / "search.md", report(found, options.seeds, command))
    write_text(options.out / "search.json", as_json(found, options.seeds))
    return OK


if __name__ == "__main__":
    sys.exit(main())

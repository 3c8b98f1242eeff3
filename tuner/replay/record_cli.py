"""The command line of the recorder: `python -m tuner record --shape B,S,H,O --out FILE`."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from codegen.config import Config
from codegen.problem import Problem
from codegen.render import render
from tuner.arguments import FAILED, OK, Parser, parse_names, run_recorded, terminated_as_interrupted
from tuner.asked import add_options, request
from tuner.candidates import Space, survey
from tuner.choose import open_executor
from tuner.errors import DeviceLost, InputError
from tuner.evaluate import Material
from tuner.executors import Executor
from tuner.prebuild import Builders
from tuner.provenance import now, version
from tuner.replay.recorded import Origin, Recorded, Slice, load
from tuner.replay.recorder import Progress, Recorder
from tuner.request import Request
from tuner.store import Store
from tuner.toolchain import find_nvcc

SAY_EVERY_S = 5.0

_DIGESTED = 64
"""Configs, at even distances in the space, by whose sources a later session sees whether the templates are the same."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line, given what follows `record`, and returns the exit status.

    0: the whole space is recorded, its fastest timed again. 1: not yet, or something is missing. 2: the arguments make no sense.
    130: interrupted by Ctrl-C. What is recorded so far is in the file in any case, and the same command goes on from there.
    """
    def record(options: argparse.Namespace, command: str) -> int:
        try:
            return _record(options, command)
        except DeviceLost as error:
            print(f"record: {error}; run the same command again to go on", file=sys.stderr)
            return FAILED

    return run_recorded(_parser(), record, arguments, "interrupted; run the same command again to go on")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="record", allow_abbrev=False, description=(
        "Times every valid config of a problem on the GPU, into one file on which searches are replayed. Kernels pass a small "
        "exact probe and are not validated any further. A file that is there already is gone on with."))
    add_options(parser)
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="where to record, such as 4x4x8x16.json.xz")
    parser.add_argument("--first", type=parse_names, default=(), metavar="A,B", help="variants to record before all others")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="processes that compile (default: one for each CPU)")
    parser.add_argument("--eps", type=float, default=1e-5, help="eps of the LayerNorm (default 1e-5)")
    parser.add_argument("--seed", type=int, default=0, help="of the data (default 0)")
    return parser


def _record(options: argparse.Namespace, command: str) -> int:
    began = time.monotonic()
    asked = request(options, command, options.eps, options.seed)
    if options.jobs < 1:
        raise InputError("there must be one process at least")
    store = Store()
    with closing(open_executor("cuda", store=store)) as executor:
        space = survey(asked.problem(), executor.limits, asked.variants)
        if unknown := [name for name in options.first if name not in space.variants]:
            raise InputError(f"--first: {unknown[0]!r} is no variant of this space; choose from {', '.join(space.variants)}")
        recorded = _begun(_origin(asked, space, executor), space, options.out)
        recorded.slices.append(Slice(now(), version(), command))
        material = Material(space.problem, eps=asked.eps, seed=asked.seed, measures=True)
        ticker = _Ticker(began)

        def out_of_time(share: float) -> bool:
            return options.timeout is not None and time.monotonic() >= began + share * options.timeout

        with Builders(space.problem, space.limits.arch, store, options.jobs) as builders, terminated_as_interrupted():
            complete = Recorder(recorded, space, options.first, executor, builders, material, options.out, out_of_time,
                                ticker.show).run()
    print(_summary(recorded, complete), flush=True)
    return OK if complete else FAILED


def _origin(asked: Request, space: Space, executor: Executor) -> Origin:
    problem = space.problem
    some = space.valid[::max(1, len(space.valid) // _DIGESTED)]
    return Origin(
        str(asked.shape), problem.dtype, problem.param_dtype, problem.accuracy, problem.wants_key, problem.deterministic,
        float(asked.eps), asked.seed, space.variants, executor.device, find_nvcc(space.limits.arch).label,
        {str(config): _digest(problem, config) for config in some}, space.limits)


def _digest(problem: Problem, config: Config) -> str:
    return hashlib.sha256(render(problem, config).text.encode()).hexdigest()[:16]


def _begun(origin: Origin, space: Space, path: Path) -> Recorded:
    """What the file holds, or nothing yet. The space may have grown since, by variants or by values of their parameters.

    Raises:
        InputError: it holds another space.
    """
    sizes = Counter(config.variant for config in space.valid)
    if not path.exists():
        return Recorded(origin, sizes)
    recorded = load(path)
    if differs := recorded.origin.differs(origin) or _changed(recorded, space):
        raise InputError(f"{path} holds a space whose {differs} differs; name another file, or remove this one")
    return replace(recorded, origin=replace(origin, limits=recorded.origin.limits), sizes=sizes)


def _changed(recorded: Recorded, space: Space) -> str | None:
    """What has become of the configs of a recording."""
    sources, valid = recorded.origin.sources, {str(config): config for config in space.valid}
    if set(sources) - set(valid) or set(recorded.results) - set(space.valid):
        return "configs"
    return "sources" if any(_digest(space.problem, valid[config]) != digest for config, digest in sources.items()) else None


@dataclass(slots=True)
class _Ticker:
    """A line of progress now and then.

    Attributes:
        began: when the session did.
    """

    began: float
    _said: float = field(default_factory=time.monotonic)

    def show(self, progress: Progress) -> None:
        """Says how far it is, unless it did so a moment ago."""
        at = time.monotonic()
        if at < self._said + SAY_EVERY_S and progress.done < progress.total:
            return
        self._said = at
        best = "nothing timed yet" if progress.best is None else f"best {progress.best[1]:.4g} us {progress.best[0].variant}"
        print(f"{progress.stage}: {progress.done} of {progress.total}, {at - self.began:.0f} s; {best}", flush=True)


def _summary(recorded: Recorded, complete: bool) -> str:
    counts = Counter(result.status.value for result in recorded.results.values())
    what = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    best = min(recorded.times.items(), key=lambda entry: entry[1], default=None)
    fastest = "" if best is None else f"; the fastest takes {best[1]:.4g} us: {best[0]}"
    state = "complete" if complete else f"{recorded.extent()} so far"
    return f"recorded {recorded.origin.shape}, {state}: {what}{fastest}"

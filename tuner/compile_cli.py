"""The command line that compiles ahead: `python -m tuner compile --shape B,S,H,O`, on a machine that needs no GPU."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence

from codegen.config import Config
from codegen.limits import TARGETS, Limits, target
from tuner.arguments import FAILED, OK, Parser, run_recorded, terminated_as_interrupted
from tuner.asked import add_options, request
from tuner.candidates import survey
from tuner.errors import InputError, NoValidKernel
from tuner.evaluate import too_large
from tuner.guess import longest, rank
from tuner.outcome import spills
from tuner.prebuild import Builders, Built, built
from tuner.records import Record, Status
from tuner.store import Store
from tuner.toolchain import find_nvcc

SAY_EVERY_S = 5.0
"""How often it says how far it is."""

_GLANCE_S = 0.5


def main(arguments: Sequence[str]) -> int:
    """Runs the command line, given what follows `compile`, and returns the exit status.

    0: all is compiled. 1: not yet, or there is no compiler. 2: the arguments make no sense. 130: interrupted by Ctrl-C. What is
    compiled so far stays in the store in any case.
    """
    return run_recorded(_parser(), _compile, arguments, "interrupted; run the same command again to go on")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="compile", allow_abbrev=False, description=(
        "Compiles the kernels of a problem into the store, the fastest predicted first, without a GPU. A machine that has the "
        "same nvcc and is given the store (LNL_STORE) compiles none of them again."))
    add_options(parser)
    parser.add_argument("--target", default="sm_90", metavar="ARCH",
                        help=f"what to compile for: {', '.join(TARGETS)} (default sm_90)")
    parser.add_argument("--best", type=int, metavar="N", help="only the N that are predicted to be fastest (default: all)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="processes (default: one for each CPU)")
    return parser


def _compile(options: argparse.Namespace, command: str) -> int:
    began = time.monotonic()
    asked = request(options, command)
    if options.jobs < 1 or (options.best is not None and options.best < 1):
        raise InputError("there must be one process and one kernel at least")
    limits = target(options.target)
    nvcc = find_nvcc(limits.arch)
    store = Store()
    space = survey(asked.problem(), limits, asked.variants)
    predicted = rank(space)
    chosen = [config for config, time_us in predicted.items() if time_us <= longest(predicted)][:options.best]
    if not chosen:
        raise NoValidKernel(f"no kernel can compute rows of {space.problem.hidden} and {space.problem.out} values there")
    counts: Counter[str] = Counter()
    said = began
    with Builders(space.problem, limits.arch, store, options.jobs) as builders, terminated_as_interrupted():
        for found in built(builders, chosen, _GLANCE_S):
            at = time.monotonic()
            if found is not None:
                counts[_fate(*found, limits)] += 1
            if options.timeout is not None and at >= began + options.timeout:
                break
            if at >= said + SAY_EVERY_S:
                said = at
                print(f"{counts.total()} of {len(chosen)}, {at - began:.0f} s", flush=True)
    what = ", ".join(f"{count} {fate}" for fate, count in counts.most_common())
    print(f"{counts.total()} of {len(chosen)} compiled for {limits.arch} by {nvcc.label} into {store.root}: {what or 'none'}")
    return OK if counts.total() == len(chosen) else FAILED


def _fate(config: Config, done: Built, limits: Limits) -> str:
    """What a tuning run will make of it before it runs."""
    if done.failure is not None:
        return "refused by the compiler"
    if too_large(done.source.plan, done.resources, limits) is not None:
        return "too large for the GPU"
    return "short of registers" if spills(Record(config, Status.OK, resources=done.resources)) else "ready to run"

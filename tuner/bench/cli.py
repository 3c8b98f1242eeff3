"""The command line of the benchmark: `python -m tuner bench`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

from rich.console import Console

from codegen.dtypes import ACCURACIES, DTYPES, OWN_CLASS, check_accuracy, check_dtypes
from tuner.arguments import FAILED, OK, Parser, parse_names, run_recorded
from tuner.bench.arena import Arena, TorchArena
from tuner.bench.floors import RatedExecutor, Rates
from tuner.bench.ours import Tuning
from tuner.bench.peers import PEERS
from tuner.bench.report import incomplete, row_text
from tuner.bench.results import Case, Setting
from tuner.bench.run import Bench, Options
from tuner.bench.shapes import NAMED, NamedShape, parse_shapes
from tuner.bench.sheet import Sheet, check_folder
from tuner.bench.torch_gpu import Torch, open_torch
from tuner.choose import open_executor
from tuner.console import results_console
from tuner.errors import InputError, ToolchainError
from tuner.known import reports_folder
from tuner.provenance import now, version
from tuner.versions import versions

SAMPLES = 20


def main(arguments: Sequence[str]) -> int:
    """Runs the command line, given what follows `bench`, and returns the exit status.

    0: every row has a time of our kernel. 1: one has none, or there is no GPU. 2: the arguments make no sense. 130: interrupted
    by Ctrl-C; the rows that were finished are kept.
    """
    return run_recorded(_parser(), _bench, arguments, "interrupted; the rows that were finished are written")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="bench", allow_abbrev=False, description=(
        "Times tuned kernels beside what PyTorch offers, in one process on the GPU, and writes bench.md and bench.json."))
    parser.add_argument("--shapes", action="append", metavar="A,B|B,S,H,O|FILE",
                        help=f"some of {', '.join(NAMED)} (default: all), or sizes such as 8,128,256,1024, or a file of lines "
                             "such as: mine 8,128,256,1024; several of these with ; between them, or in several such options")
    parser.add_argument("--dtypes", type=parse_names, default=("float32",), metavar="A,B",
                        help=f"data types of all tensors, of {', '.join(DTYPES)} (default float32)")
    parser.add_argument("--accuracy", type=parse_names, metavar="A,B",
                        help=f"classes for float32 data, of {', '.join(ACCURACIES)} (default fp32); other data has its own")
    parser.add_argument("--peers", default=",".join(PEERS), metavar="A,B|none",
                        help=f"what to compare with, of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--tune", action="store_true", help="tune first also where an earlier run's kernel is known")
    parser.add_argument("--trials", type=int, metavar="N", help="most candidates where a case is tuned")
    parser.add_argument("--tune-seconds", type=float, metavar="S", help="where a case is tuned, end that after about so long")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N",
                        help=f"times in each of two measurements (default {SAMPLES}); long calls get fewer")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the search (default 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default reports/<device>)")
    parser.add_argument("--resume", action="store_true",
                        help="keep the rows that are there, of the same GPU and revision, and measure those that are missing")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _bench(options: argparse.Namespace, command: str) -> int:
    seconds = options.tune_seconds
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        raise InputError(f"--tune-seconds must be more than 0 and finite, not {seconds:g}")
    tuning = Tuning(options.tune, options.trials, seconds, options.seed)
    if options.samples < 1:
        raise InputError(f"the number of samples must be at least 1, not {options.samples}")
    chosen = Options(_peers(options.peers), options.samples, tuning)
    cases = _cases(parse_shapes(options.shapes), options.dtypes, options.accuracy)
    for case in cases:
        tuning.request(case).problem()
    with closing(open_gpu()) as executor:
        folder = options.out or reports_folder() / executor.slug
        check_folder(folder)
        return _measure(executor, cases, chosen, folder, options.resume, command)


def open_gpu() -> RatedExecutor:
    """The GPU of this machine.

    Raises:
        ToolchainError: there is none, or no compiler for it.
    """
    try:
        return cast(RatedExecutor, open_executor("cuda"))
    except ToolchainError as error:
        raise ToolchainError(f"{error}; without a GPU there is nothing to measure") from error


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(parse_names(text)))
    if names == ("none",):
        return ()
    if not names:
        raise InputError(f"no peer is left; choose from {', '.join(PEERS)}, or none")
    if "none" in names:
        raise InputError(f"none stands alone, not beside other peers as in {text!r}")
    if unknown := [name for name in names if name not in PEERS]:
        raise InputError(f"there is no peer {unknown[0]!r}; choose from {', '.join(PEERS)}, or none")
    return names


def _cases(shapes: Sequence[NamedShape], dtypes: Sequence[str], accuracies: Sequence[str] | None) -> list[Case]:
    """Every shape at every data type and class, the shapes of one of those together."""
    if not dtypes:
        raise InputError(f"no data type is left; choose from {', '.join(DTYPES)}, or leave --dtypes out")
    if accuracies is not None and not accuracies:
        raise InputError(f"no accuracy class is left; choose from {', '.join(ACCURACIES)}, or leave --accuracy out")
    if accuracies and "float32" not in dtypes:
        raise InputError("--accuracy is for float32 data, which --dtypes leaves out; other data has its own class")
    settings = []
    for dtype in dict.fromkeys(dtypes):
        check_dtypes(dtype, dtype)
        for accuracy in dict.fromkeys(accuracies or (OWN_CLASS[dtype],)) if dtype == "float32" else (OWN_CLASS[dtype],):
            check_accuracy(accuracy, dtype)
            settings.append((dtype, accuracy))
    return [Case.of(named, dtype, accuracy) for dtype, accuracy in settings for named in shapes]


def _measure(executor: RatedExecutor, cases: Sequence[Case], options: Options, folder: Path, resume: bool,
             command: str) -> int:
    torch, absent = _torch(options)
    arena: Arena | None = None if torch is None else TorchArena(torch, executor.limits.l2_bytes)
    rates = Rates.measure(executor, None if torch is None else torch.matrix_tflops)
    setting = Setting(
        command, now(), version(), executor.device, versions(executor.limits.arch, {} if torch is None else torch.versions),
        options.tuning.seed, options.samples, options.peers, rates, absent, tuple(case.title for case in cases))
    console, errors = results_console(), Console(stderr=True)
    sheet = Sheet(folder, setting, cases, resume)
    missing = sheet.missing
    if len(missing) < len(cases):
        errors.print(f"bench: of {len(cases)} rows {len(cases) - len(missing)} are there already", markup=False, soft_wrap=True)
    if absent is not None:
        errors.print(f"bench: no peers: {absent}", markup=False, soft_wrap=True)
    with errors.status("measuring") as status:
        for row in Bench(executor, arena, rates, options, status.update).run(missing):
            sheet.add(row)
            console.print(row_text(row), markup=False, highlight=False, soft_wrap=True)
    if missing:
        console.print("written: " + ", ".join(str(path) for path in sheet.paths), markup=False, soft_wrap=True)
    complaint = incomplete(sheet.rows)
    if complaint is not None:
        print(f"bench: {complaint}", file=sys.stderr)
    return OK if complaint is None else FAILED


def _torch(options: Options) -> tuple[Torch | None, str | None]:
    """PyTorch, or why there are no peers; it also gives the matrix rate and the errors on the timed data."""
    try:
        return open_torch(), None
    except ToolchainError as error:
        return None, str(error) if options.peers else None

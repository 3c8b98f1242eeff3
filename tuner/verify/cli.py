"""The command line of the check: `python -m tuner verify`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing

from rich.console import Console
from rich.table import Table
from rich.text import Text

from codegen.dtypes import ACCURACIES, DTYPES, dtype_words
from codegen.problem import Problem, Shape
from tuner.arguments import FAILED, OK, Parser, as_config, exit_status
from tuner.choose import EXECUTORS, open_executor
from tuner.console import results_console
from tuner.errors import CompileError, InputError, LaunchError, ToolchainError
from tuner.executors.cuda_context import why_unavailable
from tuner.inputs import as_eps
from tuner.verify.check import Outcome, Request, check
from tuner.verify.oracle import find_oracle

SHAPE = "4,4,8,16"

DEVICES = {"CPU": "host", "GPU": "cuda"}
"""What stands in the summary, and the executor that runs there."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line, given what follows `verify`, and returns the exit status.

    0: everything that ran is right. 1: something is not, or a device that is there could not be checked. 2: the arguments
    make no sense. 130: interrupted by Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    return exit_status("verify", lambda: _verify(options), options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="verify", allow_abbrev=False, description=(
        "Checks y = Linear(LayerNorm(x)) and all five gradients on the CPU and on the GPU, with random data and random incoming "
        "gradients, against PyTorch's autograd in float64, or NumPy where PyTorch is not installed."))
    parser.add_argument("--shape", default=SHAPE, metavar="B,S,H,O",
                        help=f"batch, sequence, hidden and output sizes (default {SHAPE}); on the CPU at fewer rows where they "
                             "would take long")
    parser.add_argument("--executor", choices=EXECUTORS, default="auto",
                        help="host: only the CPU; cuda: only the GPU; auto: both, the GPU where there is one (default)")
    parser.add_argument("--dtype", default="float32", help=f"data type of dy, x and dx: {', '.join(DTYPES)} (default float32)")
    parser.add_argument("--param-dtype", default="", metavar="DTYPE",
                        help="data type of gamma, beta, w and their gradients: that of --dtype (default); float32 goes with all")
    parser.add_argument("--accuracy", default="", metavar="CLASS",
                        help=f"what the gradients must meet: {', '.join(ACCURACIES)} (default: the class of --dtype)")
    parser.add_argument("--config", help="the kernel, such as row_warp:warps=4 (default: the one that tuner.backward takes)")
    parser.add_argument("--eps", type=float, default=1e-5, help="eps of the LayerNorm (default 1e-5)")
    parser.add_argument("--seed", type=int, default=0, help="of the data (default 0)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _verify(options: argparse.Namespace) -> int:
    shape = Shape.parse(options.shape)
    if shape.rows < 1:
        raise InputError(f"there is nothing to verify in a shape without rows, as {shape} is")
    if options.seed < 0:
        raise InputError(f"the seed cannot be negative, as {options.seed} is")
    problem = Problem.of(shape, dtype=options.dtype, param_dtype=options.param_dtype, accuracy=options.accuracy)
    request = Request(problem, as_eps(options.eps), options.seed,
                      None if options.config is None else as_config(options.config))
    console, oracle = results_console(), find_oracle()
    console.print(f"y = Linear(LayerNorm(x)), B,S,H,O = {shape}, {dtype_words(problem.dtype, problem.param_dtype)}: both passes "
                  f"on random data, compared with {oracle.name}", markup=False, highlight=False, soft_wrap=True)
    summary: dict[str, str] = {}
    ran: list[bool] = []
    for label, name in DEVICES.items():
        if options.executor not in ("auto", name):
            continue
        absent = why_unavailable() if name == "cuda" else None
        if absent is not None and options.executor == "auto":
            summary[label] = f"skipped, as {absent}"
            continue
        try:
            with closing(open_executor(name)) as executor:
                outcomes = check(request, executor, oracle)
        except (CompileError, LaunchError, ToolchainError) as error:
            ran.append(False)
            summary[label] = f"{_mark(console, False)} could not be checked: {error}"
            continue
        for outcome in outcomes:
            _show(console, label, outcome, problem)
        ran.append(all(outcome.ok for outcome in outcomes))
        summary[label] = _verdict(console, ran[-1])
    console.print("Summary")
    for label, text in summary.items():
        console.print(f"  {label}: {text}", markup=False, highlight=False, soft_wrap=True)
    return OK if ran and all(ran) else FAILED


def _show(console: Console, label: str, outcome: Outcome, problem: Problem) -> None:
    rows = "" if outcome.rows == problem.rows else f", {outcome.rows} of {problem.rows} rows"
    table = Table(title=Text(f"{label}: {outcome.device}{rows}"), title_justify="left")
    table.add_column("quantity", no_wrap=True)
    for name in ("max difference", "error", "allowed", "of bound"):
        table.add_column(name, justify="right")
    table.add_column("")
    for figure in outcome.figures:
        table.add_row(figure.name, f"{figure.difference:.2e}", f"{figure.error:.2e}",
                      "" if figure.limit is None else f"{figure.limit:g}", f"{figure.ratio:.3f}", _mark(console, figure.ok))
    console.print(table)
    for figure in outcome.figures:
        if figure.fault is not None:
            console.print(f"  {figure.name}: {figure.fault}", markup=False, highlight=False, soft_wrap=True)
    lines = (f"  kernel: {outcome.kernel}", f"  forward by {outcome.forward_by}",
             f"  Forward:   {_verdict(console, outcome.forward_ok)}", f"  Gradients: {_verdict(console, outcome.gradients_ok)}",
             f"  Overall:   {_verdict(console, outcome.ok)}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _mark(console: Console, ok: bool) -> str:
    if console.options.ascii_only:
        return "ok" if ok else "NO"
    return "✓" if ok else "✗"


def _verdict(console: Console, ok: bool) -> str:
    return f"{_mark(console, ok)} {'correct' if ok else 'WRONG'}"

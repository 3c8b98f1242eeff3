"""The variant row_thread."""

from __future__ import annotations

from codegen import reduction
from codegen.expr import ROWS, ceil_div
from codegen.limits import Limits
from codegen.plan import Launch, Plan
from codegen.problem import Problem
from codegen.variant import Params, Variant, number

ROW_CHAIN = 256
"""Values of one row that a single thread sums in one float32 chain, near the square root of the longest rows."""


def _plan(problem: Problem, params: Params) -> Plan:
    threads, waiting = number(params, "threads"), reduction.waiting_rows(problem)
    if params["reduction"] == "atomic":
        blocks = ceil_div(ROWS, threads)
        return reduction.with_reduction(problem, params, Launch("row_thread", blocks, threads), waiting, blocks)
    return reduction.row_kernel_plan(problem, params, "row_thread", threads, threads, 8 * threads, waiting)


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    if params["reduction"] == "atomic":  # a thread for every row, whatever their number
        if number(params, "splits") != 1:
            return "the atomic kernel has one thread for every row; it takes splits=1"
        params = {**params, "splits": 2}
    return reduction.mismatched(problem, params) or reduction.too_much_workspace(problem, _plan(problem, params))


def _inexact(problem: Problem, params: Params) -> str | None:
    # Atomic additions make one chain of all the rows; the other kernels sum in two levels.
    return reduction.long_chain(problem, 1) if params["reduction"] == "atomic" else None


def _wasteful(problem: Problem, params: Params) -> str | None:
    if params["reduction"] == "atomic":
        return None
    return reduction.wasted(problem, params, number(params, "threads"))


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    threads = number(params, "threads")
    own = {"THREADS": threads, "ROW_CHAIN": ROW_CHAIN, "OUT_CHAIN": reduction.OUT_CHAIN}
    if params["reduction"] == "atomic":
        return own
    return {**own, "IDENTITY": 1, **reduction.columns(problem, threads)}


VARIANT = Variant(
    name="row_thread",
    summary="row_thread: one thread per row, the readable definition; with atomic sums, the origin of all the others.",
    choices={"threads": (32, 64, 128, 256), "splits": reduction.SPLITS,
             "reduction": ("atomic", "two_pass", "single_block", "column_blocks")},
    defaults={"threads": 128, "splits": 1, "reduction": "atomic"},
    refuses=_refuses, inexact=_inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
)

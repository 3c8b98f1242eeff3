"""The variant row_warp."""

from __future__ import annotations

from codegen import reduction
from codegen.limits import Limits
from codegen.plan import Plan
from codegen.problem import Problem
from codegen.variant import Params, Variant, number


def _chunks(problem: Problem, params: Params) -> tuple[int, int]:
    """(vectors a lane holds of each row, chunks a row goes in)."""
    vector, rows = number(params, "vector"), number(params, "rows")
    whole = -(-problem.hidden // (32 * vector))
    held = min(whole, max(1, 32 // (vector * rows)))
    return held, -(-whole // held)


def _plan(problem: Problem, params: Params) -> Plan:
    warps, rows = number(params, "warps"), number(params, "rows")
    held, chunks = _chunks(problem, params)
    waiting = reduction.waiting_rows(problem) if chunks > 1 else ()
    direct = 4 * warps * 32 * held * number(params, "vector") if params["grads"] == "direct" else 0
    shared = max(8 * 32 * warps, direct)
    return reduction.row_kernel_plan(problem, params, "row_warp", 32 * warps, warps * rows, shared, waiting)


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    if reason := reduction.mismatched(problem, params):
        return reason
    vector = number(params, "vector")
    if problem.hidden % vector:
        return f"vector={vector} does not divide rows of {problem.hidden} values"
    if vector > 1 and problem.hidden <= 32 * vector // 2:
        return f"vector={vector} leaves more than half of the lanes without a column of {problem.hidden}"
    _, chunks = _chunks(problem, params)
    if params["grads"] == "direct":
        if chunks > 1:
            return f"grads=direct sums over rows in registers, and rows of {problem.hidden} values do not fit"
        if params["reduction"] == "column_blocks":
            return "reduction=column_blocks sums the columns of all rows at once; it takes grads=identity"
    return reduction.too_much_workspace(problem, _plan(problem, params))


def _inexact(problem: Problem, params: Params) -> str | None:
    if params["grads"] == "identity":  # sums in two levels
        return None
    return reduction.long_chain(problem, number(params, "splits") * number(params, "warps"))


def _wasteful(problem: Problem, params: Params) -> str | None:
    return reduction.wasted(problem, params, number(params, "warps") * number(params, "rows"))


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    warps = number(params, "warps")
    held, chunks = _chunks(problem, params)
    return {"WARPS": warps, "THREADS": 32 * warps, "ROWS": number(params, "rows"), "VECTOR": number(params, "vector"),
            "CHUNK_VECTORS": held, "CHUNKS": chunks, "OUT_CHAIN": reduction.OUT_CHAIN,
            "IDENTITY": int(params["grads"] == "identity"), **reduction.columns(problem, 32 * warps)}


VARIANT = Variant(
    name="row_warp",
    summary="row_warp: one warp per row instead of one thread: coalesced wide loads, and row sums by shuffles.",
    choices={"warps": (1, 2, 4, 8), "rows": (1, 2, 4), "vector": (1, 2, 4), "grads": ("direct", "identity"),
             "splits": reduction.SPLITS, "reduction": ("atomic", "two_pass", "single_block", "column_blocks")},
    defaults={"warps": 4, "rows": 1, "vector": 1, "grads": "identity", "splits": 64, "reduction": "two_pass"},
    refuses=_refuses, inexact=_inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
)

"""The variant weight_stream."""

from __future__ import annotations

from codegen import reduction
from codegen.expr import ROWS, ceil_div, const, maximum, minimum
from codegen.limits import Limits
from codegen.plan import Buffer, Launch, Plan
from codegen.problem import Problem
from codegen.variant import Params, Variant, number

_MANY_GROUPS = 4
"""Groups of rows after which w has been read so often that kernels which work by rows must be better."""


def _needs_dn(problem: Problem) -> bool:
    return bool(problem.wants & {"dx", "dgamma", "dbeta"})


def _blocks(problem: Problem, params: Params) -> tuple[int, int, int]:
    """(strips of columns, chunks of rows of w, blocks of stream_sums)."""
    threads, vector = number(params, "threads"), number(params, "vector")
    return (-(-problem.hidden // (threads * vector)), -(-problem.out // number(params, "outs")),
            -(-problem.hidden // (32 * vector)))


def _plan(problem: Problem, params: Params) -> Plan:
    threads, vector = number(params, "threads"), number(params, "vector")
    warps = threads // 32
    strips, chunks, sum_blocks = _blocks(problem, params)
    sums = 4 * 2 * warps
    staged = 4 * number(params, "rows") * number(params, "outs")
    launches = [Launch("weight_stream", const(strips * chunks), threads, sums + staged)]
    workspace = [Buffer(name, ROWS) for name in ("row_mean", "row_rest", "row_rstd")]
    if params["statistics"] == "launch" and problem.wants != {"db"}:
        launches.insert(0, Launch("stream_statistics", ROWS, threads, sums))
    if _needs_dn(problem):
        workspace.append(Buffer("partial_dn", ROWS * (chunks * problem.hidden)))
        launches.append(Launch("stream_sums", const(sum_blocks), threads, 4 * threads * vector))
    else:
        workspace.append(Buffer("partial_dn", const(0)))
    if problem.param_dtype != "float32" and "dw" in problem.wants:
        more_rows = minimum(1, maximum(0, ceil_div(ROWS, number(params, "rows")) + -1))
        workspace.append(Buffer("dw_sums", more_rows * (problem.out * problem.hidden)))
    wants_dx = "dx" in problem.wants
    workspace.append(Buffer("dn", ROWS * (problem.hidden * wants_dx)))
    workspace.append(Buffer("row_sums", ROWS * (2 * sum_blocks * wants_dx)))
    if wants_dx:
        launches.append(Launch("stream_dx", ROWS * strips, threads, sums))
    return Plan(tuple(launches), tuple(workspace))


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    threads, vector = number(params, "threads"), number(params, "vector")
    if problem.hidden % vector:
        return f"vector={vector} does not divide rows of {problem.hidden} values"
    if threads > 64 and problem.hidden <= threads * vector // 2:
        return f"threads={threads} and vector={vector} leave more than half of the threads without a column of {problem.hidden}"
    if number(params, "outs") < number(params, "unroll"):
        return "a block takes fewer rows of w than it would load at once"
    if (needed := number(params, "rows") + number(params, "unroll")) * vector > 80:
        return f"holds {needed} vectors of {vector} values a thread; take fewer rows or a smaller unroll"
    return reduction.too_much_workspace(problem, _plan(problem, params))


def _inexact(problem: Problem, params: Params) -> str | None:
    return reduction.long_chain(problem, 1)


def _wasteful(problem: Problem, params: Params) -> str | None:
    rows = number(params, "rows")
    if problem.rows > _MANY_GROUPS * rows:
        return f"reads w once for every {rows} of {problem.rows} rows"
    if rows > 1 and problem.rows <= rows // 2:
        return f"rows={rows} leaves more than half of the work without a row of {problem.rows}"
    if number(params, "outs") >= 2 * problem.out and number(params, "outs") > 8:
        return f"outs={params['outs']} is more than w has"
    return None


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    return {"THREADS": number(params, "threads"), "VECTOR": number(params, "vector"), "ROWS": number(params, "rows"),
            "OUTS": number(params, "outs"), "UNROLL": number(params, "unroll"), "CHAIN": reduction.CHAIN}


VARIANT = Variant(
    name="weight_stream",
    summary="weight_stream: blocks own pieces of w instead of rows: for few rows, where w and dw are all there is to move.",
    choices={"threads": (64, 128, 256, 512), "vector": (1, 2, 4), "rows": (1, 2, 4, 8), "outs": (4, 8, 16, 32, 64, 128),
             "unroll": (1, 2, 4, 8, 16), "statistics": ("block", "launch"), "reduction": ("two_pass",)},
    defaults={"threads": 256, "vector": 1, "rows": 4, "outs": 32, "unroll": 4, "statistics": "block", "reduction": "two_pass"},
    refuses=_refuses, inexact=_inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
)

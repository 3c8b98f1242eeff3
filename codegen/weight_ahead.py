"""The variant weight_ahead."""

from __future__ import annotations

from codegen import overlap, reduction
from codegen.dtypes import ITEMSIZE
from codegen.expr import ROWS, ceil_div, const, maximum, minimum
from codegen.limits import Limits
from codegen.plan import Buffer, Launch, Plan
from codegen.problem import Problem
from codegen.variant import Params, Variant, number, round_up, too_much_shared

_OTHER_REGISTERS = 56
"""Registers of a thread beside its vectors, at most: addresses, statistics, sums of dy; what nvcc 13.0 used for sm_90a."""
_SM_REGISTERS = 65536
"""Of an SM of every GPU that is supported."""


def _vector(problem: Problem) -> int:
    """Neighbouring columns in one access to w: 16 bytes of them, or as many as a power of two divides rows into."""
    most = 16 // ITEMSIZE[problem.param_dtype]
    return min(most, problem.hidden & -problem.hidden)


def _vector_bytes(problem: Problem) -> int:
    """Bytes such a vector takes in a register or in shared memory."""
    return max(4, _vector(problem) * ITEMSIZE[problem.param_dtype])


def _needs_dn(problem: Problem) -> bool:
    return bool(problem.wants & {"dx", "dgamma", "dbeta"})


def _blocks(problem: Problem, params: Params) -> tuple[int, int]:
    """(strips of columns, chunks of rows of w)."""
    return (-(-problem.hidden // (number(params, "across") * _vector(problem))), -(-problem.out // number(params, "outs")))


def _finish_warps(params: Params) -> int:
    """Warps of ahead_finish, a multiple of the rows it takes at once."""
    return 16 if number(params, "rows") <= 4 else 32


def _registers(problem: Problem, params: Params) -> int:
    """Registers of a thread, at most: xhat*gamma + beta, dn, vectors of w that wait there, and one of w and of dw at hand."""
    vector, words, unroll = _vector(problem), _vector_bytes(problem) // 4, number(params, "unroll")
    waiting = words + unroll if params["waiting"] == "shared" else words * unroll  # or one, and addresses
    return 2 * number(params, "rows") * vector + waiting + 2 * vector + _OTHER_REGISTERS


def _plan(problem: Problem, params: Params) -> Plan:
    threads, rows, outs = (number(params, name) for name in ("threads", "rows", "outs"))
    strips, chunks = _blocks(problem, params)
    ring = number(params, "unroll") * threads * _vector_bytes(problem) // 4 if params["waiting"] == "shared" else 0
    floats = ring + threads * _vector(problem) + rows * (outs + 5) + 2 * rows * (threads // 32)
    shared = round_up(4 * floats, 16)  # where vectors of floats lie in it
    launches = [Launch("weight_ahead", const(strips * chunks), threads, shared)]
    workspace = [Buffer(name, ROWS) for name in ("row_mean", "row_rest", "row_rstd")]
    wants_dn, wants_dx = _needs_dn(problem), "dx" in problem.wants
    if wants_dn:
        finish = 32 * _finish_warps(params)
        launches.append(Launch("ahead_finish", const(-(-problem.hidden // 32)), finish, 4 * finish))
    workspace.append(Buffer("partial_dn", ROWS * (chunks * problem.hidden * wants_dn)))
    workspace.append(Buffer("row_sums", ROWS * (2 * strips * chunks * wants_dx)))
    if problem.param_dtype != "float32" and "dw" in problem.wants:
        more_rows = minimum(1, maximum(0, ceil_div(ROWS, rows) + -1))
        workspace.append(Buffer("dw_sums", more_rows * (problem.out * problem.hidden)))
    return overlap.launched(Plan(tuple(launches), tuple(workspace)), params)


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    threads, across, outs, unroll = (number(params, name) for name in ("threads", "across", "outs", "unroll"))
    if across > threads:
        return f"a block of {threads} threads has none that lie {across} across"
    if across > 32 and problem.hidden <= across * _vector(problem) // 2:
        return f"across={across} leaves more than half of the threads without a column of {problem.hidden}"
    if outs * across // threads < unroll:
        return "a group takes fewer rows of w than it would load at once"
    if outs > threads:
        return "a block takes more rows of w than it has threads"
    if params["stores"] == "streaming" and _vector_bytes(problem) < 16:
        return f"stores=streaming takes 16 bytes at once; rows of {problem.hidden} values do not divide into so many"
    needed = _registers(problem, params)
    if needed > min(255, limits.registers_per_sm // threads):
        return f"may need {needed} registers a thread; take fewer rows, threads or a smaller unroll"
    plan = _plan(problem, params)
    return too_much_shared(plan.launches[0].shared_bytes, limits) or reduction.too_much_workspace(problem, plan)


def _inexact(problem: Problem, params: Params) -> str | None:
    return reduction.long_chain(problem, 1)


def _wasteful(problem: Problem, params: Params) -> str | None:
    rows = number(params, "rows")
    if problem.rows > rows:
        return f"is fast for {rows} rows at most, where there are {problem.rows}"
    if rows > 1 and problem.rows <= rows // 2:
        return f"rows={rows} leaves more than half of the work without a row of {problem.rows}"
    if number(params, "outs") >= 2 * problem.out and number(params, "outs") > 8:
        return f"outs={params['outs']} is more than w has"
    return overlap.nothing_overlaps(problem, params, _plan)


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    named = {name.upper(): number(params, name) for name in ("threads", "across", "rows", "outs", "unroll")}
    blocks = max(1, _SM_REGISTERS // (number(params, "threads") * _registers(problem, params)))
    return {**named, "VECTOR": _vector(problem), "FINISH_WARPS": _finish_warps(params), "BLOCKS": blocks}


VARIANT = Variant(
    name="weight_ahead",
    summary="weight_ahead: as weight_stream, but loads of w run ahead of all else, 16 bytes each, and one launch finishes.",
    choices={"threads": (128, 256, 512), "across": (32, 64, 128, 256, 512), "rows": (1, 2, 4, 8, 16),
             "outs": (8, 16, 32, 64, 128), "unroll": (4, 8, 16), "waiting": ("registers", "shared"),
             "stores": ("plain", "streaming"), "reduction": ("two_pass",), "launches": overlap.LAUNCHES},
    defaults={"threads": 256, "across": 64, "rows": 4, "outs": 32, "unroll": 4, "waiting": "registers", "stores": "plain",
              "reduction": "two_pass", "launches": "apart"},
    refuses=_refuses, inexact=_inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
    clashes=(overlap.CLASH,),
    meanings={"ROWS": "rows of x a block takes at once", "ACROSS": "threads along a strip of columns",
              "FINISH_WARPS": "warps in a block of ahead_finish"},
)

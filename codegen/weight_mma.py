"""The variant weight_mma."""

from __future__ import annotations

from codegen import overlap, reduction
from codegen.arithmetic import FINEST_CLASS, PLANES
from codegen.dtypes import CLASS_ERRORS
from codegen.expr import ROWS, const
from codegen.gemm_mma import wrong_arithmetic
from codegen.limits import Limits
from codegen.plan import Buffer, Launch, Plan
from codegen.problem import Problem
from codegen.variant import Clash, Params, Variant, number, power_of_two, too_much_shared

_WARP_COLUMNS = 32
"""Columns of w that a warp has, four neighbours a lane."""

_DN_PAD = 4
"""Floats between rows of dn in shared memory."""

_PLANES_PAD = 16
"""Bytes between rows of planes."""

_WORKING_REGISTERS = 40
"""What a thread needs beside its part of w and G and its rows of dy and x. What is allowed may still spill some 100 bytes; it is
then slower, and measured so."""

_FEW_ROWS = 512
"""Above so many rows the products take longer than w and dw take to move: kernels that work by tiles of both are better."""

_TURNS = 8
"""Tiles of rows that a block should have at most: each waits for its rows, and for four barriers."""

_LARGE = 1 << 15
"""Elements of w below which one launch that works by rows is over before three of these are."""

_PIECES = 132
"""Pieces of w that give each SM of an H200 one."""


def _needs(problem: Problem) -> tuple[bool, bool]:
    """Whether dn = dy @ w is wanted, and whether xhat is."""
    return "dx" in problem.wants, bool(problem.wants & {"dx", "dw", "dgamma"})


def is_scaled(problem: Problem, params: Params) -> bool:
    """Whether values are scaled before they are rounded: float32 reaches far beyond float16."""
    return problem.dtype == "float32" and str(params["arithmetic"]).startswith("fp16")


def _threads(params: Params) -> int:
    return 32 * (number(params, "columns") // _WARP_COLUMNS) * (number(params, "outs") // number(params, "warp_outs"))


def _pieces(problem: Problem, params: Params) -> tuple[int, int]:
    """(along the columns of w, along its rows)."""
    return -(-problem.hidden // number(params, "columns")), -(-problem.out // number(params, "outs"))


def _vector(problem: Problem) -> int:
    return 4 if problem.hidden % 4 == 0 else 2 if problem.hidden % 2 == 0 else 1


def _finish_warps(problem: Problem, params: Params) -> int:
    return min(8, power_of_two(_pieces(problem, params)[1]))


def _shared_bytes(problem: Problem, params: Params) -> int:
    """Of the planes of dy and xhat, of the warps' shares of dn, dgamma and dbeta, and of what is found of dy's columns."""
    rows, outs, columns, threads = (*(number(params, name) for name in ("rows", "outs", "columns")), _threads(params))
    scaled, planes = is_scaled(problem, params), 2 * PLANES[str(params["arithmetic"])]
    warps_o = outs // number(params, "warp_outs")
    groups = min(threads // 32, rows * min(32, outs // 4) // 32)
    floats = warps_o * (rows * (columns + _DN_PAD) + 3 * columns) + (groups + 1) * outs * (1 + scaled)
    floats += rows * scaled
    if params["statistics"] == "block":
        floats += 4 * rows
    return rows * ((1 + scaled) * (outs * planes + _PLANES_PAD) + columns * planes + _PLANES_PAD) + 4 * floats


def _plan(problem: Problem, params: Params) -> Plan:
    (strips, parts), threads, vector = _pieces(problem, params), _threads(params), _vector(problem)
    wants_dx, wants_x = _needs(problem)
    finish_warps, finish_strips = _finish_warps(problem, params), -(-problem.hidden // (32 * vector))
    launches = [Launch("weight_mma", const(strips * parts), threads, _shared_bytes(problem, params))]
    if params["statistics"] == "launch" and wants_x:
        launches.insert(0, Launch("weight_statistics", ROWS, threads, 4 * 2 * (threads // 32)))
    vectors = [name for name in ("dgamma", "dbeta") if name in problem.wants]
    if vectors or wants_dx:
        jobs = ROWS * int(wants_dx) + len(vectors)
        launches.append(Launch("weight_finish", jobs * finish_strips, 32 * finish_warps, 4 * finish_warps * (32 * vector + 2)))
    workspace = [Buffer(name, ROWS) for name in ("row_mean", "row_rest", "row_rstd")]
    workspace += [Buffer(f"{name}_parts", const(parts * problem.hidden)) for name in vectors]
    workspace.append(Buffer("dn_parts", ROWS * (parts * problem.hidden * wants_dx)))
    workspace.append(Buffer("row_sums", ROWS * (2 * strips * parts * wants_dx)))
    return overlap.launched(Plan(tuple(launches), tuple(workspace)), params)


def _wrong_warps(problem: Problem, params: Params, limits: Limits) -> str | None:
    if number(params, "outs") % number(params, "warp_outs"):
        return f"outs={params['outs']} is not shared out among warps of {params['warp_outs']} rows"
    if not 64 <= (threads := _threads(params)) <= 512:
        return f"a block of {threads} threads is too small or too large; take other values of outs, columns or warp_outs"
    blocks, most = number(params, "blocks"), 512 if number(params, "warp_outs") < 64 else 256
    if blocks > 1 and not most * 3 // 4 <= threads * blocks <= most:
        return f"{blocks} blocks of {threads} threads an SM leave too many registers unused, or give each thread too few"
    return None


def _too_large(problem: Problem, params: Params, limits: Limits) -> str | None:
    if reason := too_much_shared(_shared_bytes(problem, params), limits):
        return reason
    rows, outs, columns, warp_outs, blocks = (
        number(params, name) for name in ("rows", "outs", "columns", "warp_outs", "blocks"))
    if blocks * (_shared_bytes(problem, params) + limits.reserved_shared) > limits.shared_per_sm:
        return f"shared memory of {limits.name} does not hold {blocks} blocks an SM"
    registers = 2 * warp_outs + rows * (outs + columns) // _threads(params) + _WORKING_REGISTERS
    if registers > (available := min(255, limits.registers_per_sm // (_threads(params) * blocks))):
        return f"needs about {registers} registers a thread where {available} are there"
    return None


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    return reduction.too_much_workspace(problem, Plan((), _plan(problem, params).workspace))


def _inexact(problem: Problem, params: Params) -> str | None:
    arithmetic = str(params["arithmetic"])
    if problem.dtype == "float32" and CLASS_ERRORS[FINEST_CLASS[arithmetic]] > CLASS_ERRORS[problem.accuracy]:
        return f"{arithmetic} products are coarser than the accuracy class {problem.accuracy}"
    # A chain of G has one term for each tile of rows; without scales the tensor cores add up row by row.
    return reduction.long_chain(problem, number(params, "rows") if is_scaled(problem, params) else 1)


def _wasteful(problem: Problem, params: Params) -> str | None:
    if problem.rows > _FEW_ROWS:
        return f"{problem.rows} rows are no few; kernels that work by tiles of rows take less"
    if problem.hidden * problem.out < _LARGE:
        return f"{problem.out} by {problem.hidden} values of w are too few to share out in pieces"
    rows, outs, columns = (number(params, name) for name in ("rows", "outs", "columns"))
    arithmetic = str(params["arithmetic"])
    finer = CLASS_ERRORS[FINEST_CLASS[arithmetic]] < CLASS_ERRORS[problem.accuracy]
    if problem.dtype == "float32" and finer and arithmetic != "fp16":
        return f"arithmetic={arithmetic} does more than the accuracy class {problem.accuracy} asks for"
    if rows > 16 and problem.rows <= rows // 2:
        return f"rows={rows} leaves more than half of a tile without a row of {problem.rows}"
    if rows < 64 and problem.rows > _TURNS * rows:
        return f"rows={rows} takes {problem.rows} rows in more than {_TURNS} turns; take more at once"
    if (outs > 64 and outs >= 2 * problem.out) or (columns > 32 and columns >= 2 * problem.hidden):
        return f"pieces of {outs} by {columns} are mostly padding"
    strips, parts = _pieces(problem, params)
    if outs < 256 and problem.rows > 2 * outs:
        return f"the {parts} parts of dn are more than w is; take more rows of w at once"
    if strips * parts < _PIECES // 2:
        return f"{strips * parts} pieces of w leave most SMs without one"
    return overlap.nothing_overlaps(problem, params, _plan)


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    return {"THREADS": _threads(params), "VECTOR": _vector(problem), "TILE_ROWS": number(params, "rows"),
            "OUTS": number(params, "outs"), "COLUMNS": number(params, "columns"), "WARP_OUTS": number(params, "warp_outs"),
            "BLOCKS": number(params, "blocks"),
            "FINISH_WARPS": _finish_warps(problem, params)}


VARIANT = Variant(
    name="weight_mma",
    summary="weight_mma: as weight_stream, with tensor-core products: from 8 rows to some hundred.",
    choices={"arithmetic": ("fp16x3", "bf16x3", "fp16", "bf16"), "rows": (16, 32, 64), "outs": (64, 128, 256, 32),
             "columns": (64, 32, 128), "warp_outs": (32, 16, 64), "blocks": (1, 2, 3, 4, 6, 8),
             "statistics": ("launch", "block"), "reduction": ("two_pass",), "launches": overlap.LAUNCHES},
    defaults={"arithmetic": "fp16x3", "rows": 32, "outs": 128, "columns": 64, "warp_outs": 32, "blocks": 1,
              "statistics": "launch", "reduction": "two_pass", "launches": "apart"},
    refuses=_refuses, inexact=_inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
    clashes=(Clash(("arithmetic",), wrong_arithmetic), Clash(("outs", "columns", "warp_outs", "blocks"), _wrong_warps),
             Clash(("arithmetic", "rows", "outs", "columns", "warp_outs", "blocks", "statistics"), _too_large),
             overlap.CLASH),
    meanings={"COLUMNS": "columns of w a block takes", "WARP_OUTS": "rows of w a warp takes",
              "FINISH_WARPS": "warps that share out the parts of a sum in weight_finish"},
)

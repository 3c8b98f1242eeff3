"""What the kernels of gemm_mma cost (templates/gemm_mma.cu.j2 and its pieces). Counts follow the templates and are rough."""

from __future__ import annotations

import math

from codegen.arithmetic import PLANES, WHOLE, matrix_steps, value_bytes
from codegen.gemm_tiles import W_COLUMNS
from tuner.work.base import BARRIER, FMA, L2, MATRIX, SHARED, SHUFFLE, Kernels, Setting, Work, pipelined

_WAITING = 1.25
"""How much longer tensor cores take where the fragments of dy are made between the products. Measured on an H200, split=fragments
against split=first: 762 against 624 us at 1,262144,128,512, 600 against 470 at 8,1024,768,2304."""

_PAIR = 2.0
"""Bytes of one plane of a value."""


def _arithmetic(setting: Setting) -> str:
    return str(setting.params["arithmetic"])


def _planes(setting: Setting) -> int:
    return PLANES[_arithmetic(setting)]


def _wants_dn(setting: Setting) -> bool:
    return "dx" in setting.problem.wants


def _wants_g(setting: Setting) -> bool:
    return bool(setting.problem.wants & {"dw", "dgamma", "dbeta"})


def _is_scaled(setting: Setting) -> bool:
    return setting.problem.dtype == "float32" and _arithmetic(setting).startswith("fp16")


def _in_loop(setting: Setting) -> bool:
    """Whether the products themselves take values apart."""
    return setting.params.get("split") == "loop"


def _in_fragments(setting: Setting) -> bool:
    """Whether the products copy dy as it is, and take it apart in the fragments."""
    return setting.params.get("split") == "fragments"


def _as_it_is(setting: Setting) -> bool:
    """Whether the products copy dy as it is, so that there are no planes of it."""
    return setting.params.get("split") in ("fragments", "none")


def _in_epilogue(setting: Setting) -> bool:
    """Whether the products' epilogue turns dn into dx."""
    return setting.params["finish"] == "epilogue"


def _prepare(setting: Setting) -> Work:
    problem, part = setting.problem, setting.constants["PART"]
    rows, hidden, out = problem.rows, problem.hidden, problem.out
    written = 0.0 if _in_loop(setting) else _PAIR * _planes(setting)
    sets = 0 if _as_it_is(setting) else _wants_dn(setting) + _wants_g(setting) if _is_scaled(setting) else 1
    held = part <= 128
    read_again = 0 if held or not written or not _is_scaled(setting) else 1
    reads_dy = "DY_TILES_O" in setting.constants
    dy = reads_dy * float(rows * out) * (setting.data_size * (1 + read_again) + written * sets)
    x = float(rows * hidden) * (setting.data_size + written * _wants_g(setting))
    reads_w = "W_TILES" in setting.constants
    w = reads_w * float(hidden * out) * (setting.param_size * (1 + read_again) + written)
    # Of most blocks: a tile of dy, or where none is read some rows of x.
    values = max(part, W_COLUMNS) * part if reads_dy else 8 * setting.constants["ROW_STEPS"] * setting.threads
    steps = values / setting.threads / 8
    chain = (1 + read_again) * pipelined(steps, L2, 8.0 * (4 + 4 * sets), 8 if held else 2) + 6 * BARRIER + 2 * L2
    return Work(
        chain=chain + 8 * SHUFFLE * steps, instructions=values / 32 * (6.0 + 5.0 * sets * _planes(setting)),
        wavefronts=values * (setting.data_size + written * sets) / 128 + 2.0 * part * setting.warps * reads_dy,
        l2_bytes=dy + x + w, registers=127 if held else 56)


def _gemm(setting: Setting) -> Work:
    problem, constants = setting.problem, setting.constants
    block_m, block_n, block_k = (constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    planes, whole = _planes(setting), _arithmetic(setting) in WHOLE
    padded = math.ceil(problem.rows / constants["ROW_PAD"]) * constants["ROW_PAD"]
    dn_tiles = padded // block_m * constants["TILES_H"] if _wants_dn(setting) else 0
    g_tiles = setting.splits * constants["G_TILES_O"] * constants["TILES_H"] if _wants_g(setting) else 0
    dn_depth, g_depth = constants["OUT_PITCH"], math.ceil(setting.split_rows / block_k) * block_k
    tiles = max(1, dn_tiles + g_tiles)
    deep = dn_tiles * dn_depth + g_tiles * g_depth
    # Where every tile has an SM of its own the deepest counts, where an SM has many of them the average.
    deepest = max(dn_depth * (dn_tiles > 0), g_depth * (g_tiles > 0))
    depth = max(deep / tiles, deepest * min(1.0, setting.sms / tiles), 1.0)
    steps = depth / 16  # of one tensor-core instruction's depth
    warp_m, warp_n = block_m / constants["WARPS_M"], block_n / constants["WARPS_N"]
    in_shared = value_bytes(_arithmetic(setting))
    dy_in_shared = 4 if _in_fragments(setting) else in_shared
    matrix_instructions = matrix_steps(_arithmetic(setting)) * warp_m / 16 * warp_n / 8
    ordinary = warp_m * warp_n / 2 if not matrix_instructions else 0.0  # multiply-adds of a lane
    loads = in_shared / 2 * (warp_m / 16 + warp_n / 16) * (1.5 if whole else 1.0)  # ldmatrix reads more at a time
    read = in_shared / 2 * (warp_m / 16 + warp_n / 16) * 4.0  # passes of 128 bytes
    copies = (dy_in_shared * block_m + in_shared * block_n) * 16 / 16 / setting.threads  # for one thread
    promoted = warp_m * warp_n / 32 * 2 * 16 / constants["PROMOTE"] if "PROMOTE" in constants else 0.0
    held = block_n + (block_m if setting.data_size == 4 and not whole else 0) if _in_loop(setting) else 0
    taken_apart = held * 16 / setting.threads  # values
    if _in_fragments(setting):  # by each of the warps that share rows; a thread also looks at what it has copied
        looked_at = block_m * 16 / setting.threads if _is_scaled(setting) else 0.0
        taken_apart, read = warp_m / 2 + looked_at, read + looked_at
    rounded = (warp_m + warp_n) / 2 * (planes + 1) if whole and matrix_instructions else 0.0  # to tf32
    step_instructions = (matrix_instructions + ordinary + loads + 4 * copies + promoted + rounded
                         + taken_apart * (3 + (0 if whole else 3 * planes)))
    # One warp alone: an instruction of its own every six cycles, and once a stage a barrier and the first fragments behind it.
    products = max(matrix_instructions * 6.0, MATRIX) if matrix_instructions else ordinary
    waiting = _WAITING if _in_fragments(setting) else 1.0
    step_chain = waiting * (products + 16 / block_k * (BARRIER + SHARED + 2 * MATRIX))
    ending = warp_m * warp_n / 32 * 6.0 + 4 * L2
    if _in_epilogue(setting):
        ending += warp_m * warp_n / 32 * 4.0 + 4 * L2 + 2 * BARRIER
    global_bytes = float(setting.data_size) if _in_loop(setting) else planes * _PAIR
    dy_bytes = float(setting.data_size) if _in_fragments(setting) else global_bytes
    tile_bytes = deep / tiles * (dy_bytes * block_m + global_bytes * block_n) + 8.0 * block_m * block_n
    atomics = float(setting.parameter_elements * setting.splits) if setting.reduction == "atomic" else 0.0
    return Work(
        chain=3 * L2 + steps * step_chain + ending, instructions=setting.warps * (steps * step_instructions + ending),
        wavefronts=setting.warps * steps * (read + 4.0 * copies) + setting.warps * warp_m * warp_n / 8,
        l2_bytes=setting.blocks * tile_bytes, atomics=atomics, meetings=float(setting.splits) if atomics else 0.0,
        registers=int(warp_m * warp_n / 32 * (2 if promoted else 1) + loads * 4 + 48 + 2.0 * taken_apart),
        matrix=float(deep * block_m * block_n * matrix_steps(_arithmetic(setting)) * waiting))


def _finish(setting: Setting) -> Work:
    problem, constants = setting.problem, setting.constants
    values = 8.0 * constants["ROW_STEPS"]
    of_rows = _wants_dn(setting) and not _in_epilogue(setting)
    dn_size = setting.data_size if setting.params["finish"] == "rounded" else 4
    rows = float(problem.rows * problem.hidden) * (dn_size + 2 * setting.data_size) if of_rows else 0.0
    sums = 0.0
    if "DW_SUM_BLOCKS" in constants:
        sums = float(problem.hidden * problem.out) * (4 * setting.splits + setting.param_size)
    # In the products of G; but in those of warpgroups only where they read dy as it is.
    sums_dy = _wants_g(setting) and (_as_it_is(setting) or (setting.data_size == 2 and "groups" not in setting.params))
    db_parts = setting.splits if sums_dy else math.ceil(problem.rows / constants["PART"])
    chain = 2 * L2 + 2 * (5 * SHUFFLE + 2 * BARRIER) + values * 3 * FMA
    return Work(
        chain=chain, instructions=setting.warps * (values * 12.0 + 80.0), wavefronts=setting.warps * values * 4.0,
        l2_bytes=rows + sums + 4.0 * db_parts * problem.out, registers=80)


KERNELS: Kernels = {"gemm_prepare": _prepare, "gemm_mma": _gemm, "gemm_finish": _finish}

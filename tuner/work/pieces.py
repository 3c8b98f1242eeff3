"""What the kernels of weight_mma cost (templates/weight_mma*.cu.j2). Counts follow the templates and are rough.

Where all pieces of w are not resident at once, they follow each other; what a block waits for is in its chain.
"""

from __future__ import annotations

from codegen.arithmetic import PLANES, products
from tuner.work.base import BARRIER, L2, MATRIX, MEMORY, SHARED, SHUFFLE, Kernels, Setting, Work, pipelined
from tuner.work.stream import row_statistics

_PRODUCT = 6.0
"""Cycles between matrix products that one warp issues, each of a sum of its own; as in tuner/work/gemm.py."""


def _strips_and_parts(setting: Setting) -> tuple[int, int]:
    """(pieces along the columns of w, along its rows)."""
    return (-(-setting.problem.hidden // setting.constants["COLUMNS"]), -(-setting.problem.out // setting.constants["OUTS"]))


def _wanted(setting: Setting) -> tuple[bool, bool]:
    """Whether dn = dy @ w is wanted, and whether G = dy^T @ xhat is."""
    return "dx" in setting.problem.wants, bool(setting.problem.wants & {"dw", "dgamma"})


def _weight_statistics(setting: Setting) -> Work:
    one = row_statistics(setting, 1)
    return Work(one.chain, one.instructions, one.wavefronts, one.l2_bytes * setting.blocks, registers=one.registers)


def _weight_mma(setting: Setting) -> Work:
    problem, constants, threads, size = setting.problem, setting.constants, setting.threads, setting.data_size
    tile, outs, columns, warp_outs = (constants[name] for name in ("TILE_ROWS", "OUTS", "COLUMNS", "WARP_OUTS"))
    arithmetic = str(setting.params["arithmetic"])
    planes, made_of = PLANES[arithmetic], products(arithmetic)
    dn, g = _wanted(setting)
    scaled = problem.dtype == "float32" and arithmetic.startswith("fp16")
    _, parts = _strips_and_parts(setting)
    tiles, steps = max(1, -(-problem.rows // tile)), -(-problem.rows // 16)  # steps: of 16 rows, which products take at once

    # Of one warp: what a tile asks of its part of dy and x, and 16 rows of its part of w.
    dy, x = tile * outs / threads, tile * columns / threads
    looked = dy * (2.0 + (4.0 + 2.0 * planes * (dn + g) if scaled else planes * (dn or g))) + 40.0
    looked += x * (3.0 + planes) * g + x * 8.0 * dn
    matrix = 4.0 * warp_outs / 16 * made_of  # instructions of one product
    step = (dn * (matrix + warp_outs * (1.0 + 2.0 * planes) + 60.0) + g * (matrix + warp_outs + 30.0))
    ending = warp_outs * 8.0 + 60.0
    waiting = L2 + 4 * BARRIER + 2 * SHARED + (6 * SHUFFLE if scaled else 0.0) + dn * (2 * L2 + 5 * SHUFFLE)
    step_chain = (dn + g) * (matrix * _PRODUCT + 2 * SHARED + MATRIX) + dn * warp_outs * planes
    statistics = 0.0
    if setting.params["statistics"] == "block" and (dn or g):
        loads = -(-problem.hidden // (32 * constants["VECTOR"]))
        rows = min(tile, problem.rows)
        statistics = -(-rows // setting.warps) * (2 * pipelined(loads, L2, 3.0 * constants["VECTOR"], 8) + 15 * SHUFFLE)
    w = setting.w_bytes * ((dn or bool(problem.wants & {"dgamma", "dbeta"})) + ("dw" in problem.wants))
    read = setting.blocks * problem.rows * size * (outs + columns * (g + dn))
    if statistics:
        read += setting.blocks * problem.rows * problem.hidden * size
    passes = tiles * (dy + x) * (1.0 + planes) + steps * (dn + g) * planes * warp_outs / 4 + warp_outs * 2
    return Work(
        chain=MEMORY + tiles * (waiting + looked + statistics) + steps * step_chain + ending + 2 * L2,
        instructions=setting.warps * (tiles * looked + steps * step + ending),
        wavefronts=setting.warps * passes,
        l2_bytes=w + read + dn * 4.0 * parts * problem.rows * problem.hidden,
        registers=int(2 * warp_outs + dy + x + 40),
        matrix=float(setting.blocks * made_of * 16 * steps * outs * columns * (dn + g)))


def _weight_finish(setting: Setting) -> Work:
    problem, vector = setting.problem, setting.constants["VECTOR"]
    strips, parts = _strips_and_parts(setting)
    dn, _ = _wanted(setting)
    steps = -(-parts // setting.warps)
    shares = dn * -(-strips * parts // setting.threads)
    row = problem.hidden * (4.0 * parts + 2 * setting.data_size) + 8.0 * strips * parts * -(-problem.hidden // (32 * vector))
    return Work(
        chain=pipelined(steps, L2, 2.0 * vector, 8) + pipelined(shares, L2, 4.0) + 5 * SHUFFLE + BARRIER + setting.warps * SHARED,
        instructions=setting.warps * (steps * 3.0 * vector + shares * 6.0 + 60.0),
        wavefronts=setting.warps * (steps * vector + 8.0), l2_bytes=problem.rows * dn * row + 8.0 * parts * problem.hidden)


KERNELS: Kernels = {"weight_statistics": _weight_statistics, "weight_mma": _weight_mma, "weight_finish": _weight_finish}

"""What the products of gemm_wgmma cost (templates/gemm_wgmma.cu.j2). Counts are rough; rates are fitted to times on an H200."""

from __future__ import annotations

import math
from collections.abc import Mapping

from codegen.arithmetic import PLANES, products
from codegen.limits import matrix_rate
from codegen.variant import round_up
from tuner.work.base import FMA, L2, MEMORY, Kernels, Setting, Work

RATE = 1640.0
"""Multiply-adds of 16-bit operands that wgmma is expected to reach on one SM in one cycle: 0.8 of the data sheet's 2048, as the
best library kernels do."""

_FASTER = matrix_rate("sm_90a") / RATE
"""How much shorter products last than at the rate of mma.sync, which the cost model counts in."""


_BULK = 0.6
"""What a byte of a bulk copy counts against one of the cost model's rate of L2: 6.5 TB/s at 8,1024,768,2304 and 7.3 at
16,512,1024,4096 left tensor cores the bound."""

_ROW_COPY = 14.0
"""Cycles from one copy of a row of dy to the next, in split=fragments: 1850 a stage of 128 and 64 rows in turn,
in bfloat16, with what else there is."""

_WAITING = 1.5
"""How much longer products last that wait for fragments: 3450 cycles a stage at 1,262144,128,512,
with what else there is, against 1920."""


def _waits_for_w(constants: Mapping[str, int], wide: bool) -> float:
    """How often the end of a tile of G waits for w: before every fourth fragment of a row, or before each where registers hold no
    more (_wgmma_epilogue.cu.j2); once where the next ones are on their way meanwhile (_wgmma_end_g.cu.j2)."""
    across = constants["BLOCK_N"] / 8
    fragments = across * constants["BLOCK_M"] / (constants["THREADS"] / 2)
    return 1.0 if wide else across / 4 if fragments < 32 else across


def _wgmma(setting: Setting) -> Work:
    problem, constants = setting.problem, setting.constants
    arithmetic = str(setting.params["arithmetic"])
    block_m, block_n, block_k = (constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    padded = math.ceil(problem.rows / constants["ROW_PAD"]) * constants["ROW_PAD"]
    wants_g = bool(problem.wants & {"dw", "dgamma", "dbeta"})
    cluster = int(setting.params["cluster"])  # whose blocks take tiles of as many rows, there or not
    dn_tiles = round_up(padded // block_m, cluster) * constants["TILES_H"] if "dx" in problem.wants else 0
    g_tiles = setting.splits * round_up(constants["G_TILES_O"], cluster) * constants["TILES_H"] if wants_g else 0
    dn_steps, g_steps = constants["OUT_PITCH"] // block_k, math.ceil(setting.split_rows / block_k)
    tiles, steps = max(1, dn_tiles + g_tiles), dn_tiles * dn_steps + g_tiles * g_steps
    # Blocks take tile after tile: when the last is begun the others are half-way through theirs.
    deepest = max(dn_steps * (dn_tiles > 0), g_steps * (g_tiles > 0), 1)
    in_fragments = setting.params["split"] == "fragments"
    half = dn_steps / 2 if in_fragments and dn_tiles > setting.blocks else deepest / 2
    if "HALVED" in constants:
        half /= 2
    of_block = max(steps / setting.blocks + half, deepest) if tiles > setting.blocks else float(deepest)
    matrix = float(block_m * block_n * block_k * products(arithmetic))  # of a step
    promoted = 2.0 * block_m * block_n / 32 * block_k / constants["PROMOTE"] if "PROMOTE" in constants else 0.0  # instructions
    multiplying = constants["THREADS"] / 32
    wide = setting.params["finish"] in ("wide", "rounded")
    ending = block_m * block_n / 32 * (5.0 if wide else 8.0)  # instructions of a tile's epilogue
    tiles_of_block = max(1.0, tiles / setting.blocks)
    g_tiles_of_block = max(float(g_tiles > 0), g_tiles / setting.blocks)
    for_w = g_tiles_of_block * _waits_for_w(constants, wide) * MEMORY
    written = block_m * block_n * (2.0 if setting.params["finish"] == "rounded" else 4.0)  # of a tile of dn
    # Where one warpgroup multiplies, nothing hides its promotion; where two do, they take turns.
    alone = promoted / 4 * FMA if setting.params["groups"] == 1 else 0.0
    matrix_cycles = matrix / RATE
    if in_fragments:
        rows = (dn_tiles * dn_steps * block_m + g_tiles * g_steps * block_k) / max(steps, 1)
        matrix_cycles = max(rows * _ROW_COPY, matrix_cycles * (_WAITING if promoted else 1.0))
    plane_bytes = 2.0 * PLANES[arithmetic] * block_k
    step_bytes = plane_bytes * (block_m + block_n)
    # A copy with .multicast::cluster reads once what it brings to all blocks of a cluster (PTX ISA, "cp.async.bulk"). Not timed.
    read_bytes = plane_bytes * (block_m + block_n / cluster)
    atomics = float(setting.parameter_elements * setting.splits) if setting.reduction == "atomic" else 0.0
    return Work(
        chain=3 * L2 + of_block * (matrix_cycles + alone) + tiles_of_block * (ending / 4 + 2 * L2) + for_w,
        instructions=of_block * (promoted + multiplying * 30.0) + tiles_of_block * ending,
        wavefronts=of_block * (products(arithmetic) * (block_m / 64) * block_k * (64 + block_n) / 64 + step_bytes / 128),
        l2_bytes=_BULK * steps * read_bytes + tiles * (4.0 * block_m * block_n + written), atomics=atomics,
        meetings=float(setting.splits) if atomics else 0.0, registers=168, matrix=steps * matrix * _FASTER)


KERNELS: Kernels = {"gemm_wgmma": _wgmma}

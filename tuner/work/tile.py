"""What the kernel of tile_mma costs (templates/tile_mma*.cu.j2). Counts follow the template and are rough."""

from __future__ import annotations

import math

from codegen.arithmetic import PLANES, products
from tuner.work.base import BARRIER, L2, MATRIX, SHARED, SHUFFLE, Kernels, Setting, Work, emission, pipelined


def _tile_mma(setting: Setting) -> Work:
    problem, constants, wants = setting.problem, setting.constants, setting.problem.wants
    rows, across, stages = (constants[name] for name in ("TILE_ROWS", "ACROSS", "STAGES"))
    hidden, out = constants["H_PADDED"], constants["O_PADDED"]
    arithmetic = str(setting.params["arithmetic"])
    made_of, native = products(arithmetic), problem.dtype != "float32"
    planes, scaled = PLANES[arithmetic], not native and arithmetic.startswith("fp16")
    threads, warps, size = setting.threads, setting.warps, setting.data_size
    tiles = math.ceil(math.ceil(problem.rows / rows) / max(1, setting.blocks))
    dx, gradients = "dx" in wants, bool(wants & {"dw", "dgamma"})

    # Values of a tile that one thread has, and what each step asks of it.
    x, dy = rows * hidden / threads, rows * out / threads
    g = out * hidden / threads
    split = 0.0 if native else 2.0 + planes
    look = 4.0 * x + (5.0 if scaled else 2.0) * dy + 40.0
    normalize = (2.5 + (split if gradients else 0.0)) * x + 20.0
    dn_products = made_of * rows * hidden * out / (2048.0 * warps)
    dn = (1.6 * dn_products + (split + 1.5) * dy * across + 5.5 * x + 40.0) if dx else 0.0
    g_products = made_of * rows * hidden * out / (2048.0 * warps)
    columns = (1.5 * g_products + (0.0 if native else split + 1.5) * dy + (g if scaled else 0.0)) if gradients else 0.0
    copies = (x + dy) * size / 16 * 3.0 + 30.0
    issued = look + normalize + dn + columns + copies
    chains = 8 * SHARED + 6 * SHUFFLE + (4 if native else 5) * BARRIER
    chains += (out / 16 * MATRIX if dx else 0.0) + (rows / 16 * MATRIX if gradients else 0.0)
    tile_chain = issued * max(1.0, warps / 4) + chains + (2 * L2 if stages == 1 else 0.0)

    # Passes of 128 bytes: copies in, reads by value, planes out and back as fragments.
    values = rows * (hidden + out)
    fragment_rows, fragment_columns = rows * across / warps, hidden / across
    w_reads = warps * out * fragment_columns * 2 * planes / 128 if dx else 0.0
    dy_reads = warps * out * fragment_rows * (2 if native else 4) / 128 if dx else 0.0
    g_tile = out / constants["G_WARPS_O"] + hidden / constants["G_WARPS_H"]
    g_reads = warps * rows * g_tile * 2 * planes / 128 if gradients else 0.0
    tile_wavefronts = 4.0 * values * size / 128 + values * 2 * planes / 128 + w_reads + dy_reads + g_reads

    ending = 3 * L2 + g * 4.0 + 3 * BARRIER + 6 * SHUFFLE
    beginning = 3 * L2 + pipelined(out * hidden / (4 * threads), L2, 30.0, 16) + 2 * BARRIER
    atomics, meetings = emission(setting)
    return Work(
        chain=beginning + tiles * tile_chain + ending,
        instructions=warps * (tiles * issued + 20.0 * g),
        wavefronts=tiles * tile_wavefronts + out * hidden * 2 * planes / 64,
        l2_bytes=size * problem.rows * (hidden * (2 if dx else 1) + out)
        + setting.blocks * (2.0 * setting.w_bytes + 4.0 * setting.parameter_elements),
        atomics=atomics, meetings=meetings,
        registers=int(32 + g + max(g if scaled else 0.0, 2 * x)),
        matrix=float(tiles * setting.blocks * made_of * rows * hidden * out * (int(dx) + int(gradients))))


KERNELS: Kernels = {"tile_mma": _tile_mma}

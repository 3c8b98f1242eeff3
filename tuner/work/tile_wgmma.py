"""What the kernel of tile_wgmma costs (templates/tile_wgmma*.cu.j2). Counts follow compiled kernels and are rough."""

from __future__ import annotations

import math

from codegen.arithmetic import PLANES, products
from codegen.limits import matrix_rate
from tuner.work.base import BARRIER, L2, SHARED, SHUFFLE, Kernels, Setting, Work, emission, pipelined
from tuner.work.wgmma import RATE

_FASTER = matrix_rate("sm_90a") / RATE
"""How much shorter products last than at the rate of mma.sync, which the cost model counts in."""


def _tile_wgmma(setting: Setting) -> Work:
    problem, constants, wants = setting.problem, setting.constants, setting.problem.wants
    rows, hidden, out = (constants[name] for name in ("TILE_ROWS", "H_PADDED", "O_PADDED"))
    arithmetic, size = str(setting.params["arithmetic"]), setting.data_size
    native, made_of = problem.dtype != "float32", products(arithmetic)
    planes, scaled = PLANES[arithmetic], not native and arithmetic.startswith("fp16")
    slices, teams = hidden // 64, int(setting.params["teams"])
    tiles = math.ceil(math.ceil(problem.rows / rows) / max(1, setting.blocks))
    dx, gradients = "dx" in wants, bool(wants & {"dw", "dgamma"})

    # Warp instructions of one tile: of a team, each of whose warpgroups splits all of dy for dn and its part of it for G; and of
    # the warpgroups that look at x and at dy.
    split = 0.0 if native else (4.2 if planes > 1 else 2.0)
    x, dy, of_g = rows * 64 / 128, rows * out / 128, rows * out / 128 / (2 if slices == 2 and out == 128 else 1)
    dn = dy * split + x * 16.0 if dx else 0.0
    columns = of_g * split + x * 7.0 + (out / 2 if scaled else 0.0) if gradients else 0.0
    team = 4 * slices * (dn + columns + 100.0)
    look_x, look_dy = rows * hidden / 128 * 6.0 + 100.0, rows * out / 128 * (5.5 if scaled else 3.0) + 100.0
    # Cycles in which a team passes a tile when it is alone: products, and what is not beside them.
    product = made_of * rows * hidden * out / RATE
    alone = (product * (int(dx) + int(gradients)) + (x * 7.0 + 100.0) * slices + 2 * BARRIER + 6 * SHUFFLE + 8 * SHARED)
    look = max(look_x, look_dy) * 2.0 + 3 * BARRIER + 6 * SHUFFLE
    load = L2 + rows * (hidden + out) * size / 40.0
    waits = max(0.0, load + look - alone) / 2 if constants["STAGES"] == teams + 1 else 0.0
    tile_chain = max((alone + waits) / teams, look)

    values = rows * (hidden + out)
    products_read = made_of * rows / 64 * hidden * out * 2 * (int(dx) + int(gradients))
    tile_wavefronts = (3.0 * values * size + (slices + 1) * rows * out * size + rows * hidden * 2 * planes + products_read) / 128
    beginning = 3 * L2 + pipelined(out * hidden / (4 * setting.threads), L2, 30.0, 16) + 2 * BARRIER
    ending = 3 * L2 + out * 2.0 + (3 + teams) * BARRIER + 6 * SHUFFLE
    atomics, meetings = emission(setting)
    return Work(
        chain=beginning + tiles * tile_chain + ending,
        instructions=tiles * (team + 4 * (look_x + look_dy)) + 80.0 * out,
        wavefronts=tiles * tile_wavefronts + out * hidden * 2 * planes / 64,
        l2_bytes=size * problem.rows * (hidden * (2 if dx else 1) + out)
        + setting.blocks * (2.0 * setting.w_bytes + 4.0 * setting.parameter_elements),
        atomics=atomics, meetings=meetings, registers=min(255, 65536 // setting.threads // 8 * 8),
        matrix=float(tiles * setting.blocks * made_of * rows * hidden * out * (int(dx) + int(gradients))) * _FASTER)


KERNELS: Kernels = {"tile_wgmma": _tile_wgmma}

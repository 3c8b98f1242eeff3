"""What the kernel of tile_wgmma costs (templates/tile_wgmma*.cu.j2). Counts follow compiled kernels; the constants are fitted to
the times of fourteen whole calls on an H200, at 1,262144,128,128 and 1,1048576,64,64 in float32 and bfloat16, to 15 %. What is
issued, what passes the port of shared memory and the products are in the cycles of an instruction, and not counted again."""

from __future__ import annotations

import math

from codegen.arithmetic import PLANES, products
from tuner.work.base import BARRIER, L2, SHUFFLE, Kernels, Setting, Work, emission, pipelined
from tuner.work.wgmma import RATE

_CYCLES, _CYCLES_MORE = 1.2, 0.9
"""Cycles from one instruction of a warp that multiplies to the next, and how many more each such warp of a scheduler adds."""

_EXPOSED = 0.4
"""The part of products that nothing stands beside."""

_WAIT = 450.0
"""Cycles that a tile is waited for where only one is on its way."""

_COPY = 0.6
"""What a byte of a tile counts against one of the cost model's rate of L2."""

_AHEAD, _PREFETCH = 0.015, 0.05
"""What each tile that is on its way beyond two adds to the time of one, and what the prefetch does."""


def _tile_wgmma(setting: Setting) -> Work:
    problem, constants, wants = setting.problem, setting.constants, setting.problem.wants
    rows, hidden, out = (constants[name] for name in ("TILE_ROWS", "H_PADDED", "O_PADDED"))
    arithmetic, size = str(setting.params["arithmetic"]), setting.data_size
    native, made_of = problem.dtype != "float32", products(arithmetic)
    planes, scaled = PLANES[arithmetic], not native and arithmetic.startswith("fp16")
    slices, teams = hidden // 64, int(setting.params["teams"])
    tiles = math.ceil(math.ceil(problem.rows / rows) / max(1, setting.blocks))
    dx, gradients = "dx" in wants, bool(wants & {"dw", "dgamma"})

    # Instructions for one tile of a warp that multiplies, which splits all of dy for dn and its part of it for G; and of one that
    # brings tiles.
    split = 0.0 if native else (4.2 if planes > 1 else 2.0)
    x, dy, of_g = rows * 64 / 128, rows * out / 128, rows * out / 128 / (2 if slices == 2 and out == 128 else 1)
    of_dx = dy * split + x * 7.0 if dx else 0.0
    of_columns = of_g * split + x * (3.0 if planes == 1 else 8.0) + (out / 2 if scaled else 0.0) if gradients else 0.0
    multiplying = of_dx + of_columns + x * (6.0 if native else 9.0) + (330.0 if native else 200.0) + 100.0 * (slices - 1)
    bringing = rows * (hidden + out) * size / 1024 + 100.0 + (0.0 if native else dy * (5.5 if scaled else 3.0) + 100.0)
    # Cycles in which a team passes a tile beside the others.
    product = made_of * rows * hidden * out / RATE * (int(dx) + int(gradients))
    passing = multiplying * (_CYCLES + _CYCLES_MORE * slices * teams) + _EXPOSED * product
    ahead = constants["STAGES"] - teams
    more = 1.0 + _AHEAD * max(0, ahead - 2) + (_PREFETCH if "PREFETCH" in constants else 0.0)
    tile_chain = max(passing / teams * more, bringing * (_CYCLES + _CYCLES_MORE)) + (_WAIT if ahead == 1 else 0.0)

    beginning = 3 * L2 + pipelined(out * hidden / (4 * setting.threads), L2, 30.0, 16) + 2 * BARRIER
    ending = 3 * L2 + out * 2.0 + (3 + teams) * BARRIER + 6 * SHUFFLE
    atomics, meetings = emission(setting)
    return Work(
        chain=beginning + tiles * tile_chain + ending,
        instructions=80.0 * out, wavefronts=out * hidden * 2 * planes / 64,
        l2_bytes=_COPY * size * problem.rows * (hidden * (2 if dx else 1) + out)
        + setting.blocks * (2.0 * setting.w_bytes + 4.0 * setting.parameter_elements),
        atomics=atomics, meetings=meetings, registers=min(255, 65536 // setting.threads // 8 * 8))


KERNELS: Kernels = {"tile_wgmma": _tile_wgmma}

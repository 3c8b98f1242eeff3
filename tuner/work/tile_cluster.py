"""What the kernel of tile_cluster costs (templates/tile_cluster*.cu.j2). Reckoned from the compiled kernel, not fitted: it has
not been timed yet. Instructions and passes of the port of shared memory are those of one step of a block, which takes a tile."""

from __future__ import annotations

import math

from tuner.work.base import BARRIER, L2, SHUFFLE, Kernels, Setting, Work, emission, pipelined
from tuner.work.wgmma import RATE

_WARPS = 8
"""Of either role."""

_BUSY = 0.8
"""The part of its time that the port of shared memory is expected to be busy where it decides."""

_CYCLES = 3.4
"""Cycles from one instruction of a warp to its next, with the other three of its scheduler (tile_wgmma's)."""

_DISTANT = 14.0
"""Bytes a cycle that a block can store in another one's shared memory: 3.3 TB/s of a whole H800 in clusters of two, Luo et al.,
"Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", 2024."""


def _tile_cluster(setting: Setting) -> Work:
    problem, constants, wants = setting.problem, setting.constants, setting.problem.wants
    rows, hidden, cluster = (constants[name] for name in ("TILE_ROWS", "H_PADDED", "CLUSTER"))
    out = constants["O_PADDED"] // cluster
    dx, gradients = "dx" in wants, bool(wants - {"dx"})
    clusters = max(1, setting.blocks // cluster)
    steps = math.ceil(math.ceil(problem.rows / rows) / clusters)

    # Of one step. A block finishes dx of one tile in `cluster`.
    x, dy, dn = rows * hidden / 128, rows * out / 128, rows * hidden * 4 / 128
    products = rows * hidden * out / RATE * (int(dx) + int(gradients))
    passes = 2 * dy + 6 * x  # dy brought and looked at; x brought and read, xhat stored; each 2 bytes
    passes += (4 * dy + hidden * out * 2 / 128 + dn * (4 if cluster > 1 else 2) / cluster + 2 * x / cluster) if dx else 0.0
    passes += (2 * dy + out / 64 * 2 * x) if gradients else 0.0
    by_rows = 100.0 + (dy * 128 / 256 / 8 + x * 128 / 256 * 9.5 + (dy * 128 / 256 * 2.2 if gradients else 0.0)
                       + (x * 128 / 256 * 10.0 / cluster if dx else 0.0))
    distant = dn * 128 / cluster / _DISTANT if dx and cluster > 1 else 0.0
    step = max(products, passes / _BUSY, by_rows * _CYCLES, distant)

    beginning = 3 * L2 + pipelined(out * hidden / 1024, L2, 4.0, 8) + 4 * BARRIER
    ending = 3 * L2 + out * hidden / 256 * 4.0 + 8 * BARRIER + 6 * SHUFFLE
    atomics, meetings = emission(setting)
    return Work(
        chain=beginning + steps * step + ending, instructions=steps * _WARPS * (by_rows + 290.0), wavefronts=steps * passes,
        l2_bytes=float(setting.data_size * problem.rows * (problem.hidden * (cluster + int(dx)) + problem.out)
                       + clusters * (2.0 * setting.w_bytes + 4.0 * setting.parameter_elements)),
        atomics=atomics, meetings=meetings, registers=128)


KERNELS: Kernels = {"tile_cluster": _tile_cluster}

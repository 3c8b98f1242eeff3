"""What the row kernels and the second pass of a reduction cost. Counts follow the templates and are rough."""

from __future__ import annotations

import math
from dataclasses import replace

from tuner.work.base import BARRIER, L1, L2, SHARED, SHUFFLE, Kernels, Setting, Work, emission, pipelined

COLLISION = 4.0
"""Cycles between additions to one address that one warp asks for at once. Fitted to one measured figure: an H200 takes 8.8 us
for one atomic thread per row at 16 rows of 8 and 16 values, whose 160 additions a row all meet those of the other rows."""


def _columns(setting: Setting, rows: int, column_steps: int, cached: bool) -> Work:
    """accumulate_columns (templates/_columns.cu.j2) of one block over `rows` rows; l2_bytes are those of one block."""
    problem, constants = setting.problem, setting.constants
    outs, groups = constants["COLUMN_OUTS"], constants["COLUMN_GROUPS"]
    out_steps = -(-problem.out // (groups * outs))
    steps = column_steps * out_steps
    instructions = 7.0 + 3.0 * outs
    reads = setting.data_size * rows * (constants["COLUMN_THREADS"] + problem.out) * column_steps * (1 if cached else out_steps)
    return Work(
        chain=steps * (pipelined(rows, L1 if cached else L2, instructions) + L2 + 6.0 * outs) + 2 * BARRIER + groups * SHARED,
        instructions=setting.warps * steps * (rows * instructions + 8.0 * outs),
        wavefronts=setting.warps * steps * rows * (3.0 + outs),
        l2_bytes=reads + 8.0 * setting.parameter_elements)


def _with_columns(setting: Setting, rows_phase: Work) -> Work:
    """A kernel whose block runs `rows_phase` (l2_bytes of one block) and then sums the columns of the same rows."""
    atomics, meetings = emission(setting)
    total = rows_phase
    split = setting.data_size * setting.split_rows * (setting.problem.hidden + setting.problem.out)
    if setting.wants_parameters and setting.reduction != "column_blocks":
        column_steps = -(-setting.problem.hidden // setting.constants["COLUMN_THREADS"])
        columns = _columns(setting, setting.split_rows, column_steps, split <= setting.cache_bytes)
        total = Work(
            rows_phase.chain + BARRIER + columns.chain, rows_phase.instructions + columns.instructions,
            rows_phase.wavefronts + columns.wavefronts, rows_phase.l2_bytes + columns.l2_bytes, atomics, meetings,
            max(rows_phase.registers, 32 + 4 * setting.constants["COLUMN_OUTS"]))
    return replace(total, l2_bytes=total.l2_bytes * setting.blocks)


# --- the kernels -------------------------------------------------------------------------------------------------------------


def _row_thread(setting: Setting) -> Work:
    problem, wants = setting.problem, setting.problem.wants
    hidden, out = problem.hidden, problem.out
    everything_atomic = "COLUMN_OUTS" not in setting.constants
    rows = setting.split_rows if not everything_atomic else setting.threads
    rounds = -(-rows // setting.threads)
    lanes = min(32, rows, problem.rows)
    warps = -(-min(rows, setting.threads) // 32) * rounds
    # Each lane reads a row of its own, so one load touches as many lines as its rows lie in.
    spread = max(1.0, lanes * min(setting.data_size * out, 128.0) / 128.0)
    products = ("dx" in wants) + (everything_atomic and bool(wants & {"dgamma", "dbeta"}))
    fmas = products * hidden * out
    chain = rounds * (2 * L2 + pipelined(3 * hidden, L1, 3.0) + pipelined(fmas, L1, 3.0 + spread) + 20.0 * hidden)
    result = Work(
        chain=chain,
        instructions=warps * (12.0 * hidden + 4.0 * fmas),
        wavefronts=warps * ((1.0 + spread) * fmas + 5.0 * hidden * lanes),
        l2_bytes=setting.data_size * rows * (3 * hidden + out) + setting.w_bytes)
    if not everything_atomic:
        return _with_columns(setting, result)
    additions = setting.parameter_elements
    return Work(
        chain=result.chain + additions * lanes * COLLISION, instructions=result.instructions + 3.0 * warps * additions,
        wavefronts=result.wavefronts + warps * additions * lanes * COLLISION, l2_bytes=result.l2_bytes * setting.blocks,
        atomics=float(problem.rows * additions), meetings=float(problem.rows))


def _row_warp(setting: Setting) -> Work:
    problem, constants = setting.problem, setting.constants
    hidden, out = problem.hidden, problem.out
    rows, vector, vectors, chunks = (constants[name] for name in ("ROWS", "VECTOR", "CHUNK_VECTORS", "CHUNKS"))
    columns = vectors * vector
    tiles = -(-setting.split_rows // (constants["WARPS"] * rows))
    w_latency = L1 if setting.w_bytes <= setting.cache_bytes else L2
    wants_dn = "dx" in problem.wants or (not constants["IDENTITY"] and bool(problem.wants & {"dgamma", "dbeta"}))
    statistics = L2 * (1 if chunks == 1 else 3 * chunks) + rows * 3 * (chunks * 2.0 * columns + 5 * SHUFFLE / min(rows, 4))
    step = vectors + rows * (1.0 + columns)
    product = chunks * (-(-out // 32) * L2 + pipelined(out, w_latency, step))
    finish = chunks * (2 * L2 + rows * 12.0 * columns) + 10 * SHUFFLE
    tile_chain = statistics + (product + finish if wants_dn else 0.0)
    tile_instructions = rows * chunks * 9.0 * columns + (chunks * (out * step + rows * 14.0 * columns) if wants_dn else 0.0)
    # A load of w or x by a warp moves 32 * VECTOR values: VECTOR wavefronts.
    tile_wavefronts = columns * chunks * (5.0 * rows + (out if wants_dn else 0)) + (rows * out if wants_dn else 0)
    w_reads = setting.w_bytes * (1 if w_latency == L1 else tiles * constants["WARPS"]) if wants_dn else 0.0
    result = Work(
        chain=tiles * tile_chain,
        instructions=setting.warps * tiles * tile_instructions,
        wavefronts=setting.warps * tiles * tile_wavefronts,
        l2_bytes=setting.data_size * setting.split_rows * (3 * hidden + out) + w_reads,
        registers=40 + columns * (rows + 2 + 2 * (not constants["IDENTITY"])))
    return _with_columns(setting, result)


def _column_blocks(setting: Setting) -> Work:
    result = _columns(setting, setting.problem.rows, 1, cached=False)
    return replace(result, l2_bytes=result.l2_bytes * setting.blocks, registers=32 + 4 * setting.constants["COLUMN_OUTS"])


def _row_shared(setting: Setting) -> Work:
    problem, constants = setting.problem, setting.constants
    lanes, rows, vector, identity = (constants[name] for name in ("LANES", "ROWS", "VECTOR", "IDENTITY"))
    o_pitch, h_pitch, tile_o, tile_h = (constants[name] for name in ("O_PITCH", "H_PITCH", "TILE_O", "TILE_H"))
    threads, warps = setting.threads, setting.warps
    tile_rows = threads // lanes * rows
    tiles = math.ceil(math.ceil(problem.rows / tile_rows) / setting.blocks)
    lane_vectors = -(-h_pitch // (lanes * vector))
    columns = lane_vectors * vector
    owned = -(-(o_pitch // tile_o * (h_pitch // tile_h)) // threads)
    owners = min(warps, -(-(o_pitch // tile_o * (h_pitch // tile_h)) // 32))
    wants_dn = "dx" in problem.wants or (not identity and bool(problem.wants & {"dgamma", "dbeta"}))

    def staged(elements: float) -> float:
        return L2 + pipelined(math.ceil(elements / (4 * threads)), SHARED, 12.0)

    sum_chain = math.log2(lanes) * SHUFFLE
    statistics = L2 + 3 * (rows * 2.0 * columns + sum_chain) + rows * 6.0 * columns
    dn_step = rows + 4 * lane_vectors + 4.0 * columns * rows  # four rows of w
    product = pipelined(o_pitch / 4, SHARED, dn_step, 2) if wants_dn else 0.0
    finish = (2 * sum_chain + rows * 14.0 * columns + SHARED) if wants_dn else 0.0
    reads = max(1.0, tile_o / 4) + max(1.0, tile_h / 4)
    g_step = reads + tile_o * (tile_h + 1.0)
    gradient = owned * pipelined(tile_rows, SHARED, g_step) if setting.wants_parameters else 0.0
    tile_chain = staged(tile_rows * o_pitch) + statistics + product + finish + gradient + 2 * BARRIER
    tile_instructions = warps * (
        (statistics - L2 - 3 * sum_chain) + (o_pitch / 4 * dn_step + rows * 16.0 * columns if wants_dn else 0.0)
        + 6.0 * tile_rows * o_pitch / (4 * threads)) + owners * owned * tile_rows * g_step * bool(setting.wants_parameters)
    # A 16-byte access of 32 lanes takes four passes, unless lanes read the same place.
    row_reads = o_pitch / 4 * (rows + 4 * max(1.0, columns * min(lanes, 32) / 32)) if wants_dn else 0.0
    tile_wavefronts = warps * (row_reads + 4.0 * rows * columns) + owners * owned * tile_rows * (tile_o + 2.0 * tile_h) / 2 \
        * bool(setting.wants_parameters)
    ending = BARRIER * 2 + owned * tile_o * (2 * SHARED + 2.0 * tile_h)
    if identity:
        ending += -(-problem.hidden // threads) * 2 * pipelined(problem.out, SHARED, 3.0) + 2 * BARRIER
    else:
        ending += -(-problem.hidden // threads) * 2 * pipelined(warps, SHARED, 3.0) + columns * 5.0 * 2
    atomics, meetings = emission(setting)
    return Work(
        chain=staged(o_pitch * h_pitch) + L2 + tiles * tile_chain + ending + 0.5 * L2,
        instructions=tiles * tile_instructions + warps * (ending / 4 + 3.0 * o_pitch * h_pitch / threads),
        wavefronts=tiles * tile_wavefronts + 2.0 * o_pitch * h_pitch / 32,
        l2_bytes=setting.data_size * problem.rows * (2 * problem.hidden + problem.out)
        + setting.blocks * (setting.w_bytes + 4.0 * setting.parameter_elements),
        atomics=atomics, meetings=meetings,
        registers=40 + owned * tile_o * (tile_h + 1) + 2 * columns * (rows + (not identity)))


def _sum_partials(setting: Setting) -> Work:
    warps = setting.constants["SUM_WARPS"]
    rounds = -(-setting.splits // warps)
    chain = L2 + pipelined(rounds, L2, 4.0, 8) + BARRIER + warps * SHARED + L2
    width = 32.0 * setting.constants["SUM_VECTOR"]
    return Work(
        chain=chain, instructions=warps * (rounds * 4.0 + 20.0) + 3.0 * warps, wavefronts=setting.splits * width / 32 + warps,
        l2_bytes=4.0 * setting.blocks * width * (setting.splits + 1))


KERNELS: Kernels = {
    "row_thread": _row_thread,
    "row_warp": _row_warp,
    "column_blocks": _column_blocks,
    "row_shared": _row_shared,
    "sum_partials": _sum_partials,
}

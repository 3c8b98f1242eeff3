"""What the kernels of weight_stream cost (templates/weight_stream.cu.j2). Counts follow the template and are rough.

w and dw pass through the L2 cache once and push out what else was there, so their batches, and the partial sums that are read
after them, wait for device memory. Vectors of 16-bit values are converted in the branch that loads them, so that a thread waits
for each of them. The partial sums come one after another, as if nothing of their loop were unrolled: on an H200 a step takes 600
cycles and more.
"""

from __future__ import annotations

from tuner.work.base import BARRIER, FMA, L2, MEMORY, SHARED, SHUFFLE, Kernels, Setting, Work, pipelined

_BATCH = 2 * MEMORY
"""Cycles that a batch waits while all SMs read w and write dw. On an H200, at 1 row of 4096 and 4096, half of 128 batches in turn
are 22 us less, half of 64 are 10, half of 32 are 6, however many threads share them."""

_BLOCK_SUM = 5 * SHUFFLE + 2 * BARRIER + SHARED
"""Cycles of one sum over a block."""


def _shape(setting: Setting) -> tuple[int, int, int]:
    """(vectors of a row, steps a thread needs for them, chunks of rows of w)."""
    vectors = -(-setting.problem.hidden // setting.constants["VECTOR"])
    return vectors, -(-vectors // setting.constants["THREADS"]), -(-setting.problem.out // setting.constants["OUTS"])


def row_statistics(setting: Setting, rows: int) -> Work:
    """The statistics of `rows` rows by one block; l2_bytes are those of one block."""
    _, steps, _ = _shape(setting)
    vector, hidden = setting.constants["VECTOR"], setting.problem.hidden
    return Work(
        chain=rows * (2 * pipelined(steps, L2, 3.0 * vector) + 2 * _BLOCK_SUM),
        instructions=setting.warps * rows * (steps * 8.0 * vector + 60.0), wavefronts=setting.warps * rows * 2.0 * steps * vector,
        l2_bytes=float(setting.data_size * rows * hidden), registers=32)


def _stream_statistics(setting: Setting) -> Work:
    one = row_statistics(setting, 1)
    return Work(one.chain, one.instructions, one.wavefronts, one.l2_bytes * setting.blocks, registers=one.registers)


def _weight_stream(setting: Setting) -> Work:
    constants, problem = setting.constants, setting.problem
    vector, rows, outs, unroll = (constants[name] for name in ("VECTOR", "ROWS", "OUTS", "UNROLL"))
    groups = max(1, -(-problem.rows // rows))
    waits_for_each = setting.param_size < 4 and vector > 1
    batches = outs if waits_for_each else -(-outs // unroll)
    products = 2.0 * rows * vector
    visits = (1.0 if problem.wants & {"dx", "dgamma", "dbeta"} else 0.0) + ("dw" in problem.wants)
    batch = (1 if waits_for_each else unroll) * (products + rows + 4.0)
    in_block = setting.params["statistics"] == "block"
    statistics = row_statistics(setting, min(rows, problem.rows)) if in_block else Work(L2, 0.0, 0.0, 0.0)
    _, _, chunks = _shape(setting)
    partials = 4.0 * chunks * problem.rows * problem.hidden
    return Work(
        chain=groups * (statistics.chain + 2 * BARRIER + batches * (_BATCH + FMA * batch)),
        instructions=setting.warps * groups * (batches * batch + statistics.instructions / setting.warps + 40.0),
        wavefronts=setting.warps * groups * (outs * (2.0 * vector + rows) + rows * 2.0 * vector) + groups * statistics.wavefronts,
        l2_bytes=groups * (visits * setting.w_bytes + setting.blocks * statistics.l2_bytes) + partials,
        registers=int(24 + rows * vector * 2 + (unroll + 1) * vector))


def _stream_sums(setting: Setting) -> Work:
    problem, vector = setting.problem, setting.constants["VECTOR"]
    _, _, chunks = _shape(setting)
    steps = -(-chunks // setting.warps)
    row = pipelined(steps, MEMORY, 2.0 * vector, 1) + 2 * BARRIER + setting.warps * SHARED + 10 * SHUFFLE + L2
    return Work(
        chain=problem.rows * row, instructions=setting.warps * problem.rows * (steps * 3.0 * vector + 60.0),
        wavefronts=setting.warps * problem.rows * (steps * vector + 8.0), l2_bytes=4.0 * chunks * problem.rows * problem.hidden)


def _stream_dx(setting: Setting) -> Work:
    vector = setting.constants["VECTOR"]
    return Work(
        chain=L2 + _BLOCK_SUM + L2 + 40.0, instructions=setting.warps * (60.0 + 12.0 * vector),
        wavefronts=setting.warps * 6.0 * vector,
        l2_bytes=float((4 + 2 * setting.data_size) * setting.problem.rows * setting.problem.hidden))


KERNELS: Kernels = {
    "stream_statistics": _stream_statistics, "weight_stream": _weight_stream, "stream_sums": _stream_sums,
    "stream_dx": _stream_dx}

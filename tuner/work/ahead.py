"""What the kernels of weight_ahead cost (templates/weight_ahead.cu.j2). Counts follow the template and are rough.

The first UNROLL loads of w are under way while statistics are taken, and each is followed by the next as soon as it is used: a
thread waits for device memory once in UNROLL rows at most, and not at all where as much as that is under way already.
"""

from __future__ import annotations

from tuner.work.base import BARRIER, FMA, L2, MEMORY, SHARED, SHUFFLE, Kernels, Setting, Work, pipelined

_MANY = 8
"""Loads of partial sums in flight in ahead_finish."""


def _block_sum(values: float) -> float:
    """Cycles of the sums of so many values over a block."""
    return 5 * SHUFFLE + 2 * BARRIER + 2 * SHARED + 6.0 * values


def _weight_ahead(setting: Setting) -> Work:
    constants, problem = setting.constants, setting.problem
    vector, rows, outs, unroll, across = (constants[name] for name in ("VECTOR", "ROWS", "OUTS", "UNROLL", "ACROSS"))
    groups = max(1, -(-problem.rows // rows))
    team = setting.threads // across
    steps, strip = -(-outs // team), across * vector
    x_steps = -(-problem.hidden // (setting.threads * vector))
    statistics = rows * x_steps * vector * 4.0
    step = vector * (2.0 * rows + 2.0) + rows + 6.0
    shared_dn = -(-strip // setting.threads)
    meeting = min(rows, max(problem.rows, 1)) * (2 * BARRIER + shared_dn * team * 4.0 + SHARED)
    visits = (1.0 if problem.wants & {"dx", "dgamma", "dbeta"} else 0.0) + ("dw" in problem.wants)
    chunks = -(-problem.out // outs)
    prologue = L2 + 2 * pipelined(x_steps, L2, rows * vector * 3.0) + _block_sum(rows) + _block_sum(2.0 * rows) + L2
    streaming = max(steps * FMA * step, (steps / unroll - 1) * MEMORY)
    accesses = steps * (2.0 * vector * 32 * setting.param_size / 128 + rows / 4)
    x_bytes = setting.blocks * setting.data_size * min(rows, problem.rows) * problem.hidden
    waiting = 1 if setting.params["waiting"] == "shared" else unroll
    return Work(
        chain=groups * (max(MEMORY, prologue) + streaming + meeting + _block_sum(2.0 * rows)),
        instructions=setting.warps * groups * (steps * step + statistics + rows * 60.0 + 100.0),
        wavefronts=setting.warps * groups * (accesses + 4.0 * rows * vector),
        l2_bytes=groups * (visits * setting.w_bytes + x_bytes) + 4.0 * chunks * problem.rows * problem.hidden,
        registers=56 + 2 * (rows + 1) * vector + waiting * max(1, vector * setting.param_size // 4))


def _ahead_finish(setting: Setting) -> Work:
    constants, problem = setting.constants, setting.problem
    rows, outs, strip = constants["ROWS"], constants["OUTS"], constants["ACROSS"] * constants["VECTOR"]
    groups, parts = max(1, -(-problem.rows // rows)), constants["FINISH_WARPS"] // rows
    chunks = -(-problem.out // outs)
    steps, blocks = -(-chunks // parts), chunks * -(-problem.hidden // strip)
    row = pipelined(steps, MEMORY, 4.0, _MANY) + pipelined(-(-blocks // 32), L2, 6.0) + 2 * BARRIER + parts * 8.0 + 10 * SHUFFLE
    of_rows = groups * rows * 6.0 * -(-blocks // 32)
    return Work(
        chain=groups * row + L2, instructions=setting.warps * groups * (steps * 4.0 + 60.0) + of_rows,
        wavefronts=setting.warps * groups * (steps + 8.0),
        l2_bytes=4.0 * problem.rows * (chunks * problem.hidden + setting.blocks * 2.0 * blocks))


KERNELS: Kernels = {"weight_ahead": _weight_ahead, "ahead_finish": _ahead_finish}

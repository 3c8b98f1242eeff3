"""What keeps a kernel from its floor, as far as its plan and the rates measured in this process tell it."""

from __future__ import annotations

from codegen.arithmetic import PLANES, products
from codegen.config import Config
from codegen.limits import Limits
from codegen.plan import Fill
from codegen.problem import Problem
from codegen.space import variant_of
from tuner.bench.floors import Floor, Rates

NEAR = 1.05
"""A time up to so many times the floor has no gap worth a word."""

LEAST_SHARE = 0.1
"""A part that explains less of the gap than this is not named: the larger rest is something else."""


def known_gap(problem: Problem, config: Config, limits: Limits, floor: Floor, rates: Rates, ours_us: float) -> str:
    """The largest known part of what lies between the floor and the kernel's time, as a clause; empty where none is known.

    Three parts are known. Each is a least time of this config by itself, so a share of the gap at most, and an estimate of it:

    launches   every launch and fill beyond the first takes as long as an empty kernel replayed from a graph
    products   the arithmetic of the config makes each product of several 16-bit ones; what they take at the rate of bfloat16
               beyond the floor
    workspace  what a call leaves in scratch memory is written once and read once at the rate of a copy, as far as it and the
               tensors exceed the L2 cache

    Args:
        ours_us: the warm time.
    """
    gap = ours_us - floor.us
    if ours_us <= NEAR * floor.us:
        return ""
    plan = variant_of(config.variant).plan(problem, config.as_dict())
    calls = sum(len(step.names) if isinstance(step, Fill) else 1 for step in plan.steps)
    scratch = plan.workspace_bytes(problem.rows, limits.sms)
    uncached = max(0.0, min(scratch, floor.bytes_us * rates.copy_tbps * 1e6 + scratch - limits.l2_bytes))
    parts = {
        f"{calls - 1} more {'launch' if calls == 2 else 'launches'}": (calls - 1) * rates.launch_us,
        f"{scratch / 1e6:.0f} MB of workspace": 2 * uncached / (rates.copy_tbps * 1e6)}
    arithmetic = str(config.as_dict().get("arithmetic", ""))
    if floor.matrix_us is not None and arithmetic in PLANES:
        several = products(arithmetic)
        parts[f"{several} 16-bit products for one of {arithmetic}"] = several * floor.matrix_us - floor.us
    name, us = max(parts.items(), key=lambda part: part[1])
    us = min(us, gap)
    return "" if us < LEAST_SHARE * gap else f"{name}, {us:.2f} of {gap:.2f} us"

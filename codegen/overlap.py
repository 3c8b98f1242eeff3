"""The parameter `launches` of variants whose plans may have several: each waits until the one before has ended, or begins while
that ends (Launch.overlaps). The rules and plans that all of them share.

On an H200 (2026-11-30, revision 98588cd4f772) overlapping took 6 to 7 % off row_shared at 32,16,64,64. At H = 768 and O = 2304
it took 2 to 5 % off weight_ahead with 1 and 4 rows, 9 and 10 % off weight_mma with 16 rows and 4 % with 64; at 1,1,4096,4096
nothing off weight_ahead; and no winner of tile_wgmma has it. gemm_wgmma had it too and does not any more: at 8,1024,768,2304 it
took as long, and up to 28 % longer with 16 to 256 rows.
"""

from __future__ import annotations

from collections.abc import Callable

from codegen.limits import Limits
from codegen.plan import Plan
from codegen.problem import Problem
from codegen.variant import Clash, Params

LAUNCHES = ("apart", "overlapped")
"""Its choices."""


def launched(plan: Plan, params: Params) -> Plan:
    """The plan, its launches as the parameter says."""
    return plan.overlapped() if params["launches"] == "overlapped" else plan


def _cannot_overlap(problem: Problem, params: Params, limits: Limits) -> str | None:
    if params["launches"] == "apart" or limits.overlaps_launches:
        return None
    return f"launches that overlap take a GPU of compute capability 9.0 or more, which {limits.name} is not"


CLASH = Clash(("launches",), _cannot_overlap)
"""Which GPUs have it."""


def nothing_overlaps(problem: Problem, params: Params, plan: Callable[[Problem, Params], Plan]) -> str | None:
    """Why launches=overlapped is of no use to the plan of these values; None where it is, or is not asked for."""
    if params["launches"] == "overlapped" and not plan(problem, params).overlapping:
        return "launches=overlapped changes nothing in one launch"
    return None

"""The variant one_warp: the example of a new one."""

from __future__ import annotations

from codegen import reduction
from codegen.expr import ROWS
from codegen.limits import Limits
from codegen.plan import Launch, Plan
from codegen.problem import Problem
from codegen.variant import Params, Variant


def _plan(problem: Problem, params: Params) -> Plan:
    return reduction.with_reduction(problem, params, Launch("one_warp", ROWS, 32), (), ROWS)


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    return reduction.mismatched(problem, {**params, "splits": 2})  # atomic additions: not deterministic, not to 16-bit gradients


def _inexact(problem: Problem, params: Params) -> str | None:
    return reduction.long_chain(problem, 1)


def _wasteful(problem: Problem, params: Params) -> str | None:
    return None


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    return {"STRIDE": 32, "OUT_CHAIN": reduction.OUT_CHAIN}


VARIANT = Variant(
    name="one_warp", summary="one_warp: a warp, which is a block, for each row; all sums over the rows are atomic.",
    choices={"reduction": ("atomic",)}, defaults={"reduction": "atomic"},
    refuses=_refuses, inexact=_inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
    meanings={"STRIDE": "columns from one of a lane to its next"},
)

"""The variant tile_cluster: tile_wgmma's one pass where w and G are too large for one multiprocessor, by clusters of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from codegen import reduction, tile_mma
from codegen.dtypes import ITEMSIZE
from codegen.expr import ROWS, SMS, Expr, ceil_div, const, maximum, minimum
from codegen.gemm_wgmma import wrong_gpu
from codegen.limits import Limits
from codegen.plan import Launch, Plan
from codegen.problem import Problem
from codegen.variant import Clash, Params, Variant, number, round_up, too_much_shared

_ROWS = 64
"""Rows of a tile: those of one product of a warpgroup."""

_MOST_HIDDEN = 128
_MOST_BLOCK_OUT = 256
"""The largest H, and the most columns of dy of a block: G of so many fits in the registers of two warpgroups."""

_HALF_OUT = 128
"""A block's columns of dy are a multiple: 64 for each of the warpgroups that share them out."""

_THREADS = 512
"""Of a block: two warpgroups that multiply, and two that work by rows."""

_ALIGNMENT = 1024
"""Bytes a swizzle repeats after."""

_REGISTERS = {64: (104, 152), 128: (64, 192)}
"""By how many registers of a thread hold G: those of a thread that works by rows, and of one that multiplies. With those of all
warpgroups, all that the SM has."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What follows from the parameters."""

    cluster: int
    stages: int
    h_padded: int
    o_padded: int

    @classmethod
    def of(cls, problem: Problem, params: Params) -> _Sizes:
        cluster = number(params, "cluster")
        return cls(cluster, number(params, "stages"), round_up(problem.hidden, 64), round_up(problem.out, _HALF_OUT * cluster))

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that works by rows, and of one that multiplies."""
        return _REGISTERS[max(64, self.o_padded // self.cluster * self.h_padded // 256)]

    @property
    def shared_bytes(self) -> int:
        """Of a block: room to align, stages of dy, w, two tiles of xhat, dn, rstd, gamma, barriers."""
        out = self.o_padded // self.cluster
        rows = 2 * self.stages * out + 4 * self.h_padded + 4 * self.h_padded + 8
        return _ALIGNMENT + _ROWS * rows + 2 * out * self.h_padded + 4 * self.h_padded + 8 * (2 * self.stages + 10)


def _clusters(problem: Problem, params: Params) -> Expr:
    """As many as the GPU runs at once, but no more than there are tiles."""
    if params["reduction"] == "single_block":
        return const(1)
    cluster = number(params, "cluster")
    if problem.deterministic:
        at_once: Expr | int = tile_mma.DETERMINISTIC_SMS // cluster
    else:
        at_once = maximum(ceil_div(SMS + (1 - cluster), cluster), 1) if cluster > 1 else SMS
    return minimum(at_once, ceil_div(ROWS, _ROWS))


def _split_params(params: Params) -> Params:
    """The parameters that codegen/reduction.py looks at; `splits` is that of a typical GPU."""
    splits = 1 if params["reduction"] == "single_block" else tile_mma.DETERMINISTIC_SMS // number(params, "cluster")
    return {"reduction": params["reduction"], "splits": splits}


def _plan(problem: Problem, params: Params) -> Plan:
    cluster, clusters = number(params, "cluster"), _clusters(problem, params)
    launch = Launch("tile_cluster", clusters * cluster, _THREADS, _Sizes.of(problem, params).shared_bytes)
    return reduction.with_reduction(problem, _split_params(params), launch, (), clusters)


def _wrong_type(problem: Problem, params: Params, limits: Limits) -> str | None:
    if ITEMSIZE[problem.dtype] != 2:
        return f"tile_cluster multiplies 16-bit data, not {problem.dtype}; take another variant"
    return None


def _too_wide(problem: Problem, params: Params, limits: Limits) -> str | None:
    if problem.hidden > _MOST_HIDDEN:
        return f"rows of up to {_MOST_HIDDEN} values of x fit with w in a cluster; take another variant"
    if problem.out > (most := _MOST_BLOCK_OUT * number(params, "cluster")):
        return f"rows of up to {most} values of dy fit with w in a cluster of {params['cluster']}"
    return None


def _too_large(problem: Problem, params: Params, limits: Limits) -> str | None:
    return too_much_shared(_Sizes.of(problem, params).shared_bytes, limits)


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    if reason := reduction.mismatched(problem, _split_params(params)):
        return reason
    shares = reduction.partial(problem, params, _clusters(problem, params))
    return reduction.too_much_workspace(problem, Plan((), shares), limits.sms)


def _inexact(problem: Problem, params: Params) -> str | None:
    return reduction.long_chain(problem, number(_split_params(params), "splits"))


def _wasteful(problem: Problem, params: Params) -> str | None:
    if max(problem.hidden, problem.out) <= _MOST_HIDDEN:
        return f"w of {problem.out} rows of {problem.hidden} values fits on one multiprocessor; take tile_wgmma"
    if params["reduction"] == "single_block":
        return reduction.wasted(problem, _split_params(params), _ROWS)
    return None


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    sizes = _Sizes.of(problem, params)
    named = {"CLUSTER": sizes.cluster, "TILE_ROWS": _ROWS, "STAGES": sizes.stages, "H_PADDED": sizes.h_padded,
             "O_PADDED": sizes.o_padded}
    if ahead := number(params, "prefetch"):
        named |= {"PREFETCH": ahead}
    by_rows, multiplying = sizes.registers
    named |= {"PRODUCER_REGISTERS": by_rows, "CONSUMER_REGISTERS": multiplying}
    if params["reduction"] == "two_pass":
        named |= reduction.second_pass(problem, number(_split_params(params), "splits"))
    return named


VARIANT = Variant(
    name="tile_cluster",
    summary="tile_cluster: as tile_wgmma for a larger w: the blocks of a cluster share out its rows, and add up dn.",
    choices={"arithmetic": ("bf16", "fp16"), "cluster": (2, 1), "stages": (3, 2, 4, 5, 6), "prefetch": (1, 0, 2),
             "reduction": ("atomic", "two_pass", "single_block")},
    defaults={"arithmetic": "bf16", "cluster": 2, "stages": 3, "prefetch": 1, "reduction": "two_pass"},
    refuses=_refuses, inexact=_inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
    clashes=(Clash(("arithmetic",), wrong_gpu), Clash(("arithmetic",), _wrong_type),
             Clash(("arithmetic",), tile_mma.wrong_arithmetic), Clash(("cluster",), _too_wide),
             Clash(("cluster", "stages"), _too_large)),
    meanings={"CLUSTER": "blocks that share out the columns of dy",
              "PRODUCER_REGISTERS": "registers of a thread that works by rows"},
)

"""The variant tile_wgmma: tile_mma's one pass, with products of whole warpgroups, which Hopper alone has."""

from __future__ import annotations

from dataclasses import dataclass

from codegen import overlap, reduction, tile_mma
from codegen.arithmetic import PLANES
from codegen.dtypes import ITEMSIZE
from codegen.expr import Expr
from codegen.gemm_wgmma import wrong_gpu
from codegen.limits import Limits
from codegen.plan import Launch, Plan
from codegen.problem import Problem
from codegen.variant import Clash, Params, Variant, number, round_up, too_much_shared

_ROWS = 64
"""Rows of a tile: those of one product of a warpgroup."""

_SLICE = 64
"""Columns of x that a warpgroup has: those that a swizzled row of 16-bit values holds."""

_MOST_COLUMNS = 128
"""The largest H and O: what w and a tile's planes leave room for, and G registers."""

_BRINGING = 128
"""Threads of a block that do not multiply."""

_ONES = 2048
"""Bytes of ones that 16-bit dy is multiplied by to be summed."""

_ALIGNMENT = 1024
"""Bytes a swizzle repeats after."""

_REGISTERS = {1: (120, 240), 2: (56, 224), 3: (56, 152)}
"""By how many warpgroups multiply: registers of a thread that brings tiles, and of one that multiplies. Multiples of 8 that, with
those of all warpgroups, the SM has for a block of so many."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What follows from the parameters."""

    teams: int
    slices: int
    stages: int
    h_padded: int
    o_padded: int
    item: int
    planes: int
    scaled: bool

    @classmethod
    def of(cls, problem: Problem, params: Params) -> _Sizes:
        h_padded = round_up(problem.hidden, _SLICE)
        return cls(number(params, "teams"), h_padded // _SLICE, number(params, "stages"), h_padded, round_up(problem.out, 64),
                   ITEMSIZE[problem.dtype], PLANES[str(params["arithmetic"])], tile_mma.is_scaled(problem, params))

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return self.teams * self.slices

    @property
    def shares(self) -> tuple[int, int] | None:
        """Registers of a thread that brings tiles, and of one that multiplies; None: so many warpgroups get too few."""
        return _REGISTERS.get(self.groups)

    @property
    def threads(self) -> int:
        """Threads that multiply."""
        return 128 * self.groups

    @property
    def shared_bytes(self) -> int:
        """Of a block: room to align, stages, w, ones, statistics and scales, sums over rows and columns, gamma, barriers."""
        stage = _ROWS * (self.h_padded + self.o_padded) * self.item
        w = 2 * self.planes * self.h_padded * self.o_padded
        sums_of_rows = 16 * (self.teams + self.groups) * _ROWS
        sums_of_dy = _ONES + 4 * self.teams * self.o_padded if self.item == 2 else 4 * 128 * 16 // self.item
        scales = 4 * self.stages * (_ROWS + self.o_padded) if self.scaled else 0
        return (_ALIGNMENT + self.stages * (stage + 16) + 8 + w + sums_of_rows + 4 * self.h_padded + sums_of_dy + scales)

    @property
    def exchanged_bytes(self) -> int:
        """What the teams leave in the stages at the end for the first of them to add."""
        return 4 * (self.teams - 1) * self.h_padded * self.o_padded

    @property
    def registers(self) -> int:
        """Estimate for a thread that multiplies: G, and a second set of sums, or dn, its small parts and xhat, and what addresses
        and fragments take. From compiled kernels."""
        g = self.o_padded // 2
        dn = 32 * (3 if self.planes > 1 and self.o_padded > 64 else 2)
        return g + max(g if self.scaled else 0, dn) + (40 if self.item == 2 else 64)


def _of_tile_mma(params: Params) -> Params:
    """The parameters of tile_mma that say the same of grids and sums."""
    return {**params, "rows": _ROWS, "blocks": 1}


def _blocks(problem: Problem, params: Params) -> Expr:
    return tile_mma.grid(problem, _of_tile_mma(params))


def _plan(problem: Problem, params: Params) -> Plan:
    sizes, blocks = _Sizes.of(problem, params), _blocks(problem, params)
    launch = Launch("tile_wgmma", blocks, sizes.threads + _BRINGING, sizes.shared_bytes)
    plan = reduction.with_reduction(problem, tile_mma.split_params(_of_tile_mma(params)), launch, (), blocks)
    return overlap.launched(plan, params)


def _too_wide(problem: Problem, params: Params, limits: Limits) -> str | None:
    if max(problem.hidden, problem.out) > _MOST_COLUMNS:
        return f"rows of up to {_MOST_COLUMNS} values of x and of dy fit with w on a multiprocessor; take another variant"
    return None


def _too_large(problem: Problem, params: Params, limits: Limits) -> str | None:
    sizes = _Sizes.of(problem, params)
    if reason := too_much_shared(sizes.shared_bytes, limits):
        return reason
    if sizes.stages <= sizes.teams:
        return f"{sizes.stages} stages hold no tile more than {sizes.teams} teams work on"
    if sizes.shares is None:
        return f"{sizes.teams} teams of {sizes.slices} warpgroups leave a thread too few registers"
    if sizes.exchanged_bytes > sizes.stages * _ROWS * (sizes.h_padded + sizes.o_padded) * sizes.item:
        return f"{sizes.stages} stages have no room for the sums of {sizes.teams} teams"
    if sizes.registers > sizes.shares[1]:
        return f"needs about {sizes.registers} registers a thread where {sizes.shares[1]} are there"
    return None


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    if reason := reduction.mismatched(problem, tile_mma.split_params(_of_tile_mma(params))):
        return reason
    shares = reduction.partial(problem, params, _blocks(problem, params))
    return reduction.too_much_workspace(problem, Plan((), shares), limits.sms)


def _inexact(problem: Problem, params: Params) -> str | None:
    return tile_mma.inexact(problem, _of_tile_mma(params))


def _wasteful(problem: Problem, params: Params) -> str | None:
    teams = number(params, "teams")
    if params["reduction"] == "single_block":
        return reduction.wasted(problem, tile_mma.split_params(_of_tile_mma(params)), _ROWS)
    if teams > 1 and -(-problem.rows // _ROWS) <= tile_mma.DETERMINISTIC_SMS * (teams - 1):
        return f"{problem.rows} rows have too few tiles of {_ROWS} for {teams} teams a block"
    return overlap.nothing_overlaps(problem, params, _plan)


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    sizes = _Sizes.of(problem, params)
    named = {"THREADS": sizes.threads, "TILE_ROWS": _ROWS, "STAGES": sizes.stages,
             "H_PADDED": sizes.h_padded, "O_PADDED": sizes.o_padded}
    if ahead := number(params, "prefetch"):
        named |= {"PREFETCH": ahead}
    if sizes.shares:
        named |= {"PRODUCER_REGISTERS": sizes.shares[0], "CONSUMER_REGISTERS": sizes.shares[1]}
    if params["reduction"] == "two_pass":
        named |= reduction.second_pass(problem, number(tile_mma.split_params(_of_tile_mma(params)), "splits"))
    return named


VARIANT = Variant(
    name="tile_wgmma",
    summary="tile_wgmma: as tile_mma, but warpgroups multiply, and one more brings the tiles.",
    choices={"arithmetic": ("fp16x3", "bf16x3", "fp16", "bf16"), "teams": (1, 2, 3), "stages": (2, 3, 4, 5, 6),
             "prefetch": (1, 0, 2), "reduction": ("atomic", "two_pass", "single_block"), "launches": overlap.LAUNCHES},
    defaults={"arithmetic": "fp16x3", "teams": 1, "stages": 2, "prefetch": 1, "reduction": "two_pass", "launches": "apart"},
    refuses=_refuses, inexact=_inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
    clashes=(Clash(("arithmetic",), wrong_gpu), Clash(("arithmetic",), tile_mma.wrong_arithmetic),
             Clash(("arithmetic",), _too_wide), Clash(("arithmetic", "teams", "stages"), _too_large),
             overlap.CLASH),
)

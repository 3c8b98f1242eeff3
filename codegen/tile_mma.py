"""The variant tile_mma."""

from __future__ import annotations

from dataclasses import dataclass

from codegen import reduction
from codegen.arithmetic import FINEST_CLASS, OWN_ARITHMETIC, PLANES
from codegen.dtypes import CLASS_ERRORS, ITEMSIZE
from codegen.expr import ROWS, SMS, Expr, ceil_div, const, minimum
from codegen.limits import Limits
from codegen.plan import Launch, Plan
from codegen.problem import Problem
from codegen.variant import Clash, Params, Variant, number, power_of_two, round_up, too_much_shared

DETERMINISTIC_SMS = 132
"""How many SMs a deterministic grid is made for, whatever GPU it runs on: those of an H100 or H200."""
_WORKING_REGISTERS = 32
"""The least a thread needs beside its sums and its part of xhat. What is allowed may still spill a little; it is then slower, and
measured so; what is refused would spill its sums."""
_MAX_REGISTERS = 255


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What follows from the parameters."""

    rows: int
    warps: int
    across: int
    blocks: int
    planes: int
    scaled: bool
    h_padded: int
    o_padded: int
    g_warps_o: int
    g_warps_h: int
    shared_bytes: int

    @classmethod
    def of(cls, problem: Problem, params: Params) -> _Sizes:
        rows, warps, across, stages, blocks = (number(params, name) for name in ("rows", "warps", "across", "stages", "blocks"))
        planes, scaled = PLANES[str(params["arithmetic"])], is_scaled(problem, params)
        o_padded, h_padded, g_warps_o, g_warps_h = _warps_of_g(problem, warps, across)
        item = ITEMSIZE[problem.dtype]
        dy_lanes = min(32, max(4, power_of_two(o_padded // 4)))
        tiles = stages * rows * (round_up(h_padded * item, 128) + round_up(o_padded * item, 128))
        dy_groups = 32 // dy_lanes * min(warps, rows // 8) if problem.dtype == "float32" else 1
        floats = rows * (4 + 2 * across) + h_padded + dy_groups * o_padded + (rows + o_padded if scaled else 0)
        shared = o_padded * round_up(h_padded * planes * 2, 128) + tiles + 4 * floats
        return cls(rows, warps, across, blocks, planes, scaled, h_padded, o_padded, g_warps_o, g_warps_h, shared)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def registers(self) -> int:
        """Estimate: G and a second set of sums that is promoted into it, or dn and xhat."""
        g = self.o_padded * self.h_padded // self.threads
        dn = self.rows * self.h_padded // self.threads
        return g + max(g if self.scaled else 0, 2 * dn) + _WORKING_REGISTERS


def is_scaled(problem: Problem, params: Params) -> bool:
    """Whether values are scaled before they are rounded: float32 reaches far beyond float16."""
    return problem.dtype == "float32" and str(params["arithmetic"]).startswith("fp16")


def _warps_of_g(problem: Problem, warps: int, across: int) -> tuple[int, int, int, int]:
    """(padded O, padded H, warps along O, warps along H): the grid of warps over G that pads least, of those the squarest."""
    def grid(warps_o: int) -> tuple[int, int, int, int]:
        warps_h = warps // warps_o
        return (round_up(problem.out, 16 * max(across, warps_o)), round_up(problem.hidden, 16 * max(across, warps_h)),
                warps_o, warps_h)

    def cost(choice: tuple[int, int, int, int]) -> tuple[int, int]:
        o_padded, h_padded, warps_o, warps_h = choice
        return o_padded * h_padded, o_padded // warps_o + h_padded // warps_h

    return min((grid(1 << exponent) for exponent in range(warps.bit_length())), key=cost)


def grid(problem: Problem, params: Params) -> Expr:
    """The grid: so many blocks an SM, but no more than there are tiles."""
    if params["reduction"] == "single_block":
        return const(1)
    sms = const(DETERMINISTIC_SMS) if problem.deterministic else SMS
    return minimum(sms * number(params, "blocks"), ceil_div(ROWS, number(params, "rows")))


def split_params(params: Params) -> Params:
    """The parameters that codegen/reduction.py looks at; `splits` is that of a typical GPU."""
    splits = 1 if params["reduction"] == "single_block" else DETERMINISTIC_SMS * number(params, "blocks")
    return {"reduction": params["reduction"], "splits": splits}


def _plan(problem: Problem, params: Params) -> Plan:
    sizes, blocks = _Sizes.of(problem, params), grid(problem, params)
    launch = Launch("tile_mma", blocks, sizes.threads, sizes.shared_bytes)
    return reduction.with_reduction(problem, split_params(params), launch, (), blocks)


def wrong_arithmetic(problem: Problem, params: Params, limits: Limits) -> str | None:
    own = OWN_ARITHMETIC.get(problem.dtype, params["arithmetic"])
    return None if params["arithmetic"] == own else f"data of {problem.dtype} is multiplied as it is; take arithmetic={own}"


def _wrong_tile(problem: Problem, params: Params, limits: Limits) -> str | None:
    rows, warps, across = (number(params, name) for name in ("rows", "warps", "across"))
    if (rows % (8 * warps) and rows != 4 * warps) or (rows * across) % (16 * warps):
        return f"{warps} warps, {across} to a row, do not share out tiles of {rows} rows"
    return None


def _too_large(problem: Problem, params: Params, limits: Limits) -> str | None:
    sizes = _Sizes.of(problem, params)
    if reason := too_much_shared(sizes.shared_bytes, limits):
        return reason
    available = min(_MAX_REGISTERS, limits.registers_per_sm // (sizes.threads * sizes.blocks))
    if sizes.registers > available:
        return f"needs about {sizes.registers} registers a thread where {available} are there"
    resident = limits.shared_per_sm // (sizes.shared_bytes + limits.reserved_shared)
    if sizes.blocks > max(1, resident):
        return f"shared memory of {limits.name} holds {resident} of the {sizes.blocks} blocks an SM that are asked for"
    return None


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    if reason := reduction.mismatched(problem, split_params(params)):
        return reason
    if params["reduction"] == "single_block" and params["blocks"] != 1:
        return "reduction=single_block is one block; it takes blocks=1"
    shares = reduction.partial(problem, params, grid(problem, params))
    return reduction.too_much_workspace(problem, Plan((), shares), limits.sms)


def inexact(problem: Problem, params: Params) -> str | None:
    arithmetic, tile_rows = str(params["arithmetic"]), number(params, "rows")
    if problem.dtype == "float32" and CLASS_ERRORS[FINEST_CLASS[arithmetic]] > CLASS_ERRORS[problem.accuracy]:
        return f"{arithmetic} products are coarser than the accuracy class {problem.accuracy}"
    # A chain of G and db has one term for every tile of a block; without scales the tensor cores add up row by row.
    chains = 1 if params["reduction"] == "single_block" else DETERMINISTIC_SMS * number(params, "blocks")
    return reduction.long_chain(problem, chains * (tile_rows if is_scaled(problem, params) else 1))


def _wasteful(problem: Problem, params: Params) -> str | None:
    rows = number(params, "rows")
    if params["reduction"] == "single_block":
        return reduction.wasted(problem, split_params(params), rows)
    if number(params, "blocks") > 1 and -(-problem.rows // rows) <= DETERMINISTIC_SMS * (number(params, "blocks") - 1):
        return f"{problem.rows} rows have too few tiles of {rows} for {params['blocks']} blocks an SM"
    return None


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    sizes = _Sizes.of(problem, params)
    named = {"THREADS": sizes.threads, "WARPS": sizes.warps, "BLOCKS": sizes.blocks, "TILE_ROWS": sizes.rows,
             "ACROSS": sizes.across, "STAGES": number(params, "stages"), "AHEAD": number(params, "ahead"),
             "H_PADDED": sizes.h_padded, "O_PADDED": sizes.o_padded,
             "G_WARPS_O": sizes.g_warps_o, "G_WARPS_H": sizes.g_warps_h}
    if params["reduction"] == "two_pass":
        named |= reduction.second_pass(problem, number(split_params(params), "splits"))
    return named


VARIANT = Variant(
    name="tile_mma",
    summary="tile_mma: one pass over x and dy for small w; tensor cores multiply, w and G = dy^T @ xhat stay on chip.",
    choices={"arithmetic": ("fp16x3", "bf16x3", "fp16", "bf16"), "rows": (16, 32, 64, 128, 256), "warps": (4, 8, 16),
             "across": (1, 2, 4), "stages": (1, 2, 3), "blocks": (1, 2, 3, 4), "ahead": (0, 1),
             "reduction": ("atomic", "two_pass", "single_block")},
    defaults={"arithmetic": "fp16x3", "rows": 64, "warps": 8, "across": 2, "stages": 2, "blocks": 1, "ahead": 1,
              "reduction": "two_pass"},
    refuses=_refuses, inexact=inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
    clashes=(Clash(("arithmetic",), wrong_arithmetic), Clash(("rows", "warps", "across"), _wrong_tile),
             Clash(("arithmetic", "rows", "warps", "across", "stages", "blocks"), _too_large)),
)

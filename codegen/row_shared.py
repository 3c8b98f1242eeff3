"""The variant row_shared."""

from __future__ import annotations

from dataclasses import dataclass

from codegen import overlap, reduction
from codegen.expr import ONE, ROWS, Expr, ceil_div, minimum
from codegen.limits import Limits
from codegen.plan import Launch, Plan
from codegen.problem import Problem
from codegen.variant import Clash, Params, Variant, number, round_up, too_much_shared


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What follows from the parameters; all in elements."""

    tile_o: int
    tile_h: int
    o_pitch: int
    h_pitch: int
    tile_rows: int
    end_values: int
    lane_columns: int
    thread_tiles: int

    @classmethod
    def of(cls, problem: Problem, params: Params) -> _Sizes:
        threads, lanes, vector = (number(params, name) for name in ("threads", "lanes", "vector"))
        tile_o, tile_h = (int(part) for part in str(params["tile"]).split("x"))
        o_pitch, h_pitch = round_up(problem.out, max(4, tile_o)), round_up(problem.hidden, max(4, tile_h))
        end_values = o_pitch if params["grads"] == "identity" else 2 * threads // 32 * h_pitch
        return cls(tile_o, tile_h, o_pitch, h_pitch, _tile_rows(params), end_values,
                   -(-h_pitch // (lanes * vector)) * vector,
                   -(-(o_pitch // tile_o * (h_pitch // tile_h)) // threads))

    @property
    def shared_bytes(self) -> int:
        values = (self.o_pitch * self.h_pitch + self.tile_rows * (self.h_pitch + self.o_pitch) + 2 * self.h_pitch
                  + self.end_values)
        return 4 * values

    def registers(self, rows: int, direct: bool) -> int:
        """Estimate: sums that live for the whole kernel, one tile's operands, and 40 for addresses and the rest."""
        sums = self.thread_tiles * self.tile_o * (self.tile_h + 1) + (2 * self.lane_columns if direct else 0)
        return sums + 2 * rows * self.lane_columns + 40


def _tile_rows(params: Params) -> int:
    return number(params, "threads") // number(params, "lanes") * number(params, "rows")


def _splits(params: Params) -> Expr:
    if params["reduction"] == "single_block":
        return ONE
    return minimum(number(params, "splits"), ceil_div(ROWS, _tile_rows(params)))


def _plan(problem: Problem, params: Params) -> Plan:
    splits = _splits(params)
    launch = Launch("row_shared", splits, number(params, "threads"), _Sizes.of(problem, params).shared_bytes)
    return overlap.launched(reduction.with_reduction(problem, params, launch, (), splits), params)


def _does_not_fit(problem: Problem, params: Params, limits: Limits) -> str | None:
    sizes = _Sizes.of(problem, params)
    threads, lanes, vector = (number(params, name) for name in ("threads", "lanes", "vector"))
    if reason := too_much_shared(sizes.shared_bytes, limits):
        return reason
    available = min(255, limits.registers_per_sm // threads)
    if (needed := sizes.registers(number(params, "rows"), params["grads"] == "direct")) > available:
        return f"needs about {needed} registers a thread where {available} are there"
    if lanes * vector >= 2 * sizes.h_pitch and (lanes, vector) != (4, 1):
        return f"lanes={lanes} and vector={vector} leave half of the lanes without a column of {problem.hidden}"
    if sizes.thread_tiles > 1 and sizes.tile_o * sizes.tile_h < 16:
        return f"tile={params['tile']} takes more shared-memory reads than products; use larger tiles"
    return None


def _mismatched(problem: Problem, params: Params, limits: Limits) -> str | None:
    return reduction.mismatched(problem, params)


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    return reduction.too_much_workspace(problem, Plan((), reduction.partial(problem, params, _splits(params))))


def _inexact(problem: Problem, params: Params) -> str | None:
    if problem.out > reduction.max_chain(problem):
        return f"sums {problem.out} products in one float32 chain, which loses the accuracy of class {problem.accuracy}"
    return reduction.long_chain(problem, number(params, "splits"))


def _wasteful(problem: Problem, params: Params) -> str | None:
    return reduction.wasted(problem, params, _tile_rows(params)) or overlap.nothing_overlaps(problem, params, _plan)


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    sizes, threads = _Sizes.of(problem, params), number(params, "threads")
    warps = {"WARPS": threads // 32} if params["grads"] == "direct" else {}
    return {"THREADS": threads, **warps, "LANES": number(params, "lanes"), "ROWS": number(params, "rows"),
            "VECTOR": number(params, "vector"), "TILE_O": sizes.tile_o, "TILE_H": sizes.tile_h, "O_PITCH": sizes.o_pitch,
            "H_PITCH": sizes.h_pitch, "IDENTITY": int(params["grads"] == "identity")}


VARIANT = Variant(
    name="row_shared",
    summary="row_shared: tiles of rows and w staged in shared memory; blocks stay and sum the parameter gradients on chip.",
    choices={"threads": (64, 128, 256, 512), "lanes": (4, 8, 16, 32), "rows": (1, 2, 4, 8), "vector": (1, 2, 4),
             "tile": ("1x1", "2x2", "2x4", "4x4", "8x4", "8x8"), "grads": ("direct", "identity"), "splits": reduction.SPLITS,
             "reduction": ("atomic", "two_pass", "single_block"), "launches": overlap.LAUNCHES},
    defaults={"threads": 256, "lanes": 8, "rows": 1, "vector": 1, "tile": "4x4", "grads": "direct", "splits": 64,
              "reduction": "two_pass", "launches": "apart"},
    refuses=_refuses, inexact=_inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
    clashes=(Clash(("threads", "lanes", "rows", "vector", "tile", "grads"), _does_not_fit),
             Clash(("splits", "reduction"), _mismatched), overlap.CLASH),
)

"""The variant gemm_wgmma: gemm_mma's launches, with products of whole warpgroups and copies in bulk, which Hopper alone has."""

from __future__ import annotations

from dataclasses import replace

from codegen import gemm_mma, gemm_plan, reduction
from codegen.arithmetic import PLANES
from codegen.dtypes import ITEMSIZE
from codegen.gemm_tiles import Tiles, sizes_of
from codegen.limits import Limits
from codegen.plan import Plan
from codegen.problem import Problem
from codegen.variant import Clash, Params, Variant, number, round_up, too_much_shared

_ARCH = "sm_90a"
"""The only architecture with wgmma and setmaxnreg ("Asynchronous Warpgroup Level Matrix Instructions" of the PTX ISA)."""

_COPIERS = 128
"""Threads of a block beside those that multiply: registers are given to whole warpgroups, so one thread's work takes one."""

_ALIGNMENT = 1024
"""Bytes a swizzle repeats after: cells begin at multiples of it."""

_BARRIERS = 128
"""Bytes for the barriers that are not of stages, and for the numbers of tiles."""

_PACE = 4
"""Stages of a tile of G between two looks at how far tiles of dn have come."""

_SPLIT_AGAIN = 8
"""How often values may be taken apart anew, as in gemm_mma."""

_PAD = 16
"""Bytes between rows of dy that lie in shared memory as they are."""

_WIDE = ("wide", "rounded")
"""Values of `finish`: as second, but the ends of tiles move 16 bytes a thread, of 16-bit data alone. With rounded, dn is rounded
to the data type while it waits in dx; the bound of every element has room for that (tuner/bounds.py)."""

_HALVED = (0, 8, 24)
"""Last rows of tiles of dn whose depth two blocks share: best those that all blocks take together at the end. At 8,1024,768,2304
with tiles of 128x192 these are 8 rows, at 64,197,768,3072 with tiles of 128x256 19 of them."""

_MANY_TILES = 8
"""Tiles of a block above which it matters little when its last one ends."""

_MOST_STAGES = 6
_ENOUGH_STAGES = 96 << 10
"""Bytes of all stages below which there is room for more of them."""

_REGISTERS = {1: (0, 255), 2: (40, 232)}
"""By how many warpgroups multiply: registers of a thread that copies (0: as it began), and of one that multiplies. Multiples of 8
that come, with those of all warpgroups, to what the SM has for a block of so many."""


_MORE_COPYING = {1: (0, 255), 2: (56, 224)}
"""The same where those that copy also go through the rows of dy."""

_ADDING = {1: (0, 255), 2: (88, 208)}
"""The same where they add them up too."""


def _registers_of(params: Params) -> tuple[int, int]:
    copying = {"first": _REGISTERS, "fragments": _MORE_COPYING, "none": _ADDING}
    return copying[str(params["split"])][number(params, "groups")]


def _tiles(problem: Problem, params: Params) -> Tiles:
    """The geometry of gemm_mma, with other warps and with all operands in cells."""
    tiles = Tiles.of(problem, {"finish": "second", "split": "first", **params, "warps": f"{4 * number(params, 'groups')}x1"})
    copies_dy = params["split"] == "none"
    return replace(tiles, holds_dy=not tiles.raw_dy and not copies_dy, cells=True, copies_dy=copies_dy)


def _shared_bytes(problem: Problem, tiles: Tiles) -> int:
    """Of a block: room to align, the stages with their scales, what the epilogue of G needs, and barriers."""
    cells = 2 * tiles.planes * tiles.block_n * tiles.block_k
    size, (long, short) = ITEMSIZE[problem.dtype], sorted((tiles.block_m, tiles.block_k), reverse=True)
    if tiles.raw_dy:
        cells += round_up(long * (short * size + _PAD), _ALIGNMENT)
    else:
        cells += 2 * tiles.planes * tiles.block_m * tiles.block_k
    scales = 4 * ((0 if tiles.raw_dy else tiles.block_m) + tiles.block_n) * (tiles.stages + 1) if tiles.scaled else 0
    epilogue = 4 * (tiles.db_shares * tiles.block_m + 2 * tiles.warps_m * tiles.block_n) if gemm_plan.needs(problem)[1] else 0
    return _ALIGNMENT + tiles.stages * (cells + 16) + scales + epilogue + _BARRIERS


def _plan(problem: Problem, params: Params) -> Plan:
    tiles = _tiles(problem, params)
    return gemm_plan.plan_of(problem, params, tiles, "gemm_wgmma", tiles.threads + _COPIERS, _shared_bytes(problem, tiles))


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    named = gemm_plan.constants_of(problem, params, _tiles(problem, params))
    copying, multiplying = _registers_of(params)
    if copying and (gemm_plan.needs(problem)[0] or gemm_plan.needs(problem)[1]):
        named |= {"PRODUCER_REGISTERS": copying, "CONSUMER_REGISTERS": multiplying}
    alone = params["split"] == "none" and not params["halved"] and params["cluster"] == 1
    side_by_side = alone and _keeps_pace(problem, params)
    if side_by_side or (params["split"] == "fragments" and all(gemm_plan.needs(problem)[:2])):
        named["PACE"] = _PACE
    if params["halved"] and gemm_plan.needs(problem)[0]:
        named["HALVED"] = number(params, "halved")
    if (cluster := number(params, "cluster")) > 1 and any(gemm_plan.needs(problem)[:2]):
        named["CLUSTER"] = cluster
    return named


def wrong_gpu(problem: Problem, params: Params, limits: Limits) -> str | None:
    return None if limits.arch == _ARCH else f"multiplies with instructions of {_ARCH}, which {limits.name} ({limits.arch}) lacks"


def _wrong_tile(problem: Problem, params: Params, limits: Limits) -> str | None:
    (block_m, _), groups = sizes_of(params, "tile"), number(params, "groups")
    if block_m % (64 * groups):
        return f"tile={params['tile']} is not shared out among {groups} warpgroups in 64 rows each"
    return None


def _wrong_fragments(problem: Problem, params: Params, limits: Limits) -> str | None:
    """What split=fragments is built for: a stage is all that shares a scale."""
    if params["split"] != "fragments":
        return "cells are no deeper than 64; take depth=64" if params["depth"] == 128 else None
    if problem.dtype == "float32" and params["depth"] == 128:
        return "split=fragments scales 64 of depth at once; take depth=64"
    if number(params, "promote") not in (0, params["depth"]):
        return f"split=fragments promotes after each stage, or at the end alone; take promote=0 or promote={params['depth']}"
    return "split=fragments takes deeper stages; take depth=64" if params["depth"] == 32 else None


def _something_to_split(problem: Problem, params: Params, limits: Limits) -> str | None:
    if params["split"] == "none" and problem.dtype == "float32":
        return "float32 data is taken apart before it is multiplied; take split=first or split=fragments"
    if params["split"] == "none" and params["promote"]:
        return "split=none leaves all sums to the tensor cores; take promote=0"
    return None


def _wrong_halves(problem: Problem, params: Params, limits: Limits) -> str | None:
    if params["halved"] and (params["split"] != "none" or params["finish"] == "epilogue"):
        return "halves of the depth of dn are built for split=none and finish=second; take halved=0"
    return None


def _wrong_pairs(problem: Problem, params: Params, limits: Limits) -> str | None:
    """What cluster=2 is built for: tiles in any order, which those of split=fragments are not."""
    if params["cluster"] == 2 and params["split"] == "fragments":
        return "split=fragments keeps tiles of G and dn in step, which pairs of blocks do not; take cluster=1"
    return None


def _wrong_ends(problem: Problem, params: Params, limits: Limits) -> str | None:
    """What finish=wide and finish=rounded are built for: values of 16 bits alone."""
    finish = params["finish"]
    if finish not in _WIDE:
        return None
    if params["split"] != "none" or problem.param_dtype == "float32":
        return f"finish={finish} moves 16-bit data and parameters as they are; take finish=second, or split=none for such"
    if finish == "rounded" and problem.dtype != "bfloat16":
        return "dn may be larger than float16 holds; take finish=wide"
    return None


def _holds_rows(params: Params, split: str) -> bool:
    """Whether registers hold the rows of dx that a tile finishes, beside what `split` needs. From compiled kernels."""
    (block_m, block_n), groups = sizes_of(params, "tile"), number(params, "groups")
    return split == "first" or (block_m <= 64 * groups and (split == "fragments" or block_n <= 128))


def _wrong_finish(problem: Problem, params: Params, limits: Limits) -> str | None:
    if params["finish"] == "epilogue" and not _holds_rows(params, str(params["split"])):
        return f"rows of dx of tile={params['tile']} do not fit the registers with split={params['split']}; take finish=second"
    return None


def _wrong_depth(problem: Problem, params: Params, limits: Limits) -> str | None:
    if params["depth"] == 32 and not (problem.dtype == "float32" and str(params["arithmetic"]).startswith("fp16")):
        return "planes of dy that both products share are cut in squares, 64 values each way; take depth=64"
    return None


def _too_large(problem: Problem, params: Params, limits: Limits) -> str | None:
    tiles = _tiles(problem, params)
    if reason := too_much_shared(_shared_bytes(problem, tiles), limits):
        return reason
    if tiles.row_steps > gemm_mma.MAX_ROW_STEPS:
        return f"a row of {problem.hidden} values does not fit the registers of the threads that share it"
    available = _registers_of(params)[1]
    if (registers := _registers(tiles)) > available:
        return f"needs about {registers} registers a thread where {available} are there"
    return None


def _registers(tiles: Tiles) -> int:
    """Estimate for a thread that multiplies: its sums, twice where they are promoted, two sets of fragments where it makes them,
    and 24; or, where it finishes dx, its sums, the values of xhat beside those of a row, and 48. From compiled kernels."""
    sums = tiles.block_m * tiles.block_n // tiles.threads
    multiplying = sums * (2 if tiles.promote else 1) + 24
    if tiles.raw_dy:
        fragments = tiles.planes * tiles.block_m * tiles.block_k // (2 * tiles.threads)
        multiplying += (2 if tiles.promote else 1) * fragments
    return max(multiplying, sums + tiles.block_n // 4 + 48) if tiles.finishes else multiplying


def _too_much_workspace(problem: Problem, params: Params, limits: Limits) -> str | None:
    return reduction.too_much_workspace(problem, _plan(problem, {**VARIANT.defaults, **params}))


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    return None  # all of it clashes


def _wasteful(problem: Problem, params: Params) -> str | None:
    (block_m, block_n), groups = sizes_of(params, "tile"), number(params, "groups")
    if params["finish"] == "epilogue" and "dx" not in problem.wants:
        return "without dx there is nothing to finish; finish=second does the same"
    if (block_m > 64 and block_m >= 2 * max(problem.rows, problem.out)) or (block_n > 64 and block_n >= 2 * problem.hidden):
        return f"tile={params['tile']} is mostly padding; take a smaller one"
    if reason := _wasteful_ends(problem, params):
        return reason
    if params["halved"] and (reason := _wasteful_halves(problem, params)):
        return reason
    if groups == 1 and block_m > 64 and params["promote"]:
        return "one warpgroup has nothing to multiply while it promotes; take groups=2"
    if params["split"] != "first" and (reason := _wasteful_copies(problem, params)):
        return reason
    if params["split"] != "none" and _needs_no_split(problem, params):
        return f"{problem.dtype} data is multiplied as it is; split=none makes nothing of dy first"
    stage = 2 * PLANES[str(params["arithmetic"])] * (block_m + block_n) * number(params, "depth")
    if (stages := number(params, "stages")) < _MOST_STAGES and stages * stage < _ENOUGH_STAGES:
        return f"{stages} stages are little to have on the way; take more"
    return (gemm_mma.wasteful_arithmetic(problem, params)
            or gemm_mma.wasteful_order(problem, params, _tiles(problem, params)))


def _needs_no_split(problem: Problem, params: Params) -> bool:
    """Whether split=none does the same with less. Measured on an H200 with bfloat16 data: at 8,1024,768,2304 136 against 155 us,
    at 16,512,1024,4096 259 against 288, at 1,262144,128,512 270 against 290."""
    possible = params["finish"] != "epilogue" or _holds_rows(params, "none")
    return problem.dtype != "float32" and _copied_16_bytes(problem) and any(gemm_plan.needs(problem)[:2]) and possible


def _copied_16_bytes(problem: Problem) -> bool:
    """Whether rows of dy begin 16 bytes apart, or a multiple of that."""
    return problem.out * ITEMSIZE[problem.dtype] % _PAD == 0


def _wasteful_halves(problem: Problem, params: Params) -> str | None:
    if _tiles_of_block(problem, params) > _MANY_TILES:
        return "the last of so many tiles are little of all; take halved=0"
    if number(params, "halved") > 8 and params["finish"] not in _WIDE:
        return "so many halves pay where the ends of tiles are short; take halved=8"
    fewer = [value for value in _HALVED if 0 < value < number(params, "halved")]
    if fewer and 2 * fewer[-1] * _tiles(problem, params).tiles_h >= gemm_plan.MOST_BLOCKS:
        return f"halves of {fewer[-1]} rows of tiles are enough for all blocks; take halved={fewer[-1]}"
    return None


def _wasteful_ends(problem: Problem, params: Params) -> str | None:
    """Of finish=wide and finish=rounded."""
    finish = params["finish"]
    if finish not in _WIDE:
        return None
    if problem.hidden * ITEMSIZE[problem.dtype] % _PAD:
        return f"rows of {problem.hidden} values of w cannot be moved {_PAD} bytes at a time; finish=second does the same"
    dn, g, _ = gemm_plan.needs(problem)
    if finish == "rounded" and not dn:
        return "without dx there is no dn to round; finish=wide does the same"
    if finish == "wide" and dn and problem.dtype == "bfloat16":
        return "dn would be written to memory in 32 bits, where finish=rounded takes 16"
    return None if dn or g else "nothing is multiplied; finish=second does the same"


def _tiles_of_block(problem: Problem, params: Params) -> float:
    (dn, g, _), tiles = gemm_plan.needs(problem), _tiles(problem, params)
    rows_of_tiles = -(-problem.rows // tiles.block_m) * dn + tiles.g_tiles_o * number(params, "parts") * g
    return rows_of_tiles * tiles.tiles_h / gemm_plan.MOST_BLOCKS


def _keeps_pace(problem: Problem, params: Params) -> bool:
    """Whether tiles of G and of dn that read the same rows of dy are kept in step (templates/_wgmma_pace.cu.j2)."""
    (dn, g, _), tiles = gemm_plan.needs(problem), _tiles(problem, params)
    return dn and g and 2 * number(params, "parts") * tiles.g_tiles_o * tiles.tiles_h <= gemm_plan.MOST_BLOCKS


def _wasteful_copies(problem: Problem, params: Params) -> str | None:
    """Of dy as it is."""
    if not any(gemm_plan.needs(problem)[:2]):
        return "nothing is multiplied; split=first does the same"
    if not _copied_16_bytes(problem):
        return f"rows of {problem.out} values of dy cannot be copied {_PAD} bytes at a time; take split=first"
    if params["split"] == "none":
        return None
    if params["group"] != 4 and not _keeps_pace(problem, params):
        return "group is how far tiles of G may be ahead of those of dn, which they are not here; group=4 does the same"
    if (columns := _tiles(problem, params).tiles_h) > _SPLIT_AGAIN:
        return f"split=fragments takes dy apart anew for each of {columns} columns of tiles; split=first does it once"
    return None


VARIANT = Variant(
    name="gemm_wgmma",
    summary="gemm_wgmma: as gemm_mma, but warpgroups multiply planes that lie in memory as Hopper's tensor cores want them.",
    choices={"arithmetic": ("fp16x3", "bf16x6", "bf16x3", "fp16", "bf16"), "split": ("first", "fragments", "none"),
             "tile": ("128x128", "128x192", "256x128", "128x256", "128x64", "64x128", "64x64"), "groups": (2, 1),
             "depth": (64, 32, 128), "promote": (64, 128, 256, 0), "stages": (3, 2, 4, 5, 6),
             "reduction": ("two_pass", "atomic", "direct"), "parts": gemm_plan.PARTS,
             "finish": ("second", "epilogue", "wide", "rounded"),
             "group": (8, 4), "halved": _HALVED, "cluster": (1, 2)},
    defaults={"arithmetic": "fp16x3", "split": "first", "tile": "128x128", "groups": 2, "depth": 64, "promote": 64, "stages": 3,
              "reduction": "two_pass", "parts": 2, "finish": "second", "group": 8, "halved": 0, "cluster": 1},
    refuses=_refuses, inexact=gemm_mma.inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
    clashes=(Clash(("arithmetic",), wrong_gpu), Clash(("arithmetic",), gemm_mma.wrong_arithmetic),
             Clash(("tile", "groups"), _wrong_tile), Clash(("tile", "finish"), gemm_mma.beyond_tile),
             Clash(("arithmetic", "depth"), _wrong_depth),
             Clash(("arithmetic", "promote"), gemm_mma.unscaled),
             Clash(("split", "promote"), _something_to_split),
             Clash(("split", "depth", "promote"), _wrong_fragments),
             Clash(("split", "tile", "groups", "finish"), _wrong_finish), Clash(("split", "finish"), _wrong_ends),
             Clash(("arithmetic", "split", "tile", "groups", "depth", "promote", "stages"), _too_large),
             Clash(("split", "finish", "halved"), _wrong_halves),
             Clash(("split", "cluster"), _wrong_pairs),
             Clash(("reduction", "parts"), gemm_mma.mismatched),
             Clash(("arithmetic", "split", "tile", "depth", "promote", "reduction", "parts", "finish", "halved"),
                   _too_much_workspace)),
    meanings={"CLUSTER": "blocks that take tiles with the same columns and share the copies of what these need"},
)

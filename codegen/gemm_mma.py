"""The variant gemm_mma."""

from __future__ import annotations

from codegen import reduction
from codegen.arithmetic import FINEST_CLASS, OWN_ARITHMETIC, WHOLE
from codegen.dtypes import CLASS_ERRORS
from codegen.gemm_plan import PARTS, constants_of, finishes_rows, needs, plan_of, prepared, workspace
from codegen.gemm_tiles import Tiles, sizes_of
from codegen.limits import Limits
from codegen.plan import Plan
from codegen.problem import Problem
from codegen.variant import Clash, Outdone, Params, Variant, number, too_much_shared

_EXACT_DEPTH = 64
"""Depth of a sum on tensor cores that keeps the accuracy of float32: every product truncates the sum once for each step in depth.
Measured on an H200 at 8,1024,768,2304 with fp16x3: errors up to 9.9e-7 after 256, 5.3e-7 after 128, 3.5e-7 after 64, and as fast;
float32 sums of cuBLAS have 3e-7 at a depth of 1024."""

_SPLIT_AGAIN = 8
"""How often values may be taken apart anew: as often, writing and reading their planes takes as long."""

_CACHED = 128 << 20
"""Bytes that no L2 cache of the GPUs known here keeps from one kernel to the next."""

MAX_ROW_STEPS = 4
"""Vectors of eight values of a row that a lane of gemm_prepare and gemm_finish can hold."""

_ENOUGH_TILES = 1024
"""Tiles that keep any GPU busy, to the last of them: eight for each SM of an H200."""

_OUTDONE_FROM, _OUTDONE_WIDTH = 1 << 28, 128
"""Multiply-adds of a product, and values of H and of O, from which warpgroups multiply faster. The smallest that was measured on
an H200 is 8,128,256,1024, the narrowest 1,262144,128,512: this variant's best took 25.5 and 1006 us, gemm_wgmma's 19.0 and 643
(float32; 1.2 to 1.6 times as long at every shape between and above, in bfloat16 too). At 8,1024,768,2304 none of the 472
configs of it in reports/h200/spaces comes near: 586 us, and 373."""


def _plan(problem: Problem, params: Params) -> Plan:
    tiles = Tiles.of(problem, params)
    return plan_of(problem, params, tiles, "gemm_mma", tiles.threads, tiles.shared_bytes)


def wrong_arithmetic(problem: Problem, params: Params, limits: Limits) -> str | None:
    """Of 16-bit data: an arithmetic that is not its own."""
    own = OWN_ARITHMETIC.get(problem.dtype)
    if own is not None and params["arithmetic"] != own:
        return f"{problem.dtype} data is multiplied as it is; take arithmetic={own}"
    return None


def unscaled(problem: Problem, params: Params, limits: Limits) -> str | None:
    """Scales that would hold for no depth at all."""
    if str(params["arithmetic"]).startswith("fp16") and problem.dtype == "float32" and not number(params, "promote"):
        return "scales of float16 hold for the depth between promotions; take promote=64"
    return None


def _wrong_stages(problem: Problem, params: Params, limits: Limits) -> str | None:
    copied = problem.dtype != "float32" or params["arithmetic"] in WHOLE
    if params["split"] == "loop" and not copied and params["stages"] != 2:
        return f"split=loop stores the next step of depth alone ahead, not stages={params['stages']}; take stages=2"
    return None


def _nothing_to_split(problem: Problem, params: Params, limits: Limits) -> str | None:
    if params["split"] == "fragments" and problem.dtype != "float32":
        return f"{problem.dtype} data is multiplied as it is, with nothing to take apart in the fragments; take split=first"
    if params["arithmetic"] in WHOLE and params["split"] != "loop":
        return f"arithmetic={params['arithmetic']} reads x, dy and w as they are and makes no planes first; take split=loop"
    return None


def _wrong_fragments(problem: Problem, params: Params, limits: Limits) -> str | None:
    """What split=fragments is built for: a tile of depth is all that shares a scale, and a thread's copies of dy lie in order."""
    if params["split"] != "fragments":
        return None
    if params["depth"] != 64 or number(params, "promote") not in (0, 64):
        return "split=fragments scales 64 of depth at once; take depth=64 and promote=64"
    if params["stages"] == 4:
        return "split=fragments waits for the next tile of depth alone; take stages=3, or stages=2 and more blocks"
    (block_m, _), (warps_m, warps_n) = sizes_of(params, "tile"), sizes_of(params, "warps")
    if 32 * warps_m * warps_n < 2 * block_m:
        return f"{32 * warps_m * warps_n} threads are too few to copy dy for tile={params['tile']} in order; take more warps"
    return None


def _wrong_depth(problem: Problem, params: Params, limits: Limits) -> str | None:
    if (params["arithmetic"] == "ffma") != (params["depth"] == 16):
        return f"arithmetic={params['arithmetic']} does not go with depth={params['depth']}; ffma takes 16, the others more"
    return None


def _wrong_tile(problem: Problem, params: Params, limits: Limits) -> str | None:
    block_m, block_n = sizes_of(params, "tile")
    warps_m, warps_n = sizes_of(params, "warps")
    if block_m // warps_m < 16 or block_n // warps_n < 16:
        return f"tile={params['tile']} has too little for {params['warps']} warps; each needs 16x16"
    if 32 * warps_m * warps_n % max(block_m, block_n):
        return f"{32 * warps_m * warps_n} threads cannot share out the copies of a tile of {params['tile']}; take more warps"
    return None


def beyond_tile(problem: Problem, params: Params, limits: Limits) -> str | None:
    """Rows that a tile does not hold whole."""
    (_, block_n), hidden = sizes_of(params, "tile"), problem.hidden
    if params["finish"] == "epilogue" and hidden > block_n:
        return f"a tile of {params['tile']} holds {block_n} of the {hidden} values of a row of dn; take finish=second"
    return None


def _too_large(problem: Problem, params: Params, limits: Limits) -> str | None:
    tiles = Tiles.of(problem, params)
    if reason := too_much_shared(tiles.shared_bytes, limits):
        return reason
    if tiles.row_steps > MAX_ROW_STEPS:
        return f"a row of {problem.hidden} values does not fit the registers of the threads that share it"
    if tiles.registers > (available := min(255, limits.registers_per_sm // tiles.threads)):
        return f"needs about {tiles.registers} registers a thread where {available} are there"
    return None


def mismatched(problem: Problem, params: Params, limits: Limits) -> str | None:
    """What does not go together of reduction, parts and the gradients wanted."""
    parts, (_, g, _) = number(params, "parts"), needs(problem)
    if problem.deterministic and params["reduction"] == "atomic":
        return "atomic additions come in another order in every run; a deterministic kernel cannot use them"
    if params["reduction"] == "atomic" and problem.param_dtype != "float32":
        return f"atomic additions need float32 gradients, not {problem.param_dtype}; take two_pass or direct"
    if params["reduction"] != "direct" and not g:
        return f"reduction={params['reduction']} has no parts to add up where no gradient of w, gamma and beta is wanted"
    if (params["reduction"] == "direct") != (parts == 1):
        return f"reduction={params['reduction']} does not go with parts={parts}; direct takes 1, the others more"
    return None


def _too_much_workspace(problem: Problem, params: Params, limits: Limits) -> str | None:
    # What the clash does not look at changes nothing about it. With most parts, all of them summed, most is needed: where that
    # fits, there is no need to look at parts and reduction.
    sizes = {name: params[name] for name in ("arithmetic", "split", "tile", "promote", "depth", "finish")}
    most = {**VARIANT.defaults, **sizes, "reduction": "two_pass", "parts": max(PARTS)}
    if _more_workspace_than_allowed(problem, most) is None:
        return None
    return _more_workspace_than_allowed(problem, {**most, "reduction": params["reduction"], "parts": params["parts"]})


def _more_workspace_than_allowed(problem: Problem, params: Params) -> str | None:
    return reduction.too_much_workspace(problem, Plan((), workspace(problem, params, Tiles.of(problem, params))))


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    return None  # all of it clashes


def chain(problem: Problem, parts: int, promote: int) -> int:
    """The most terms that are added one after the other in float32: of dn, along OUT; of G, along one part of the rows."""
    dn, g, _ = needs(problem)
    depth = max(problem.out if dn else 0, -(-problem.rows // parts) if g else 0)
    return -(-depth // promote) if promote else depth


def inexact(problem: Problem, params: Params) -> str | None:
    """As Variant.inexact."""
    promote = number(params, "promote")
    if problem.dtype == "float32" and (reason := _coarse(problem, str(params["arithmetic"]), promote)):
        return reason
    terms = chain(problem, number(params, "parts"), promote)
    if terms > reduction.max_chain(problem):
        return f"adds {terms} terms in one float32 chain, more than class {problem.accuracy} bears; take more parts"
    return None


def _coarse(problem: Problem, arithmetic: str, promote: int) -> str | None:
    if CLASS_ERRORS[FINEST_CLASS[arithmetic]] > CLASS_ERRORS[problem.accuracy]:
        return f"arithmetic={arithmetic} meets the accuracy class {FINEST_CLASS[arithmetic]}, not {problem.accuracy}"
    depth = promote or max(problem.rows, problem.out)
    if problem.accuracy == "fp32" and arithmetic != "ffma" and depth > _EXACT_DEPTH:
        return f"sums on tensor cores lose the accuracy of float32 in a depth of {depth}; take promote={_EXACT_DEPTH}"
    return None


def _wasteful(problem: Problem, params: Params) -> str | None:
    whole_rows = problem.hidden <= sizes_of(params, "tile")[1]
    if whole_rows and finishes_rows(problem, params) and 8 * problem.rows * problem.hidden > _CACHED:
        return "dn would be written to memory and read again, where finish=epilogue needs neither"
    if params["split"] == "first" and problem.dtype != "float32" and problem.wants <= {"dx", "db"} and not prepared(
            problem, Tiles.of(problem, params))[1]:
        return f"{problem.dtype} data has nothing to take apart here; split=loop does the same"
    if params["finish"] == "epilogue" and "dx" not in problem.wants:
        return "without dx there is nothing to finish; finish=second does the same"
    return wasteful_arithmetic(problem, params) or _wasteful_tile(problem, params) or _wasteful_split(problem, params)


def wasteful_arithmetic(problem: Problem, params: Params) -> str | None:
    """More accuracy, or more of what keeps it, than the class asks for."""
    arithmetic, promote = str(params["arithmetic"]), number(params, "promote")
    finer = CLASS_ERRORS[FINEST_CLASS[arithmetic]] < CLASS_ERRORS[problem.accuracy]
    cheapest = arithmetic == "fp16" or (arithmetic == "tf32" and problem.accuracy != "bf16")  # of those that meet the class
    if problem.dtype == "float32" and finer and not cheapest:
        return f"arithmetic={arithmetic} does more than the accuracy class {problem.accuracy} asks for"
    if promote and (problem.dtype != "float32" or arithmetic in ("bf16", "tf32")):
        return f"the accuracy class {problem.accuracy} needs no promotion; take promote=0"
    if arithmetic == "ffma" and params["stages"] != 3:
        return "stages of ffma are small, and products over one last long; stages=3 is enough and fits"
    if arithmetic == "ffma" and promote != (0 if chain(problem, number(params, "parts"), 0) <= reduction.CHAIN else 256):
        return f"ordinary sums are cut where they are longer than {reduction.CHAIN} terms, and then by promote=256"
    if promote > 128 and promote >= 2 * max(problem.rows, problem.out):
        return f"no sum is as deep as promote={promote}; promote=128 does the same"
    return None


def _wasteful_tile(problem: Problem, params: Params) -> str | None:
    block_m, block_n = sizes_of(params, "tile")
    if (block_m > 64 and block_m >= 2 * max(problem.rows, problem.out)) or (block_n > 32 and block_n >= 2 * problem.hidden):
        return f"tile={params['tile']} is mostly padding; take a smaller one"
    if params["tile"] == "64x128" and params["split"] == "first":
        return "split=first has the registers for tile=128x128, which reads its operands less often than tile=64x128"
    if params["split"] == "fragments" and params["warps"] == "2x4":
        return "each of the warps that share rows takes dy apart: warps=4x2 does it half as often as warps=2x4"
    many = (problem.rows + problem.out) * problem.hidden > _ENOUGH_TILES * 128 * 128
    if many and block_m * block_n <= 64 * 64 and problem.hidden > block_n:
        return f"tile={params['tile']} reads its operands more often than larger tiles, of which there are enough"
    return None


def _wasteful_split(problem: Problem, params: Params) -> str | None:
    tiles = Tiles.of(problem, params)
    if (tiles.raw_dy or (tiles.holds_dy and not tiles.splits_first)) and tiles.tiles_h > _SPLIT_AGAIN:
        return (f"split={params['split']} takes dy apart anew for each of {tiles.tiles_h} columns of tiles; "
                "split=first does it once")
    return wasteful_order(problem, params, tiles)


def wasteful_order(problem: Problem, params: Params, tiles: Tiles) -> str | None:
    """Why these parts of the rows, or groups of rows of tiles, do the same as fewer or smaller ones; None: they do not."""
    parts, group = number(params, "parts"), number(params, "group")
    if parts > 1 and -(-problem.rows // tiles.part) < parts:
        return f"{problem.rows} rows make fewer than {parts} parts of {tiles.part}"
    if (parts > 1 and parts * tiles.g_tiles_o * tiles.tiles_h > 2 * _ENOUGH_TILES
            and chain(problem, PARTS[PARTS.index(parts) - 1], tiles.promote) <= reduction.max_chain(problem)):
        return f"fewer than {parts} parts already make enough tiles of G"
    if group > 4 and group * tiles.block_m >= 2 * max(problem.rows, problem.out):
        return f"group={group} is more than there are rows of tiles; group=4 does the same"
    return None


def _outdone(problem: Problem, limits: Limits) -> str | None:
    large = problem.rows * problem.hidden * problem.out >= _OUTDONE_FROM and min(problem.hidden, problem.out) >= _OUTDONE_WIDTH
    if limits.arch == "sm_90a" and large:
        return "warpgroups multiply so much faster, in gemm_wgmma; name gemm_mma to have it tried all the same"
    return None


def _constants(problem: Problem, params: Params) -> dict[str, int]:
    return constants_of(problem, params, Tiles.of(problem, params))


VARIANT = Variant(
    name="gemm_mma",
    summary="gemm_mma: dn = dy @ w and G = dy^T @ xhat as tiles of tensor-core products; parameter gradients follow from G.",
    choices={"arithmetic": ("fp16x3", "bf16x6", "bf16x3", "fp16", "bf16", "tf32x3", "tf32", "ffma"),
             "split": ("first", "loop", "fragments"), "tile": ("128x128", "256x128", "128x64", "64x128", "64x64", "64x32"),
             "warps": ("2x4", "2x2", "4x2"),
             "promote": (64, 128, 256, 0), "depth": (32, 64, 16), "stages": (3, 2, 4),
             "reduction": ("two_pass", "atomic", "direct"), "parts": PARTS, "finish": ("second", "epilogue"), "group": (8, 4)},
    defaults={"arithmetic": "fp16x3", "split": "first", "tile": "128x128", "warps": "2x4", "promote": 64, "depth": 64,
              "stages": 3, "reduction": "two_pass", "parts": 2, "finish": "second", "group": 8},
    refuses=_refuses, inexact=inexact, wasteful=_wasteful, constants=_constants, plan=_plan,
    clashes=(Clash(("arithmetic",), wrong_arithmetic), Clash(("tile", "warps"), _wrong_tile),
             Clash(("tile", "finish"), beyond_tile),
             Clash(("arithmetic", "promote"), unscaled), Clash(("arithmetic", "split", "stages"), _wrong_stages),
             Clash(("arithmetic", "split"), _nothing_to_split), Clash(("arithmetic", "depth"), _wrong_depth),
             Clash(("split", "tile", "warps", "promote", "depth", "stages"), _wrong_fragments),
             Clash(("arithmetic", "split", "tile", "warps", "promote", "depth", "stages", "finish"), _too_large),
             Clash(("reduction", "parts"), mismatched),
             Clash(("arithmetic", "split", "tile", "promote", "depth", "reduction", "parts", "finish"), _too_much_workspace)),
    outdone=Outdone("gemm_wgmma", _outdone),
)

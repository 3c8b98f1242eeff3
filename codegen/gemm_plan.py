"""What the launches of gemm_mma and gemm_wgmma have in common: grids, buffers and named constants, for a geometry
(codegen/gemm_tiles.py)."""

from __future__ import annotations

from codegen.expr import ONE, ROWS, Expr, ceil_div, const, maximum, minimum
from codegen.gemm_tiles import Tiles
from codegen.plan import Buffer, Fill, Launch, Plan, Step
from codegen.problem import Problem
from codegen.variant import Params, number, round_up

PARTS = (1, 2, 3, 4, 8, 16, 32, 64, 128)
"""Into how many parts the rows of G may be cut."""

MOST_BLOCKS = 132
"""Blocks of gemm_wgmma, which take tiles until none is left: one for each SM of an H200. On a GPU with fewer SMs those that come
last find no tile left."""


def _parts(params: Params, tiles: Tiles) -> Expr:
    """Into how many parts the rows of G are cut; one without rows, so that its gradients become zero."""
    return maximum(1, minimum(number(params, "parts"), ceil_div(ROWS, tiles.part)))


def _halved(params: Params) -> int:
    """Last rows of tiles of dn whose depth two blocks share: of gemm_wgmma alone."""
    return number(params, "halved") if "halved" in params else 0


def _cluster(params: Params) -> int:
    """Blocks that take tiles together: of gemm_wgmma alone."""
    return number(params, "cluster") if "cluster" in params else 1


def needs(problem: Problem) -> tuple[bool, bool, bool]:
    """Whether dn, G and the sums of dy are needed for what is wanted."""
    wants = problem.wants
    return "dx" in wants, bool(wants & {"dgamma", "dbeta", "dw"}), bool(wants & {"db", "dw", "dbeta"})


def prepared(problem: Problem, tiles: Tiles) -> tuple[bool, bool]:
    """Whether gemm_prepare reads dy, and whether w: for planes, for scales, and dy for db."""
    dn, g, db = needs(problem)
    dy = (tiles.splits_first and tiles.holds_dy) or (tiles.scaled and (dn or g) and not tiles.raw_dy) or (
        db and not _sums_dy(problem, tiles))
    return dy, dn and (tiles.scaled or tiles.cells or (tiles.splits_first and problem.param_dtype == "float32"))


def _sums_dy(problem: Problem, tiles: Tiles) -> bool:
    """Whether db comes from the dy that the products of G read as it is: 16-bit values are multiplied with ones, others added.
    dbeta alone needs no such products."""
    as_it_is = tiles.raw_dy or tiles.copies_dy or (problem.dtype != "float32" and not tiles.cells)
    return as_it_is and bool(problem.wants & {"dw", "dgamma"})


def finishes_rows(problem: Problem, params: Params) -> bool:
    """Whether gemm_finish turns dn into dx."""
    return "dx" in problem.wants and params["finish"] != "epilogue"


def rounds_dn(params: Params) -> bool:
    """Whether dn waits in dx as values of its 16-bit type: in gemm_wgmma alone."""
    return params["finish"] == "rounded"


def _sums(problem: Problem, params: Params) -> dict[str, int]:
    """The gradients whose parts gemm_finish sums, and their columns."""
    sizes = {"db": problem.out, "dgamma": problem.hidden, "dbeta": problem.hidden, "dw": problem.hidden * problem.out}
    left = {"db"} | ({"dgamma", "dbeta"} if params["reduction"] != "atomic" else set())
    left |= {"dw"} if params["reduction"] == "two_pass" else set()
    return {name: size for name, size in sizes.items() if name in problem.wants & left}


def _sum_blocks(name: str, size: int, tiles: Tiles) -> int:
    """Blocks of gemm_finish that sum the parts of a gradient: a thread has four elements of dw, a warp 128 of the others."""
    return -(-size // (4 * 32 * tiles.row_block_warps if name == "dw" else 128))


def workspace(problem: Problem, params: Params, tiles: Tiles) -> tuple[Buffer, ...]:
    dn, g, db = needs(problem)
    parts, plane = _parts(params, tiles), "float16" if str(params["arithmetic"]).startswith("fp16") else "bfloat16"
    dy_planes = tiles.padded_rows * (tiles.planes * tiles.out_pitch)
    sums = _sums(problem, params)
    buffers: list[Buffer] = []
    if dn or (g and not tiles.splits_first):
        buffers += [Buffer(name, ROWS) for name in ("row_mean", "row_rest", "row_rstd")]
    if dn:
        if tiles.splits_first and prepared(problem, tiles)[1]:
            buffers.append(Buffer("w_planes", const(tiles.planes * tiles.out_pitch * tiles.hidden_pitch), plane))
        if problem.dtype != "float32" and finishes_rows(problem, params) and not rounds_dn(params):
            buffers.append(Buffer("dn", ROWS * problem.hidden))
        if halved := _halved(params):
            buffers.append(Buffer("dn_rest", const(halved * tiles.block_m * problem.hidden)))
    if g and tiles.splits_first:
        buffers.append(Buffer("xhat_planes", tiles.padded_rows * (tiles.planes * tiles.hidden_pitch), plane))
    if tiles.scaled:
        if dn:
            if not tiles.raw_dy:
                buffers.append(Buffer("dy_row_scales", tiles.padded_rows * tiles.dy_tiles_o))
            buffers.append(Buffer("w_scales", const(tiles.dy_tiles_o * tiles.hidden_pitch)))
        if g and not tiles.raw_dy:
            buffers.append(Buffer("dy_column_scales", tiles.row_parts * tiles.out_pitch))
        if tiles.splits_first and not tiles.raw_dy:
            wanted = {"dy_row_planes": dn, "dy_column_planes": g}
            buffers += [Buffer(name, dy_planes, plane) for name, needed in wanted.items() if needed]
    elif tiles.splits_first and tiles.holds_dy and (dn or g):
        buffers.append(Buffer("dy_planes", dy_planes, plane))
    if db:
        db_parts = parts * tiles.db_shares if _sums_dy(problem, tiles) else tiles.row_parts
        buffers.append(Buffer("db_parts", db_parts * tiles.out_pitch))
    if "dw" in sums:
        buffers.append(Buffer("dw_parts", parts * round_up(sums["dw"], 4)))
    if tiles.cells and (dn or g):
        buffers.append(Buffer("tiles_taken", ONE, "int32"))
        if tiles.raw_dy:  # a row of dy that is not there
            buffers.append(Buffer("zeros", const(max(tiles.block_m, tiles.block_k)), problem.dtype))
    buffers += [Buffer(f"{name}_parts", parts * (tiles.g_tiles_o * tiles.hidden_pitch)) for name in ("dgamma", "dbeta")
                if name in sums]
    return tuple(buffers)


def plan_of(problem: Problem, params: Params, tiles: Tiles, kernel: str, threads: int, shared_bytes: int) -> Plan:
    """The plan of gemm_prepare, `kernel` and gemm_finish; `kernel` has a block of so many threads for each tile."""
    parts = _parts(params, tiles)
    dn, g, _ = needs(problem)
    row_threads = 32 * tiles.row_block_warps
    reads_dy, reads_w = prepared(problem, tiles)
    prepares: Expr = tiles.row_parts * tiles.dy_tiles_o if reads_dy else const(0)
    if reads_w:
        prepares = prepares + tiles.w_tiles
    if dn or g:
        prepares = prepares + ceil_div(tiles.padded_rows, tiles.block_rows)
    products = parts * (tiles.g_tiles_o * tiles.tiles_h) if g else const(0)
    if dn:
        rows_of_tiles = ceil_div(ROWS, tiles.row_pad) * (tiles.row_pad // tiles.block_m)
        products = products + (rows_of_tiles + minimum(_halved(params), rows_of_tiles)) * tiles.tiles_h
    finished: Expr = const(sum(_sum_blocks(name, size, tiles) for name, size in _sums(problem, params).items()))
    if finishes_rows(problem, params):
        finished = finished + ceil_div(ROWS, tiles.block_rows)
    if tiles.cells and (dn or g):
        prepares, products = maximum(1, prepares), minimum(MOST_BLOCKS, _whole_clusters(products, _cluster(params)))
    steps: list[Step] = []
    if params["reduction"] == "atomic":
        steps.append(Fill(tuple(name for name in ("dgamma", "dbeta", "dw") if name in problem.wants)))
    steps.append(Launch("gemm_prepare", prepares, row_threads, tiles.prepare_shared_bytes))
    if dn or g:
        steps.append(Launch(kernel, products, threads, shared_bytes))
    if finished != const(0):
        steps.append(Launch("gemm_finish", finished, row_threads, tiles.finish_shared_bytes))
    return Plan(tuple(steps), workspace(problem, params, tiles), parts if g else ONE)


def _whole_clusters(blocks: Expr, cluster: int) -> Expr:
    """The blocks, or so many more that clusters of this size are whole."""
    return ceil_div(blocks, cluster) * cluster if cluster > 1 else blocks


def constants_of(problem: Problem, params: Params, tiles: Tiles) -> dict[str, int]:
    """The named integers that both gemm variants have."""
    sums = _sums(problem, params)
    named = {
        "THREADS": tiles.threads, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
        "WARPS_M": tiles.warps_m, "WARPS_N": tiles.warps_n, "STAGES": tiles.stages, "PART": tiles.part,
        "GROUP": number(params, "group"), "ROW_PAD": tiles.row_pad, "OUT_PITCH": tiles.out_pitch,
        "HIDDEN_PITCH": tiles.hidden_pitch, "TILES_H": tiles.tiles_h, "G_TILES_O": tiles.g_tiles_o,
        "ROW_WARPS": tiles.row_warps,
        "ROW_LANES": tiles.row_lanes, "ROW_BLOCK_WARPS": tiles.row_block_warps, "ROW_STEPS": tiles.row_steps,
    }
    reads_dy, reads_w = prepared(problem, tiles)
    if reads_dy:
        named["DY_TILES_O"] = tiles.dy_tiles_o
    if reads_w:
        named["W_TILES"] = tiles.w_tiles
    if tiles.promote:
        named["PROMOTE"] = tiles.promote
    if tiles.scaled and not tiles.cells:
        named["SCALES_SLOTS"] = tiles.scales_slots
    if "dw" in sums:
        named["DW_PARTS_PITCH"] = round_up(sums["dw"], 4)
    return named | {f"{name.upper()}_SUM_BLOCKS": _sum_blocks(name, size, tiles) for name, size in sums.items()}

"""The geometry of gemm_mma: tiles, paddings, shared memory and registers that follow from its parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.arithmetic import PLANES, WHOLE, value_bytes
from codegen.expr import ROWS, Expr, ceil_div
from codegen.problem import Problem
from codegen.variant import Params, number, power_of_two, round_up

PART = 256
"""Rows that share a partial sum of db where neither scales nor promotion say otherwise."""

NARROW = 128
"""Columns of x up to which preparing dy takes longer than multiplying it. Then larger parts of dy pay, which make fewer scales
and
are read in longer pieces; else smaller ones, which keep more blocks of gemm_prepare busy and need no look-up of scales within a
part. Measured on an H200, parts of 64 against 128: 1,262144,128,512 1266 against 1183 us, 8,1024,768,2304 572 against 583."""

COPIERS = 4
"""Warps of a block of gemm_wgmma that copy dy as it is."""

W_COLUMNS = 64
"""Columns of a tile of w that a block of gemm_prepare takes."""


def sizes_of(params: Params, name: str) -> tuple[int, int]:
    """A parameter that names rows and columns, such as "128x64"."""
    rows, columns = str(params[name]).split("x")
    return int(rows), int(columns)


@dataclass(frozen=True, slots=True)
class Tiles:
    """What follows from the problem and the parameters. Sizes in elements, unless named otherwise.

    Attributes:
        block_m, block_n, block_k: a block's tile of a product, and the depth of one stage.
        warps_m, warps_n: how the warps share the tile.
        stages: stages of shared memory.
        arithmetic: of the products.
        scaled: whether operands are scaled by powers of two.
        promote: depth between promotions to ordinary float sums; 0: never.
        part: rows, and columns of dy, that share scales and a partial sum of db.
        splits_first: whether gemm_prepare takes values apart, not the products themselves.
        raw_dy: but not those of dy, which are copied as they are and taken apart in the fragments.
        holds_dy: whether dy passes registers on its way into the products, as x does; else it is copied.
        finishes: whether a tile of dn becomes one of dx at once.
        cells: whether all operands, those of 16-bit data too, come to the products as planes in cells.
        copies_dy: whether dy, of 16-bit data, is copied as it is to where cells of its plane would be.
        hidden, out: sizes of the problem.
    """

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    stages: int
    arithmetic: str
    scaled: bool
    promote: int
    part: int
    splits_first: bool
    raw_dy: bool
    holds_dy: bool
    finishes: bool
    hidden: int
    out: int
    cells: bool = False
    copies_dy: bool = False

    @classmethod
    def of(cls, problem: Problem, params: Params) -> Tiles:
        """The geometry of a config."""
        block_m, block_n = sizes_of(params, "tile")
        warps_m, warps_n = sizes_of(params, "warps")
        arithmetic, promote = str(params["arithmetic"]), number(params, "promote")
        splits_first, raw_dy = params["split"] != "loop", params["split"] == "fragments"
        least = 64 if raw_dy or (splits_first and problem.hidden > NARROW) else 128
        part = max(promote, least) if promote else PART
        return cls(
            block_m, block_n, number(params, "depth"), warps_m, warps_n, number(params, "stages"), arithmetic,
            scaled=problem.dtype == "float32" and arithmetic.startswith("fp16"), promote=promote, part=part,
            splits_first=splits_first, raw_dy=raw_dy,
            holds_dy=problem.dtype == "float32" and arithmetic not in WHOLE and not raw_dy,
            finishes=params["finish"] == "epilogue", hidden=problem.hidden, out=problem.out)

    @property
    def planes(self) -> int:
        """Numbers that stand for one value."""
        return PLANES[self.arithmetic]

    @property
    def whole(self) -> bool:
        """Whether values are multiplied as they stand in memory, or taken apart only in the fragments."""
        return self.arithmetic in WHOLE

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def row_pad(self) -> int:
        """Rows of the operands come in multiples of this: tiles of dn, and steps in depth of G."""
        return math.lcm(self.block_m, self.block_k)

    @property
    def out_pitch(self) -> int:
        return round_up(self.out, math.lcm(self.block_m, self.block_k))

    @property
    def hidden_pitch(self) -> int:
        return round_up(self.hidden, math.lcm(self.block_n, W_COLUMNS))

    @property
    def padded_rows(self) -> Expr:
        return ceil_div(ROWS, self.row_pad) * self.row_pad

    @property
    def row_parts(self) -> Expr:
        """Parts of `part` rows, padding included."""
        return ceil_div(self.padded_rows, self.part)

    @property
    def tiles_h(self) -> int:
        """Tiles over the columns of x, of both products."""
        return self.hidden_pitch // self.block_n

    @property
    def g_tiles_o(self) -> int:
        """Tiles of G over the rows of w."""
        return -(-self.out // self.block_m)

    @property
    def dy_tiles_o(self) -> int:
        """Tiles over the columns of dy in gemm_prepare."""
        return -(-self.out_pitch // self.part)

    @property
    def w_tiles(self) -> int:
        """Tiles of w in gemm_prepare."""
        return -(-self.out_pitch // self.part) * (self.hidden_pitch // W_COLUMNS)

    @property
    def db_shares(self) -> int:
        """Sums of dy for db that a block has of a part of the rows, where it finds them beside its products."""
        return COPIERS if self.copies_dy else 1

    @property
    def row_warps(self) -> int:
        """Warps that share a row of x: one or all of a block, so that a lane holds 32 values of it. No more than 16, as blocks of
        gemm_prepare also hold tiles of dy in registers."""
        return 1 if self.hidden <= 1024 else 8 if self.hidden <= 8192 else 16

    @property
    def row_lanes(self) -> int:
        """Lanes of a warp that share a row of x: fewer than all where eight values each are enough of them."""
        return min(32, power_of_two(self.hidden_pitch // 8))

    @property
    def row_block_warps(self) -> int:
        """Warps of a block of gemm_prepare and gemm_finish."""
        return max(8, self.row_warps)

    @property
    def row_steps(self) -> int:
        """Vectors of eight values of a row that a lane holds."""
        return -(-self.hidden_pitch // (8 * self.row_lanes * self.row_warps))

    @property
    def block_rows(self) -> int:
        """Rows a block of gemm_prepare or gemm_finish takes."""
        return self.row_block_warps * 32 // (self.row_lanes * self.row_warps)

    @property
    def scales_slots(self) -> int:
        """Sets of scales in shared memory: of the sums that leave, of those that are summed, and of what is copied ahead."""
        ahead = self.stages - 1 if self.splits_first else 3
        return 2 + ahead * self.block_k // self.part

    @property
    def shared_bytes(self) -> int:
        """Of a block of gemm_mma: the stages and scales, or what the epilogues of G and of dn need."""
        stages = self.stages * (value_bytes(self.arithmetic) * self.block_n + self.dy_bytes * self.block_m) * self.block_k
        scales = 4 * self.scales_slots * (self.block_m + self.block_n) if self.scaled else 0
        dn = 4 * self.block_m * (self.block_n + 8) if self.finishes else 0
        return max(stages + scales + self.maxima_bytes, 4 * (self.block_m + 2 * self.warps_m * self.block_n), dn)

    @property
    def dy_bytes(self) -> int:
        """Bytes of shared memory that a value of dy takes."""
        return 4 if self.raw_dy else value_bytes(self.arithmetic)

    @property
    def maxima_bytes(self) -> int:
        """Of a block of gemm_mma: what its threads find of the rows, or columns, of the tile of dy that is multiplied and of the
        next one. A row's maxima of four neighbours, or maxima of the columns of each row of threads, with room between."""
        if not (self.raw_dy and self.scaled):
            return 0
        thread_rows = self.threads // (self.block_m // 4)
        return 2 * 4 * max(self.block_m * self.block_k // 4, thread_rows * (self.block_m + 8))

    @property
    def prepare_shared_bytes(self) -> int:
        """Of a block of gemm_prepare: what the groups of threads find of each column, the totals, and the rows' maxima."""
        threads = 32 * self.row_block_warps
        sizes = []
        for columns in (self.part, W_COLUMNS):
            lanes = min(32, columns // 8)
            sizes.append(4 * (threads // lanes * columns + columns + self.part))
        return max(sizes)

    @property
    def finish_shared_bytes(self) -> int:
        """Of a block of gemm_finish: each warp's sums of 128 columns."""
        return 4 * 128 * self.row_block_warps

    @property
    def held_registers(self) -> int:
        """Of a thread, for values of the next step of depth, and for the statistics of their rows of x."""
        values = (self.block_n + (self.block_m if self.holds_dy else 0)) * self.block_k
        rows = 8 * self.block_k if self.whole else self.block_n * self.block_k // 8  # of all threads
        return values // self.threads + 3 * -(-rows // self.threads)

    @property
    def registers(self) -> int:
        """Estimate for a thread of gemm_mma: sums, twice where they are promoted, a set of fragments, and 48 for the next set, as
        much of it as fits, and for addresses. Where the main loop takes values apart, that next set in full, what is held of the
        operands, and 72, more in deeper stages. Where values are whole: two sets of them, low parts of one, what is held of x,
        and 50. From compiled kernels."""
        warp_m, warp_n = self.block_m // self.warps_m, self.block_n // self.warps_n
        sums = warp_m * warp_n // 32
        fragments = self.planes * (warp_m // 16 * 4 + warp_n // 8 * 2)
        loop = sums * (2 if self.promote else 1) + fragments + 48
        if self.raw_dy:
            loop += warp_m // 4 + 16  # scales, and what is found beside the products
        elif self.whole:
            values = warp_m // 16 * 4 + warp_n // 8 * (4 if self.arithmetic == "ffma" else 2)
            loop = sums * (2 if self.promote else 1) + 2 * values + 12 * (self.planes - 1) + self.held_registers + 50
        elif not self.splits_first:
            loop += fragments + self.held_registers + 72 - 48 + self.planes * (self.block_k - 32) // 2
        return loop

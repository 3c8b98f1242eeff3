"""The variants: for each its template, its parameters, the rules that say which values go together, and its plan.

A new variant is one template and one entry of VARIANTS; the generator, the tuner and the tests find it there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from codegen.config import Value
from codegen.expr import ROWS, Expr, ceil_div, const, minimum
from codegen.limits import Limits
from codegen.plan import Buffer, Fill, Launch, Plan, Step
from codegen.problem import Problem

Params = Mapping[str, Value]

SPLITS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
CHAIN = 1024
"""Rows summed in one float32 chain before the chains' sums are added: its error stays near 6e-7 (a chain of 65,536 terms was
measured at 4.6e-6, and the error of random data grows with the square root of the length)."""
ROW_CHAIN = 256
"""Values of one row that a single thread sums in one float32 chain, near the square root of the longest rows."""
MAX_CHAIN = 4096
"""Longest float32 chain of rows worth trying in kernels that sum in one level: about 1.2e-6 of the 2e-6 that float32 allows."""
MAX_SINGLE_BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Variant:
    """One family of kernels.

    Attributes:
        name: also the name of its kernel and its template.
        summary: one line: what it does, and what it changes over the simpler ones.
        choices: the values of each parameter, in the order of config strings.
        defaults: a config that is valid for ordinary sizes.
        refuses: why a problem cannot be run with these values on a GPU with these limits, at any row count; None: it can.
        wasteful: why these values, though right, are not worth trying at the problem's row count; None: they are.
        constants: the named integers of the rendered source.
        plan: the steps and scratch buffers.
    """

    name: str
    summary: str
    choices: Mapping[str, tuple[Value, ...]]
    defaults: Params
    refuses: Callable[[Problem, Params, Limits], str | None]
    wasteful: Callable[[Problem, Params], str | None]
    constants: Callable[[Problem, Params], dict[str, int]]
    plan: Callable[[Problem, Params], Plan]

    @property
    def template(self) -> str:
        """File name of the template."""
        return f"{self.name}.cu.j2"


def number(params: Params, name: str) -> int:
    """An integer parameter."""
    return int(params[name])


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


# --- what the families share: the reduction of parameter gradients ----------------------------------------------


def _sections(problem: Problem) -> dict[str, int]:
    """Where each wanted gradient begins in one split's row of `partial`, the end, and the row's padded length."""
    sizes = {"dw": problem.out * problem.hidden, "db": problem.out, "dgamma": problem.hidden, "dbeta": problem.hidden}
    at, starts = 0, {}
    for name, size in sizes.items():
        starts[f"AT_{name.upper()}"] = at
        at += size if name in problem.wants else 0
    return {**starts, "AT_END": at, "PARTIAL_SIZE": round_up(at, 4)}


def _second_pass(problem: Problem, splits: int) -> dict[str, int]:
    """Constants of sum_partials: enough warps that none sums more than about eight splits in a row of loads."""
    warps = min(16, power_of_two(-(-splits // 8)))
    return {"SUM_WARPS": warps, "SUM_VECTOR": 4 if _sections(problem)["PARTIAL_SIZE"] >= 1 << 17 else 1}


def _wants_parameter_gradients(problem: Problem) -> bool:
    return bool(problem.wants - {"dx"})


def _reduction_refused(problem: Problem, params: Params) -> str | None:
    reduction, splits = params["reduction"], number(params, "splits")
    if problem.deterministic and reduction == "atomic":
        return "atomic additions come in another order in every run; a deterministic kernel cannot use them"
    if reduction in ("atomic", "two_pass") and splits == 1:
        return f"reduction={reduction} with splits=1 is reduction=single_block with more steps"
    if reduction in ("single_block", "column_blocks") and splits != 1:
        return f"reduction={reduction} does not split the rows; it takes splits=1"
    return None


def _workspace_refused(problem: Problem, plan: Plan) -> str | None:
    limit = workspace_limit(problem.rows)
    needed = plan.workspace_bytes(problem.rows, 1)
    if needed > limit:
        return f"needs {needed} bytes of workspace where {limit} are allowed"
    return None


def workspace_limit(rows: int) -> int:
    """Scratch memory a config may use, bytes: 64 MiB and 16 bytes a row."""
    return (64 << 20) + 16 * rows


def _reduction_wasteful(problem: Problem, params: Params, block_rows: int, chains: int | None) -> str | None:
    """`block_rows`: rows a block takes at once. `chains`: float32 chains a split's rows are cut into; None: two levels."""
    rows, splits, reduction = problem.rows, number(params, "splits"), params["reduction"]
    if reduction == "single_block" and rows > MAX_SINGLE_BLOCK_ROWS:
        return f"one block for {rows} rows leaves the rest of the GPU idle"
    blocks = -(-rows // block_rows)
    smaller = [choice for choice in SPLITS if 1 < choice < splits]
    if reduction in ("atomic", "two_pass") and smaller and smaller[-1] >= blocks:
        return f"{rows} rows make {blocks} blocks; splits={smaller[-1]} already gives each its own"
    if chains is not None and -(-rows // splits) > MAX_CHAIN * chains:
        return f"sums {-(-rows // splits // chains)} rows in one float32 chain, which loses the accuracy of float32"
    return None


def _with_reduction(problem: Problem, params: Params, kernel: Launch, workspace: tuple[Buffer, ...], splits: Expr) -> Plan:
    """The plan of a kernel whose blocks emit their shares: what must be zeroed before it and summed after it."""
    reduction = params["reduction"]
    steps: tuple[Step, ...] = (kernel,)
    sections = _sections(problem)
    if reduction == "atomic" and _wants_parameter_gradients(problem):
        names = tuple(name for name in ("dgamma", "dbeta", "dw", "db") if name in problem.wants)
        steps = (Fill(names), kernel)
    elif reduction == "two_pass" and _wants_parameter_gradients(problem):
        second = _second_pass(problem, number(params, "splits"))
        columns = 32 * second["SUM_VECTOR"]
        grid = const(-(-sections["PARTIAL_SIZE"] // columns))
        shared = second["SUM_WARPS"] * columns * 4
        steps = (kernel, Launch("sum_partials", grid, 32 * second["SUM_WARPS"], shared))
        workspace = (Buffer("partial", splits * sections["PARTIAL_SIZE"]), *workspace)
    elif reduction == "two_pass":
        workspace = (Buffer("partial", const(0)), *workspace)
    return Plan(steps, workspace, splits)


def _columns(problem: Problem, threads: int) -> dict[str, int]:
    """Constants of accumulate_columns."""
    column_threads = min(threads, power_of_two(problem.hidden))
    return {"COLUMN_THREADS": column_threads, "COLUMN_GROUPS": threads // column_threads,
            "COLUMN_OUTS": min(8, power_of_two(problem.out)), "CHAIN": CHAIN}


def _row_kernel_plan(problem: Problem, params: Params, threads: int, block_rows: int, shared: int) -> Plan:
    """The plan of row_thread and row_warp: rows first, then columns, in one launch or in two."""
    name = "row_thread" if "warps" not in params else "row_warp"
    workspace = tuple(Buffer(name, ROWS) for name in ("row_mean", "row_rest", "row_rstd"))
    blocks = ceil_div(ROWS, block_rows)
    if params["reduction"] == "column_blocks":
        steps: tuple[Step, ...] = (Launch(name, blocks, threads, shared),)
        if _wants_parameter_gradients(problem):
            column_threads = _columns(problem, threads)["COLUMN_THREADS"]
            steps += (Launch("column_blocks", const(-(-problem.hidden // column_threads)), threads, 8 * threads),)
        return Plan(steps, workspace, blocks)
    if params["reduction"] == "single_block":
        return Plan((Launch(name, const(1), threads, shared),), workspace)
    splits = minimum(number(params, "splits"), blocks)
    return _with_reduction(problem, params, Launch(name, splits, threads, shared), workspace, splits)


# --- row_thread -------------------------------------------------------------------------------------------------


def _thread_plan(problem: Problem, params: Params) -> Plan:
    threads = number(params, "threads")
    if params["reduction"] == "atomic":
        blocks = ceil_div(ROWS, threads)
        return _with_reduction(problem, params, Launch("row_thread", blocks, threads), (), blocks)
    return _row_kernel_plan(problem, params, threads, threads, 8 * threads)


def _thread_refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    if params["reduction"] == "atomic" and not problem.deterministic:
        return None if number(params, "splits") == 1 else "the atomic kernel has one thread for every row; it takes splits=1"
    return _reduction_refused(problem, params) or _workspace_refused(problem, _thread_plan(problem, params))


def _thread_constants(problem: Problem, params: Params) -> dict[str, int]:
    threads = number(params, "threads")
    if params["reduction"] == "atomic":
        return {"THREADS": threads, "ROW_CHAIN": ROW_CHAIN}
    return {"THREADS": threads, "ROW_CHAIN": ROW_CHAIN, "IDENTITY": 1, **_columns(problem, threads)}


# --- row_warp ---------------------------------------------------------------------------------------------------


def _warp_chunks(problem: Problem, params: Params) -> tuple[int, int]:
    """(vectors a lane holds of each row, chunks a row goes in)."""
    vector, rows = number(params, "vector"), number(params, "rows")
    whole = -(-problem.hidden // (32 * vector))
    held = min(whole, max(1, 32 // (vector * rows)))
    return held, -(-whole // held)


def _warp_plan(problem: Problem, params: Params) -> Plan:
    warps, rows = number(params, "warps"), number(params, "rows")
    held, _ = _warp_chunks(problem, params)
    direct = 4 * warps * 32 * held * number(params, "vector") if params["grads"] == "direct" else 0
    return _row_kernel_plan(problem, params, 32 * warps, warps * rows, max(8 * 32 * warps, direct))


def _warp_refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    if reason := _reduction_refused(problem, params):
        return reason
    vector = number(params, "vector")
    if problem.hidden % vector:
        return f"vector={vector} does not divide rows of {problem.hidden} values"
    if vector > 1 and problem.hidden <= 32 * vector // 2:
        return f"vector={vector} leaves more than half of the lanes without a column of {problem.hidden}"
    _, chunks = _warp_chunks(problem, params)
    if params["grads"] == "direct":
        if chunks > 1:
            return f"grads=direct sums over rows in registers, and rows of {problem.hidden} values do not fit"
        if params["reduction"] == "column_blocks":
            return "reduction=column_blocks sums the columns of all rows at once; it takes grads=identity"
    return _workspace_refused(problem, _warp_plan(problem, params))


def _warp_constants(problem: Problem, params: Params) -> dict[str, int]:
    warps = number(params, "warps")
    held, chunks = _warp_chunks(problem, params)
    return {"WARPS": warps, "THREADS": 32 * warps, "ROWS": number(params, "rows"), "VECTOR": number(params, "vector"),
            "CHUNK_VECTORS": held, "CHUNKS": chunks, "IDENTITY": int(params["grads"] == "identity"),
            **_columns(problem, 32 * warps)}


# --- row_shared -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SharedSizes:
    """What follows from the parameters of row_shared; all in elements."""

    tile_o: int
    tile_h: int
    o_pitch: int
    h_pitch: int
    tile_rows: int
    end_values: int
    lane_columns: int
    thread_tiles: int

    @classmethod
    def of(cls, problem: Problem, params: Params) -> _SharedSizes:
        threads, lanes, rows, vector = (number(params, name) for name in ("threads", "lanes", "rows", "vector"))
        tile_o, tile_h = (int(part) for part in str(params["tile"]).split("x"))
        o_pitch, h_pitch = round_up(problem.out, max(4, tile_o)), round_up(problem.hidden, max(4, tile_h))
        tile_rows = threads // lanes * rows
        end_values = o_pitch if params["grads"] == "identity" else 2 * threads // 32 * h_pitch
        return cls(tile_o, tile_h, o_pitch, h_pitch, tile_rows, end_values,
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


def _shared_plan(problem: Problem, params: Params) -> Plan:
    threads, sizes = number(params, "threads"), _SharedSizes.of(problem, params)
    splits = const(1)
    if params["reduction"] != "single_block":
        splits = minimum(number(params, "splits"), ceil_div(ROWS, sizes.tile_rows))
    return _with_reduction(problem, params, Launch("row_shared", splits, threads, sizes.shared_bytes), (), splits)


def _shared_refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    if reason := _reduction_refused(problem, params):
        return reason
    sizes = _SharedSizes.of(problem, params)
    threads, lanes, vector = (number(params, name) for name in ("threads", "lanes", "vector"))
    if sizes.shared_bytes > limits.shared_per_block:
        return f"needs {sizes.shared_bytes} bytes of shared memory; a block of {limits.name} has {limits.shared_per_block}"
    available = min(255, limits.registers_per_sm // threads)
    if (needed := sizes.registers(number(params, "rows"), params["grads"] == "direct")) > available:
        return f"needs about {needed} registers a thread where {available} are there"
    if lanes * vector >= 2 * sizes.h_pitch and (lanes, vector) != (4, 1):
        return f"lanes={lanes} and vector={vector} leave half of the lanes without a column of {problem.hidden}"
    if sizes.thread_tiles > 1 and sizes.tile_o * sizes.tile_h < 16:
        return f"tile={params['tile']} takes more shared-memory reads than products; use larger tiles"
    return _workspace_refused(problem, _shared_plan(problem, params))


def _shared_constants(problem: Problem, params: Params) -> dict[str, int]:
    sizes, threads = _SharedSizes.of(problem, params), number(params, "threads")
    warps = {"WARPS": threads // 32} if params["grads"] == "direct" else {}
    return {"THREADS": threads, **warps, "LANES": number(params, "lanes"), "ROWS": number(params, "rows"),
            "VECTOR": number(params, "vector"), "TILE_O": sizes.tile_o, "TILE_H": sizes.tile_h, "O_PITCH": sizes.o_pitch,
            "H_PITCH": sizes.h_pitch, "IDENTITY": int(params["grads"] == "identity")}


VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant(
            "row_thread",
            "row_thread: one thread per row, the readable definition; with atomic sums, the origin of all the others.",
            {"threads": (32, 64, 128, 256), "splits": SPLITS,
             "reduction": ("atomic", "two_pass", "single_block", "column_blocks")},
            {"threads": 128, "splits": 1, "reduction": "atomic"},
            _thread_refuses,
            lambda problem, params: _reduction_wasteful(problem, params, number(params, "threads"), None)
            if params["reduction"] != "atomic" else None,
            _thread_constants,
            _thread_plan,
        ),
        Variant(
            "row_warp",
            "row_warp: one warp per row instead of one thread: coalesced wide loads, and row sums by shuffles.",
            {"warps": (1, 2, 4, 8), "rows": (1, 2, 4), "vector": (1, 2, 4), "grads": ("direct", "identity"),
             "splits": SPLITS, "reduction": ("atomic", "two_pass", "single_block", "column_blocks")},
            {"warps": 4, "rows": 1, "vector": 1, "grads": "identity", "splits": 64, "reduction": "two_pass"},
            _warp_refuses,
            lambda problem, params: _reduction_wasteful(
                problem, params, number(params, "warps") * number(params, "rows"),
                number(params, "warps") if params["grads"] == "direct" else None),
            _warp_constants,
            _warp_plan,
        ),
        Variant(
            "row_shared",
            "row_shared: tiles of rows and w staged in shared memory; blocks stay and sum the parameter gradients on chip.",
            {"threads": (64, 128, 256, 512), "lanes": (4, 8, 16, 32), "rows": (1, 2, 4, 8), "vector": (1, 2, 4),
             "tile": ("1x1", "2x2", "2x4", "4x4", "8x4", "8x8"), "grads": ("direct", "identity"), "splits": SPLITS,
             "reduction": ("atomic", "two_pass", "single_block")},
            {"threads": 256, "lanes": 8, "rows": 1, "vector": 1, "tile": "4x4", "grads": "direct", "splits": 64,
             "reduction": "two_pass"},
            _shared_refuses,
            lambda problem, params: _reduction_wasteful(problem, params, _SharedSizes.of(problem, params).tile_rows, 1),
            _shared_constants,
            _shared_plan,
        ),
    )
}


def constants(problem: Problem, variant: Variant, params: Params) -> dict[str, int]:
    """Every named integer of a rendered source: the variant's own, then those of the reduction."""
    named = variant.constants(problem, params)
    if params["reduction"] == "two_pass":
        named |= _second_pass(problem, number(params, "splits"))
    return named


def sections(problem: Problem, params: Params) -> dict[str, int]:
    """The layout of one row of `partial`, as far as the templates name it."""
    starts = _sections(problem)
    if params["reduction"] != "two_pass":
        del starts["AT_END"], starts["PARTIAL_SIZE"]
    return starts if params["reduction"] != "atomic" or "splits" not in params or number(params, "splits") > 1 else {}

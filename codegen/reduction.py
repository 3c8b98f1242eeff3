"""How the blocks' shares of the parameter gradients meet: the rules, plans and constants that all variants share.

    atomic         each block adds its share to the outputs, zeroed by a fill before; not reproducible
    two_pass       each block leaves its share in scratch memory, a second kernel sums them in a fixed order
    single_block   the grid is one block: no fill, no second launch; for few rows
    column_blocks  a second launch in which each block owns columns of w for all rows; no partial sums, bounded scratch memory
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import prod

from codegen.expr import ROWS, Expr, ceil_div, const, minimum
from codegen.plan import Buffer, Fill, Launch, Plan, Step
from codegen.problem import Problem
from codegen.tensors import BY_NAME, itemsize
from codegen.variant import Params, number, power_of_two, round_up

SPLITS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
CHAIN = 1024
"""Terms summed in one float32 chain before the chains' sums are added: its error stays near 6e-7 (a chain of 65,536 terms was
measured at 4.6e-6, and the error of random data grows with the square root of the length)."""
OUT_CHAIN = 1024
"""Products over OUT in one float32 chain, for the same reason; a multiple of 32, the values of dy a warp passes round."""
MAX_CHAIN = 4096
"""Longest float32 chain in kernels that sum in one level, in class fp32: about 1.2e-6 of the 2e-6 that the class allows."""
MAX_COARSE_CHAIN = 1 << 20
"""The same in the coarser classes: about 2e-5 of 1e-3 and more. Beyond 2^24 terms of one sign a sum would stop growing."""
MAX_SINGLE_BLOCK_ROWS = 4096


@functools.lru_cache(maxsize=64)  # asked for once for each combination of parameters
def workspace_limit(problem: Problem) -> int:
    """Scratch memory a config may use, bytes: 64 MiB, 16 bytes a row, and three times the bytes of x, dy and w.

    64 MiB hold partial sums, 16 bytes a row its statistics and scales. Kernels for tensor cores may split x, dy and w into
    planes of 16-bit parts before they multiply: up to three parts of each value, of two bytes each, beside float32 dn.
    """
    read = sum(prod(BY_NAME[name].shape(problem.rows, problem.hidden, problem.out))
               * itemsize(name, problem.dtype, problem.param_dtype) for name in ("x", "dy", "w"))
    return (64 << 20) + 16 * problem.rows + 3 * read


def max_chain(problem: Problem) -> int:
    """Longest float32 chain in kernels that sum in one level."""
    return MAX_CHAIN if problem.accuracy == "fp32" else MAX_COARSE_CHAIN


def wants_parameter_gradients(problem: Problem) -> bool:
    """Whether there is anything to reduce."""
    return bool(problem.wants - {"dx"})


@functools.lru_cache(maxsize=64)  # likewise
def sections(problem: Problem) -> Mapping[str, int]:
    """Where each wanted gradient begins in one split's row of `partial`, the end, and the row's padded length."""
    sizes = {"dw": problem.out * problem.hidden, "db": problem.out, "dgamma": problem.hidden, "dbeta": problem.hidden}
    at, starts = 0, {}
    for name, size in sizes.items():
        starts[f"AT_{name.upper()}"] = at
        at += size if name in problem.wants else 0
    return {**starts, "AT_END": at, "PARTIAL_SIZE": round_up(at, 4)}


def second_pass(problem: Problem, splits: int) -> dict[str, int]:
    """Constants of sum_partials: enough warps that none sums more than about eight splits in a row of loads."""
    warps = min(16, power_of_two(-(-splits // 8)))
    return {"SUM_WARPS": warps, "SUM_VECTOR": 4 if sections(problem)["PARTIAL_SIZE"] >= 1 << 17 else 1}


def columns(problem: Problem, threads: int) -> dict[str, int]:
    """Constants of accumulate_columns."""
    column_threads = min(threads, power_of_two(problem.hidden))
    # Offsets inside a chain of rows are 32-bit.
    chain = max(1, min(CHAIN, (2**31 - 1) // max(problem.hidden, problem.out)))
    return {"COLUMN_THREADS": column_threads, "COLUMN_GROUPS": threads // column_threads,
            "COLUMN_OUTS": min(8, power_of_two(problem.out)), "CHAIN": chain}


def mismatched(problem: Problem, params: Params) -> str | None:
    """Why these values of `reduction` and `splits` do not go together, or not with what is wanted."""
    reduction, splits = params["reduction"], number(params, "splits")
    if problem.deterministic and reduction == "atomic":
        return "atomic additions come in another order in every run; a deterministic kernel cannot use them"
    if problem.param_dtype != "float32" and reduction == "atomic":
        return f"atomic additions to {problem.param_dtype} would round every share; take another reduction"
    if not wants_parameter_gradients(problem) and reduction in ("atomic", "column_blocks"):
        return f"reduction={reduction} has nothing to reduce where dx alone is wanted; take two_pass or single_block"
    if reduction in ("atomic", "two_pass") and splits == 1:
        return f"reduction={reduction} with splits=1 is reduction=single_block with more steps"
    if reduction in ("single_block", "column_blocks") and splits != 1:
        return f"reduction={reduction} does not split the rows; it takes splits=1"
    return None


def too_much_workspace(problem: Problem, plan: Plan, sms: int = 1) -> str | None:
    """Why the plan needs more scratch memory than is allowed at the problem's row count, on a GPU of so many SMs; its steps do
    not count."""
    limit = workspace_limit(problem)
    needed = plan.workspace_bytes(problem.rows, sms)
    if needed > limit:
        return f"needs {needed} bytes of workspace where {limit} are allowed"
    return None


def wasted(problem: Problem, params: Params, block_rows: int) -> str | None:
    """Why the reduction is not worth trying at the problem's row count; `block_rows`: rows a block takes at once."""
    rows, splits, reduction = problem.rows, number(params, "splits"), params["reduction"]
    if reduction == "single_block" and rows > MAX_SINGLE_BLOCK_ROWS:
        return f"one block for {rows} rows leaves the rest of the GPU idle"
    blocks = -(-rows // block_rows)
    smaller = [choice for choice in SPLITS if 1 < choice < splits]
    if reduction in ("atomic", "two_pass") and smaller and smaller[-1] >= blocks:
        return f"{rows} rows make {blocks} blocks; splits={smaller[-1]} already gives each its own"
    return None


def long_chain(problem: Problem, chains: int) -> str | None:
    """Why float32 sums over the problem's rows, cut into so many chains, would miss the accuracy class."""
    length = -(-problem.rows // chains)
    if length <= max_chain(problem) or not wants_parameter_gradients(problem):
        return None
    return f"sums {length} rows in one float32 chain, which loses the accuracy of class {problem.accuracy}"


def partial(problem: Problem, params: Params, splits: Expr) -> tuple[Buffer, ...]:
    """The scratch memory of the blocks' shares."""
    return (Buffer("partial", splits * sections(problem)["PARTIAL_SIZE"]),) if params["reduction"] == "two_pass" else ()


def with_reduction(problem: Problem, params: Params, kernel: Launch, workspace: tuple[Buffer, ...], splits: Expr) -> Plan:
    """The plan of a kernel whose blocks emit their shares: what must be zeroed before it and summed after it."""
    reduction = params["reduction"]
    steps: tuple[Step, ...] = (kernel,)
    if reduction == "atomic":
        names = tuple(name for name in ("dgamma", "dbeta", "dw", "db") if name in problem.wants)
        steps = (Fill(names), kernel) if names else (kernel,)
    elif reduction == "two_pass":
        row = sections(problem)["PARTIAL_SIZE"]
        workspace = (*partial(problem, params, splits), *workspace)
        if row:
            second = second_pass(problem, number(params, "splits"))
            width = 32 * second["SUM_VECTOR"]
            shared = 4 * second["SUM_WARPS"] * width
            steps = (kernel, Launch("sum_partials", const(-(-row // width)), 32 * second["SUM_WARPS"], shared))
    return Plan(steps, workspace, splits)


def waiting_rows(problem: Problem) -> tuple[Buffer, ...]:
    """Where dn*gamma waits between two passes over a row (_waiting.cu.j2): in dx itself if that is float32, else in scratch."""
    return () if problem.dtype == "float32" else (Buffer("row_g", ROWS * problem.hidden),)


def row_kernel_plan(problem: Problem, params: Params, name: str, threads: int, block_rows: int, shared: int,
                    waiting: tuple[Buffer, ...]) -> Plan:
    """The plan of kernels that work by rows and then by columns (_columns.cu.j2), in one launch or in two."""
    workspace = (*(Buffer(statistic, ROWS) for statistic in ("row_mean", "row_rest", "row_rstd")), *waiting)
    blocks = ceil_div(ROWS, block_rows)
    if params["reduction"] == "column_blocks":
        owned = columns(problem, threads)["COLUMN_THREADS"]
        second = Launch("column_blocks", const(-(-problem.hidden // owned)), threads, 8 * threads)
        return Plan((Launch(name, blocks, threads, shared), second), workspace, blocks)
    if params["reduction"] == "single_block":
        return Plan((Launch(name, const(1), threads, shared),), workspace)
    splits = minimum(number(params, "splits"), blocks)
    return with_reduction(problem, params, Launch(name, splits, threads, shared), workspace, splits)

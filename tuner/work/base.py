"""What every kernel of the cost model is described with: one launch as it is set up, what it costs, and latencies.

Latencies in cycles: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", 2024
(H100: L1 40.7, shared memory 29.0, L2 263.0, device memory 478.8). FMA: "Arithmetic Instructions" of the CUDA C++ Programming
Guide. A shuffle passes through the shared-memory crossbar and is given its latency; a barrier of a few warps is about as long.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from codegen.dtypes import ITEMSIZE
from codegen.problem import Problem
from codegen.tensors import gradient_shapes

L1 = 41.0
SHARED = 29.0
L2 = 263.0
MEMORY = 479.0
FMA = 4.0
SHUFFLE = SHARED
BARRIER = SHARED
MATRIX = 33.0
"""One mma.m16n8k16 after another that needs its sum; the same paper, "Tensor Core" (H100, 16-bit operands)."""

UNROLL = 4
"""Iterations of a loop whose loads are in flight together: what the templates ask for, and the compiler's own habit."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One launch of a plan, at the tuned row count.

    Attributes:
        problem: the sizes, data types and wanted gradients.
        constants: the named constants of the rendered source.
        params: the config's parameters, `reduction` among them: how the blocks' shares of the parameter gradients come together.
        blocks: the grid.
        threads: of a block.
        splits: parts the rows are cut into.
        cache_bytes: L1 cache of one SM, as far as one block may count on it.
        sms: of the GPU.
    """

    problem: Problem
    constants: Mapping[str, int]
    params: Mapping[str, int | str]
    blocks: int
    threads: int
    splits: int
    cache_bytes: float
    sms: int

    @property
    def reduction(self) -> str:
        """How the blocks' shares of the parameter gradients come together."""
        return str(self.params["reduction"])

    @property
    def warps(self) -> int:
        """Of a block."""
        return -(-self.threads // 32)

    @property
    def split_rows(self) -> int:
        """Rows of one part."""
        return -(-self.problem.rows // self.splits)

    @property
    def data_size(self) -> int:
        """Bytes of an element of x, dy and dx."""
        return ITEMSIZE[self.problem.dtype]

    @property
    def param_size(self) -> int:
        """Bytes of an element of gamma, beta, w and their gradients."""
        return ITEMSIZE[self.problem.param_dtype]

    @property
    def w_bytes(self) -> float:
        """Bytes of w."""
        return float(self.param_size * self.problem.hidden * self.problem.out)

    @property
    def wants_parameters(self) -> bool:
        """Whether any gradient but dx is wanted."""
        return bool(self.problem.wants - {"dx"})

    @property
    def parameter_elements(self) -> int:
        """Elements of the wanted parameter gradients."""
        return _parameter_elements(self.problem)


@functools.lru_cache(maxsize=64)  # every prediction asks for it
def _parameter_elements(problem: Problem) -> int:
    shapes = gradient_shapes(problem.rows, problem.hidden, problem.out)
    return sum(math.prod(shape) for name, shape in shapes.items() if name in problem.wants - {"dx"})


@dataclass(frozen=True, slots=True)
class Work:
    """The cost of one launch.

    Attributes:
        chain: cycles from a block's first instruction to its last when nothing else runs on its SM.
        instructions: warp instructions a block issues.
        wavefronts: passes through the 128-byte port of L1 and shared memory a block makes.
        l2_bytes: bytes the whole grid moves between the SMs and L2.
        atomics: additions to device memory by the whole grid.
        meetings: how many of them meet at each address.
        registers: estimated registers of a thread.
        matrix: multiply-adds on the matrix units by the whole grid, counted as those of 16-bit operands: one of tf32 counts as
            two, each product of a value split in parts counts, and so does what a tile computes beyond the edge.
    """

    chain: float
    instructions: float
    wavefronts: float
    l2_bytes: float
    atomics: float = 0.0
    meetings: float = 0.0
    registers: int = 40
    matrix: float = 0.0


Kernels = Mapping[str, Callable[[Setting], Work]]
"""By kernel name, what one launch of it costs."""


def pipelined(count: float, latency: float, instructions: float, depth: int = UNROLL) -> float:
    """Cycles of `count` loop iterations with `depth` loads in flight, of `instructions` issued each."""
    return count * max(instructions, latency / depth + FMA) + latency


def emission(setting: Setting) -> tuple[float, float]:
    """(atomics of the grid, how many meet at an address) where each block adds its share once."""
    if setting.reduction != "atomic" or not setting.wants_parameters:
        return 0.0, 0.0
    return float(setting.blocks * setting.parameter_elements), float(setting.blocks)


def plain(setting: Setting) -> Work:
    """A kernel of which nothing is known but its launch: its threads share out the two matrix products, each operand of a
    multiply-add a load of one value through the L1 cache, and each block reads its part of the rows and all of w."""
    problem = setting.problem
    steps = 2.0 * setting.split_rows * problem.hidden * problem.out / max(1, setting.blocks // setting.splits)
    chain = pipelined(steps / setting.threads, L1, 4.0)
    rows_bytes = setting.data_size * problem.rows * (2.0 * problem.hidden + problem.out)
    atomics, meetings = emission(setting)
    return Work(chain=chain + 2 * L2, instructions=4.0 * steps / 32, wavefronts=2.0 * steps / 32,
                l2_bytes=rows_bytes + setting.blocks * setting.w_bytes, atomics=atomics, meetings=meetings)

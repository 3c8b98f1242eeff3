"""Predicted times for GPUs that are not at hand, and the floors no kernel can go below.

A prediction is the sum over a plan's steps, in microseconds. A launch takes

    launch + longest + overlap * others,    the longest and the others of latency, issue, matrix, shared, l2, memory, atomics

launch   an empty kernel replayed from a graph; a fill takes one for each of its tensors. Limits.launch_us.
latency  a block's serial chain, times the rounds in which the blocks of one SM follow each other. Latencies: tuner/work/base.py.
         How many blocks are resident at a time follows from registers (nvcc's report where there is one, else an estimate),
         shared memory, threads and block slots: codegen/limits.py.
issue    the warp instructions of the busiest SM, four a cycle, which are 128 FMA; fewer blocks than SMs, or fewer than four
         warps on an SM, show here. Four schedulers an SM: "Compute Capability 9.0" in the CUDA C++ Programming Guide.
matrix   multiply-adds of the busiest SM's tensor cores through mma.sync. Limits.arch, codegen/limits.py.
shared   passes through the 128-byte port of L1 and shared memory on the busiest SM, one a cycle. The same guide.
l2       bytes between all SMs and L2, re-reads of w and partial sums among them. L2_TBPS.
memory   bytes of the tensors and the workspace that L2 does not keep between calls, of which each launch has the share that it
         has of the bytes between SMs and L2. Limits.copy_tbps, Limits.l2_bytes.
atomics  additions of all blocks, and those that meet at one address in turn. ATOMICS_PER_CYCLE, ATOMIC_TURN.

Each term is multiplied by a weight (WEIGHTS), which tuner/replay/fit.py fits to measured times.

It ranks configs; it is no measurement, and whoever shows its numbers calls them predicted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from codegen.config import Config
from codegen.limits import Limits, matrix_rate
from codegen.plan import Fill, Launch, Plan
from codegen.problem import Problem
from codegen.space import variant_of
from codegen.tensors import BY_NAME, TENSORS, Tensor, itemsize
from codegen.variants import constants
from tuner.executors import Resources
from tuner.work import Setting, Work, work

L2_TBPS = 5.5
"""Bytes between L2 and all SMs, TB/s: the lower end of what chipsandcheese.com read on an H100 ("Nvidia's H100: Funny L2, and
Tons of Bandwidth", 2023)."""

ATOMICS_PER_CYCLE = 64.0
"""float32 additions to different addresses that L2 takes in one cycle. An assumption: one in each of 64 slices."""

ATOMIC_TURN = 2.0
"""Cycles between additions to one address that come from different SMs. An assumption."""

TERMS = ("latency", "issue", "matrix", "shared", "l2", "memory", "atomics")
"""What may limit a launch."""


@dataclass(frozen=True, slots=True)
class Weights:
    """By what the terms of every launch are multiplied, and how they add up.

    Attributes:
        terms: a factor for each of TERMS, in their order.
        overlap: the part of the shorter terms that the longest does not hide.
        kernels: a factor for all terms of a kernel; one that is not there has 1.
    """

    terms: tuple[float, ...] = (1.0,) * len(TERMS)
    overlap: float = 0.25
    kernels: Mapping[str, float] = field(default_factory=dict)


WEIGHTS = Weights(kernels={"weight_mma": 2.0, "tile_cluster": 1.6})
"""Those of predictions. With this overlap, of several from 0 to 1, predictions order best what an H200 took at five shapes from
16 rows of 8 and 16 values to 8192 rows of 768 and 2304: rank correlations 0.83 to 0.95. On 2026-11-30, at revision
98588cd4f772, weight_mma took 1.6 to 2.2 times what its terms say (16 to 256 rows with H, O = 768, 2304 and 4096, 4096), and
tile_cluster 1.3 to 1.9 times (262,144 rows with 64, 512 and 128, 256 and 128, 512)."""

_STEPS = 20
"""Of Newton's method: each halves what is left at least, and this is a millionth."""

PLAUSIBLE = 0.5
"""A measured time below this share of the physical minimum is a fault of the measurement: room for rates that are a little
better than the ones written down, and for none that are twice as good."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted time of one step.

    Attributes:
        name: the kernel, or "fill".
        time_us: microseconds, the launch included.
        limited_by: the term that decides: launch, latency, issue, matrix, shared, l2, memory or atomics.
        blocks_per_sm: resident blocks; 0 for fills.
        terms: microseconds of each of TERMS, before they are weighted; none for fills.
    """

    name: str
    time_us: float
    limited_by: str
    blocks_per_sm: int = 0
    terms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of one call.

    Attributes:
        steps: in plan order.
        resources: what the kernels use, as the prediction took it: the compiler's report, or estimates.
    """

    steps: tuple[StepCost, ...]
    resources: Mapping[str, Resources]

    @property
    def time_us(self) -> float:
        """Microseconds of the whole call."""
        return sum(step.time_us for step in self.steps)


def predict(problem: Problem, config: Config, limits: Limits, resources: Mapping[str, Resources] | None = None) -> Prediction:
    """The predicted time of a config at the problem's row count.

    Args:
        problem: sizes, rows and wanted gradients.
        config: any config whose variant exists.
        limits: the GPU.
        resources: the device compiler's report by kernel; None, or a kernel missing there: estimates.
    """
    params = config.as_dict()
    variant = variant_of(config.variant)
    plan = variant.plan(problem, params)
    named = constants(problem, variant, params)
    used = dict(resources or {})
    launched: dict[int, tuple[Launch, int, Work]] = {}
    for place, step in enumerate(plan.steps):
        if isinstance(step, Launch) and (blocks := step.grid.evaluate(problem.rows, limits.sms)):
            splits = max(1, plan.splits.evaluate(problem.rows, limits.sms))
            cache = max(16 << 10, limits.shared_per_sm - step.shared_bytes)
            setting = Setting(problem, named, params, blocks, step.block, splits, cache, limits.sms)
            launched[place] = step, blocks, work(step.kernel, setting)
    moved = sum(done.l2_bytes for _, _, done in launched.values())
    from_memory = _from_memory(tensor_bytes(problem) + 2 * plan.workspace_bytes(problem.rows, limits.sms), limits.l2_bytes)
    steps: list[StepCost] = []
    for place, step in enumerate(plan.steps):
        if isinstance(step, Fill):
            steps.append(_fill(problem, plan, step, limits))
        elif place in launched:
            launch, blocks, done = launched[place]
            entry = used.setdefault(launch.kernel, Resources(done.registers, launch.shared_bytes, estimated=True))
            memory = from_memory * done.l2_bytes / moved if moved else 0.0
            steps.append(_launch(launch, blocks, done, entry.registers, memory, limits))
    return Prediction(tuple(steps), used)


def resident_blocks(threads: int, registers: int, shared_bytes: int, limits: Limits) -> int:
    """Blocks of a kernel that one SM holds at a time, at least 1.

    Registers are given out by warps in units of 256, shared memory in units of 128 bytes plus what the driver keeps
    ("Occupancy" in the CUDA C++ Best Practices Guide).
    """
    warps = -(-threads // 32)
    warp_registers = -(-min(registers, 255) * 32 // 256) * 256
    shared = -(-shared_bytes // 128) * 128 + limits.reserved_shared
    return max(1, min(limits.max_blocks_per_sm, limits.max_threads_per_sm // (warps * 32),
                      limits.registers_per_sm // (warps * warp_registers), limits.shared_per_sm // shared))


@functools.lru_cache(maxsize=64)  # a prediction asks for it several times
def tensor_bytes(problem: Problem) -> int:
    """Bytes that every call must move at least: each input read once, each wanted gradient written once."""
    return sum(_bytes_of(tensor, problem) for tensor in TENSORS if tensor.role == "input" or tensor.name in problem.wants)


def floor_us(problem: Problem, limits: Limits) -> float:
    """What no kernel is expected to beat, microseconds: one launch, or the tensors at copy bandwidth, whichever is longer."""
    return max(limits.launch_us, tensor_bytes(problem) / (limits.copy_tbps * 1e6))


def plausible_us(problem: Problem, limits: Limits) -> float:
    """A measured time below this, microseconds, is not believed.

    Calls repeated on the same data find what the L2 keeps there, so only the bytes beyond its size count.
    """
    uncached = max(0, tensor_bytes(problem) - limits.l2_bytes)
    return PLAUSIBLE * max(limits.launch_us, uncached / (limits.copy_tbps * 1e6))


@functools.lru_cache(maxsize=1024)  # configs differ in it by their workspace alone
def _from_memory(total: int, l2_bytes: int) -> float:
    """Of `total` bytes that every call goes through once, those that the L2 does not keep from one call to the next.

    It is taken to make room by dropping any line. A byte is still there if it outlived all that was brought in since it was used,
    so the share that was not, `missed`, has 1 - missed = exp(-missed * total / l2_bytes). Newton's method, from above.
    """
    ratio = total / l2_bytes
    if ratio <= 1.0:
        return 0.0
    missed = 1.0
    for _ in range(_STEPS):
        outlived = math.exp(-missed * ratio)
        missed -= (missed - 1.0 + outlived) / (1.0 - ratio * outlived)
    return total * missed


def _bytes_of(tensor: Tensor, problem: Problem) -> int:
    elements = math.prod(tensor.shape(problem.rows, problem.hidden, problem.out))
    return elements * itemsize(tensor.name, problem.dtype, problem.param_dtype)


def _fill(problem: Problem, plan: Plan, fill: Fill, limits: Limits) -> StepCost:
    moved = sum(_bytes_of(BY_NAME[name], problem) for name in fill.names if name in BY_NAME)
    moved += sum(buffer.bytes(problem.rows, limits.sms) for buffer in plan.workspace if buffer.name in fill.names)
    return StepCost("fill", len(fill.names) * limits.launch_us + moved / (L2_TBPS * 1e6), "launch")


def _launch(step: Launch, blocks: int, done: Work, registers: int, memory_bytes: float, limits: Limits) -> StepCost:
    resident = resident_blocks(step.block, registers, step.shared_bytes, limits)
    busiest = -(-blocks // limits.sms)
    warps = -(-step.block // 32)
    cycle_us = 1e-3 / limits.clock_ghz
    schedulers = min(4, warps * min(resident, busiest))
    terms = (
        -(-busiest // resident) * done.chain * cycle_us,
        busiest * done.instructions / schedulers * cycle_us,
        busiest * done.matrix / (blocks * matrix_rate(limits.arch) * schedulers / 4) * cycle_us,
        busiest * done.wavefronts * cycle_us,
        done.l2_bytes / (L2_TBPS * 1e6),
        memory_bytes / (limits.copy_tbps * 1e6),
        max(done.atomics / ATOMICS_PER_CYCLE, done.meetings * ATOMIC_TURN) * cycle_us,
    )
    of_kernel = WEIGHTS.kernels.get(step.kernel, 1.0)
    weighted = [of_kernel * weight * term for weight, term in zip(WEIGHTS.terms, terms, strict=True)]
    longest = max(weighted)
    begins_us = 0.0 if step.overlaps else limits.launch_us  # or while the launch before it ends
    time_us = begins_us + longest + WEIGHTS.overlap * (sum(weighted) - longest)
    return StepCost(step.kernel, time_us, TERMS[weighted.index(longest)], resident, terms)

"""What a GPU can run and how fast: the hard limits that prune configs, and the rates the cost model predicts from."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """One GPU, or one architecture's typical GPU where none is at hand.

    Attributes:
        name: what reports call it.
        arch: the nvcc architecture, "sm_90a".
        sms: streaming multiprocessors.
        max_threads: threads in one block.
        max_threads_per_sm: resident threads of one SM.
        max_blocks_per_sm: resident blocks of one SM.
        registers_per_sm: 32-bit registers of one SM.
        shared_per_block: dynamic shared memory one block can opt in to, bytes.
        shared_per_sm: shared memory of one SM, bytes.
        reserved_shared: bytes the driver keeps of each block's shared memory.
        l2_bytes: size of the L2 cache.
        clock_ghz: SM clock under load.
        copy_tbps: bandwidth of a large device-to-device copy, bytes read plus bytes written, in TB/s.
        launch_us: an empty kernel replayed from a graph, microseconds.
    """

    name: str
    arch: str
    sms: int
    max_threads: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    registers_per_sm: int
    shared_per_block: int
    shared_per_sm: int
    reserved_shared: int
    l2_bytes: int
    clock_ghz: float
    copy_tbps: float
    launch_us: float

    @property
    def overlaps_launches(self) -> bool:
        """Whether a kernel can begin while the one before it ends: from compute capability 9.0 on."""
        return int(self.arch.removeprefix("sm_").rstrip("af")) >= 90


# Per-SM and per-block limits: "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide.
# SM counts, L2 sizes and clocks: the vendor's data sheet of the GPU named. The H200's copy rate, clock and launch time
# were measured (2026-11-29, driver 580, CUDA 13.0); the other GPUs' copy rates are 0.9 of the data sheet's bandwidth, the
# share the H200 reached, and their launch times are the H200's.
_TARGETS = {
    "sm_80": Limits("A100", "sm_80", 108, 1024, 2048, 32, 65536, 163 * 1024, 164 * 1024, 1024, 40 << 20, 1.41, 1.83, 0.51),
    "sm_90": Limits("H200", "sm_90a", 132, 1024, 2048, 32, 65536, 227 * 1024, 228 * 1024, 1024, 50 << 20, 1.98, 4.28, 0.51),
    "sm_100": Limits("B200", "sm_100a", 148, 1024, 2048, 32, 65536, 227 * 1024, 228 * 1024, 1024, 126 << 20, 1.85, 7.2, 0.51),
    "sm_120": Limits("RTX 5090", "sm_120a", 170, 1024, 1536, 24, 65536, 99 * 1024, 100 * 1024, 1024, 96 << 20, 2.41, 1.61, 0.51),
}

TARGETS = tuple(_TARGETS)


def target(name: str) -> Limits:
    """The limits of an architecture by name ("sm_90"; a trailing "a" is accepted).

    Raises:
        InvalidConfig: the architecture is not in TARGETS.
    """
    found = _TARGETS.get(name.removesuffix("a"))
    if found is None:
        raise InvalidConfig(f"target {name!r} is not known; choose from {', '.join(TARGETS)}")
    return found


_MATRIX_RATES = {"sm_80": 1024.0, "sm_90": 1290.0, "sm_100": 1024.0, "sm_120": 256.0}
"""Multiply-adds of 16-bit operands, summed in float32, that mma.sync reaches on one SM in one cycle. sm_80, sm_120: the data
sheets' dense rates. sm_90: 0.63 of the data sheet's 2048, which only wgmma reaches; Luo et al., "Benchmarking and Dissecting the
Nvidia Hopper GPU Architecture via Microbenchmarking", 2024. sm_100: that of sm_80, an assumption. tf32 runs at half of it."""


def matrix_rate(arch: str) -> float:
    """Multiply-adds of 16-bit operands by mma.sync, one SM, one cycle; of an architecture not listed, that of sm_80."""
    return _MATRIX_RATES.get(arch.removesuffix("a"), _MATRIX_RATES["sm_80"])


_MEMORY_GB = {"sm_80": 80, "sm_90": 144, "sm_100": 192, "sm_120": 96}
"""Device memory, 10^9 bytes, of the GPU that has most of it: A100, GH200, B200, RTX PRO 6000; the vendor's data sheets."""


def most_memory(arch: str) -> int:
    """Bytes that no GPU of the architecture has more of; of one that is not listed, the most of any."""
    return 10**9 * _MEMORY_GB.get(arch.removesuffix("a"), 288)

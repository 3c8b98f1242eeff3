"""What the GPU in this machine can do, from its attributes."""

from __future__ import annotations

import re
from collections.abc import Callable

from codegen.limits import TARGETS, Limits, target


def architecture(compute_capability: tuple[int, int]) -> str:
    """The nvcc architecture of a GPU: "sm_90a" of (9, 0). From 9.0 on, the one with all of the chip's own instructions."""
    major, minor = compute_capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def short_name(device: str) -> str:
    """The device's name without its maker's: "H200" of "NVIDIA H200"."""
    return device.removeprefix("NVIDIA ").removeprefix("GeForce ").strip()


def slug(device: str) -> str:
    """The device as a folder name: "h200" of "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", short_name(device).lower()).strip("-")


def read_limits(device: str, compute_capability: tuple[int, int], attribute: Callable[[str], int], *, copy_tbps: float,
                launch_us: float) -> Limits:
    """The limits of a device.

    Args:
        attribute: a device attribute of the CUDA driver by name, without CU_DEVICE_ATTRIBUTE_.
        copy_tbps, launch_us: as in Limits; no attribute tells them.
    """
    return Limits(
        name=short_name(device), arch=architecture(compute_capability), sms=attribute("MULTIPROCESSOR_COUNT"),
        max_threads=attribute("MAX_THREADS_PER_BLOCK"), max_threads_per_sm=attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        max_blocks_per_sm=attribute("MAX_BLOCKS_PER_MULTIPROCESSOR"),
        registers_per_sm=attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        shared_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_per_sm=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        reserved_shared=attribute("RESERVED_SHARED_MEMORY_PER_BLOCK"), l2_bytes=attribute("L2_CACHE_SIZE"),
        clock_ghz=attribute("CLOCK_RATE") / 1e6, copy_tbps=copy_tbps, launch_us=launch_us)


def known(device: str, compute_capability: tuple[int, int], sms: int) -> Limits | None:
    """The entry of the target table that is this very GPU: the same name, architecture and number of SMs."""
    for limits in map(target, TARGETS):
        same_name = re.search(rf"\b{re.escape(limits.name)}\b", device)
        if same_name and limits.arch == architecture(compute_capability) and limits.sms == sms:
            return limits
    return None

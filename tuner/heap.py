"""How the C library's heap behaves in a process that is the tuner's own."""

from __future__ import annotations

import ctypes

LARGE = 1 << 16
"""Bytes from which an array is the system's again as soon as it is freed."""

_MMAP_THRESHOLD = -3  # malloc.h: M_MMAP_THRESHOLD


def keep_compact() -> None:
    """Keeps large arrays out of the heap, where each would leave a hole that small objects then settle in.

    By itself glibc takes ever larger arrays into the heap once one of that size was freed. Libraries without such a setting are
    left alone. Not for a process that compares results: arrays that come from the system each time are cleared each time, which
    makes it take more than three times as long.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGE)

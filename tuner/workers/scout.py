"""Which GPUs a run is to use, found out before anything runs on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from tuner.errors import InputError, NoSuchDevice
from tuner.workers.messages import Device


def scout(gpus: Sequence[int], look: Callable[[int, Device | None], Device]) -> dict[int, Device]:
    """What the GPUs of these numbers are, or, where none is named, all there are; one, where nothing is timed.

    Args:
        gpus: the numbers.
        look: opens the GPU of a number; given what the first one is, whose rates need not be measured again.

    Raises:
        InputError: they are of several models.
        NoSuchDevice: there are not so many.
        ToolchainError, DeviceLost: as `look`.
    """
    found: dict[int, Device] = {}
    first: Device | None = None
    for gpu in gpus or itertools.count():
        try:
            found[gpu] = look(gpu, first)
        except NoSuchDevice:
            if gpus or first is None:
                raise
            break
        first = first or found[gpu]
        if not first.measures:
            break
        if found[gpu].device != first.device:
            raise InputError(f"the GPUs are not of one model, as they must be to share a search: GPU {next(iter(found))} is "
                             f"{first.device}, GPU {gpu} {found[gpu].device}; name those of one model with --gpus")
    return found

"""Device memory of one call: every tensor between red zones, allocations kept from one call to the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.tensors import READ
from tuner.errors import LaunchError
from tuner.executors.cuda_context import Gpu
from tuner.inputs import Array32, Inputs

Words = NDArray[np.uint32]

GUARD_BYTES = 16 << 10
"""Smallest red zone. It takes two rows of 2048 values; what lies further off is not seen."""

ALIGNMENT = 256
"""Every tensor starts at a multiple of this many bytes, as a tensor of its own from cudaMalloc would."""

ZONE_WORD = 0x7FF0DEAD
"""What red zones hold: a NaN, so that reading one shows in the results, and one that arithmetic never yields."""

MAX_CACHED_INPUTS = 16
CACHE_SHARE = 4  # of the GPU's memory, inputs kept from earlier calls take one part in so many at most


@dataclass(frozen=True, slots=True)
class Zone:
    """The words [begin, end) between two tensors; at either end of an allocation there is only one."""

    begin: int
    end: int
    left: str | None
    right: str | None

    def damage(self, words: Words) -> str | None:
        """What a kernel did to the zone, as a clause that names the tensor it probably meant; None: nothing.

        Args:
            words: what the zone holds now [end - begin].
        """
        changed = np.flatnonzero(words != ZONE_WORD)
        if changed.size == 0:
            return None
        past, before = 4 * int(changed[0]), 4 * (len(words) - int(changed[-1]))
        if self.right is None or (self.left is not None and past < before):
            return f"wrote {past} bytes past the end of {self.left}"
        return f"wrote {before} bytes before the start of {self.right}"


class Layout:
    """Where float32 tensors lie in one allocation: zone, tensor, zone, tensor, ..., zone. In 32-bit words.

    Args:
        sizes: tensor name -> number of elements.

    Attributes:
        spans: tensor name -> its words [begin, end).
        zones: in order; together with the spans they cover the allocation.
        total_bytes: size of the allocation.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.spans: dict[str, tuple[int, int]] = {}
        zones: list[Zone] = []
        end, left = 0, None
        for name, size in sizes.items():
            begin = -(-(4 * end + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT // 4
            zones.append(Zone(end, begin, left, name))
            end, left = begin + size, name
            self.spans[name] = begin, end
        zones.append(Zone(end, end + GUARD_BYTES // 4, left, None))
        self.zones = tuple(zones) if sizes else ()
        self.total_bytes = 4 * zones[-1].end if sizes else 0


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """Tensors on the device. All of its methods enqueue on the GPU's stream, inside `Gpu.active`."""

    gpu: Gpu
    layout: Layout
    base: int

    @property
    def addresses(self) -> dict[str, int]:
        """Device address of each tensor."""
        return {name: self.base + 4 * begin for name, (begin, _) in self.layout.spans.items()}

    def fill(self, name: str, word: int) -> None:
        """Sets every element of a tensor to the same 32 bits."""
        self._set(*self.layout.spans[name], word)

    def guard(self) -> None:
        """Writes the red zones."""
        for zone in self.layout.zones:
            self._set(zone.begin, zone.end, ZONE_WORD)

    def _set(self, begin: int, end: int, word: int) -> None:
        if end > begin:
            self.gpu.driver.memset_d32_async(self.base + 4 * begin, word, end - begin, self.gpu.stream)

    def write(self, name: str, values: Array32) -> None:
        """Uploads a tensor."""
        if values.size:
            self.gpu.driver.memcpy_htod_async(self.addresses[name], values, self.gpu.stream)

    def fetch(self, into: Words | None = None) -> Words:
        """Downloads the whole allocation, red zones included; `into` saves making an array of its size."""
        return self._read(0, self.layout.total_bytes // 4, into)

    def fetch_zones(self) -> list[Words]:
        """Downloads the red zones alone, in order."""
        return [self._read(zone.begin, zone.end) for zone in self.layout.zones]

    def _read(self, begin: int, end: int, into: Words | None = None) -> Words:
        words = np.empty(end - begin, np.uint32) if into is None else into[:end - begin]
        if words.size:
            self.gpu.driver.memcpy_dtoh_async(words, self.base + 4 * begin, self.gpu.stream)
        return words

    def zones_of(self, image: Words) -> list[Words]:
        """The red zones in a fetched image."""
        return [image[zone.begin:zone.end] for zone in self.layout.zones]

    def damage(self, zones: list[Words]) -> str | None:
        """The first damage that fetched red zones show."""
        found = (zone.damage(words) for zone, words in zip(self.layout.zones, zones, strict=True))
        return next((clause for clause in found if clause is not None), None)


class Memory:
    """The allocations of one executor. All methods are for use inside `Gpu.active`.

    Outputs and workspace each have one allocation, which grows when it must. Inputs whose arrays are all read-only are kept by
    identity, so that such an object is uploaded once; others belong to one call.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._scratch: dict[str, tuple[Any, int]] = {}
        self._inputs: OrderedDict[int, tuple[Inputs, Any, Placed]] = OrderedDict()
        self._image = np.empty(0, np.uint32)

    def place(self, inputs: Inputs, outputs: Mapping[str, int], workspace: Mapping[str, int]) -> tuple[Placed, Placed, Placed]:
        """The inputs, and room for outputs and workspace (name -> elements) with fresh red zones, until the next call.

        Raises:
            LaunchError: the GPU has not enough memory.
        """
        # Making room for these may cost kept inputs, so they come first.
        placed = self._place_scratch("outputs", outputs), self._place_scratch("workspace", workspace)
        return self._upload(inputs), *placed

    def release(self, inputs: Inputs) -> None:
        """Ends a call: frees its inputs unless they may be used again."""
        if id(inputs) in self._inputs and any(array.flags.writeable for array in _arrays(inputs).values()):
            self._forget(id(inputs))

    def free(self) -> None:
        """Gives all memory back to the GPU. The next call takes it again."""
        self._shrink(0, 0)
        while self._scratch:
            _, (allocation, _) = self._scratch.popitem()
            allocation.free()

    def _place_scratch(self, role: str, sizes: Mapping[str, int]) -> Placed:
        layout = Layout(sizes)
        allocation, capacity = self._scratch.get(role, (None, 0))
        if layout.total_bytes > capacity:
            self._scratch.pop(role, None)
            if allocation is not None:
                allocation.free()
            allocation = self._allocate(layout.total_bytes)
            self._scratch[role] = allocation, layout.total_bytes
        placed = Placed(self._gpu, layout, 0 if allocation is None else int(allocation))
        placed.guard()
        return placed

    def _upload(self, inputs: Inputs) -> Placed:
        key = id(inputs)
        if key in self._inputs:
            self._inputs.move_to_end(key)
            return self._inputs[key][2]
        arrays = _arrays(inputs)
        layout = Layout({name: array.size for name, array in arrays.items()})
        self._shrink(MAX_CACHED_INPUTS - 1, self._gpu.memory_bytes // CACHE_SHARE - layout.total_bytes)
        allocation = self._allocate(layout.total_bytes)
        placed = Placed(self._gpu, layout, int(allocation))
        placed.guard()
        for name, array in arrays.items():
            placed.write(name, array)
        self._inputs[key] = inputs, allocation, placed
        return placed

    def check_inputs(self, inputs: Inputs, placed: Placed) -> None:
        """Compares the inputs on the device and what surrounds them with what was uploaded, bit for bit.

        Raises:
            LaunchError: they differ; the message names the input. The next call uploads them again.
        """
        if len(self._image) < placed.layout.total_bytes // 4:
            self._image = np.empty(placed.layout.total_bytes // 4, np.uint32)
        image = placed.fetch(self._image)
        self._gpu.stream.synchronize()
        fault = placed.damage(placed.zones_of(image))
        for name, (begin, end) in placed.layout.spans.items():
            if fault is None and not np.array_equal(image[begin:end], getattr(inputs, name).reshape(-1).view(np.uint32)):
                fault = f"wrote into the input {name}"
        if fault is not None:
            self._forget(id(inputs))
            raise LaunchError(f"the kernel {fault}")

    def _allocate(self, size: int) -> Any:
        driver = self._gpu.driver
        try:
            return driver.mem_alloc(size)
        except driver.MemoryError:
            self._shrink(0, 0)
        try:
            return driver.mem_alloc(size)
        except driver.MemoryError as error:
            free, _ = driver.mem_get_info()
            raise LaunchError(f"the kernel needs {size} more bytes of GPU memory where {free} are free") from error

    def _shrink(self, entries: int, size: int) -> None:
        """Frees inputs, those first that were not used for longest, down to so many and to so many bytes."""
        while self._inputs and (
                len(self._inputs) > entries
                or sum(placed.layout.total_bytes for _, _, placed in self._inputs.values()) > size):
            self._forget(next(iter(self._inputs)))

    def _forget(self, key: int) -> None:
        _, allocation, _ = self._inputs.pop(key)
        allocation.free()


def _arrays(inputs: Inputs) -> dict[str, Array32]:
    """The arrays that are there, by the name of the kernels' pointer."""
    return {name: array for name in READ if (array := getattr(inputs, name)) is not None}

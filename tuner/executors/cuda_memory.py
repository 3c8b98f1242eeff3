"""Device memory of one call: every tensor between red zones, allocations kept from one call to the next."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.tensors import READ
from tuner.dtypes import POISON, DType, as_bytes, same_bits
from tuner.errors import LaunchError, OutOfMemory
from tuner.executors.arrays import Spec
from tuner.executors.cuda_context import Gpu
from tuner.inputs import AnyFloats, Inputs

Bytes = NDArray[np.uint8]

GUARD_BYTES = 16 << 10
"""Smallest red zone. It takes two rows of 2048 float32 values; what lies further off is not seen."""

ALIGNMENT = 256
"""Every tensor starts at a multiple of this many bytes, as a tensor of its own from cudaMalloc would."""

MAX_CACHED_INPUTS = 16
CACHE_SHARE = 4  # of the GPU's memory, inputs kept from earlier calls take one part in so many at most

_POISON = np.full(GUARD_BYTES // 4 + ALIGNMENT, POISON, np.uint32).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Zone:
    """The bytes [begin, end) between two tensors; at either end of an allocation there is only one.

    Red zones hold POISON, a NaN, so that reading one shows in the results.

    Attributes:
        left, right: the tensors.
        units: bytes of one element of each.
    """

    begin: int
    end: int
    left: str | None
    right: str | None
    units: tuple[int, int]

    def damage(self, held: Bytes) -> str | None:
        """What a kernel did to the zone, as a clause that names the tensor it probably meant; None: nothing.

        Args:
            held: what the zone holds now [end - begin].
        """
        phase = self.begin % 4
        changed = np.flatnonzero(held != _POISON[phase:phase + len(held)])
        if changed.size == 0:
            return None
        past = int(changed[0]) // self.units[0] * self.units[0]
        before = _up_to_multiple(len(held) - int(changed[-1]), self.units[1])
        if self.right is None or (self.left is not None and past < before):
            return f"wrote {past} bytes past the end of {self.left}"
        return f"wrote {before} bytes before the start of {self.right}"


class Layout:
    """Where tensors lie in one allocation: zone, tensor, zone, tensor, ..., zone. Offsets are in bytes.

    Args:
        specs: by tensor name.

    Attributes:
        specs: the same.
        spans: tensor name -> its bytes [begin, end).
        zones: in order; together with the spans they cover the allocation.
        total_bytes: size of the allocation, a multiple of 4.
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self.specs = dict(specs)
        self.spans: dict[str, tuple[int, int]] = {}
        zones: list[Zone] = []
        end, left, unit = 0, None, 1
        for name, spec in specs.items():
            begin = _up_to_multiple(end + GUARD_BYTES, ALIGNMENT)
            zones.append(Zone(end, begin, left, name, (unit, spec.dtype.itemsize)))
            end, left, unit = begin + spec.nbytes, name, spec.dtype.itemsize
            self.spans[name] = begin, end
        zones.append(Zone(end, _up_to_multiple(end + GUARD_BYTES, 4), left, None, (unit, 1)))
        self.zones = tuple(zones) if specs else ()
        self.total_bytes = zones[-1].end if specs else 0

    def tensor(self, image: Bytes, name: str) -> NDArray[Any]:
        """One tensor in a fetched image of the whole allocation; the memory is shared."""
        spec = self.specs[name]
        return image[slice(*self.spans[name])].view(spec.dtype).reshape(spec.shape)


def _up_to_multiple(value: int, of: int) -> int:
    return -(-value // of) * of


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """Tensors on the device. All of its methods enqueue on the GPU's stream, inside `Gpu.active`."""

    gpu: Gpu
    layout: Layout
    base: int

    @property
    def addresses(self) -> dict[str, int]:
        """Device address of each tensor."""
        return {name: self.base + begin for name, (begin, _) in self.layout.spans.items()}

    def zero(self, name: str) -> None:
        """Sets every byte of a tensor to zero, by one operation."""
        begin, end = self.layout.spans[name]
        if (end - begin) % 4 == 0:
            self._set_words(begin, end, 0)
        else:
            self.gpu.driver.memset_d8_async(self.base + begin, 0, end - begin, self.gpu.stream)

    def fill(self, name: str, value: float) -> None:
        """Sets every element of a tensor; NaN stands for POISON, in tensors of whole numbers too."""
        begin, end = self.layout.spans[name]
        word = _word(value, self.layout.specs[name].dtype)
        whole = end - (end - begin) % 4
        self._set_words(begin, whole, int.from_bytes(word, "little"))
        for at in range(whole, end):
            self.gpu.driver.memset_d8_async(self.base + at, word[at - whole], 1, self.gpu.stream)

    def guard(self) -> None:
        """Writes the red zones, in words, and with them up to three bytes at the end of each tensor: before anything else."""
        for zone in self.layout.zones:
            self._set_words(zone.begin // 4 * 4, zone.end, POISON)

    def _set_words(self, begin: int, end: int, word: int) -> None:
        if end > begin:
            self.gpu.driver.memset_d32_async(self.base + begin, word, (end - begin) // 4, self.gpu.stream)

    def write(self, name: str, values: AnyFloats) -> None:
        """Uploads a tensor."""
        if values.size:
            self.gpu.driver.memcpy_htod_async(self.addresses[name], as_bytes(values), self.gpu.stream)

    def fetch(self, into: Bytes | None = None) -> Bytes:
        """Downloads the whole allocation, red zones included; `into` saves making an array of its size."""
        return self._read(0, self.layout.total_bytes, into)

    def fetch_zones(self) -> list[Bytes]:
        """Downloads the red zones alone, in order."""
        return [self._read(zone.begin, zone.end) for zone in self.layout.zones]

    def _read(self, begin: int, end: int, into: Bytes | None = None) -> Bytes:
        held = np.empty(end - begin, np.uint8) if into is None else into[:end - begin]
        if held.size:
            self.gpu.driver.memcpy_dtoh_async(held, self.base + begin, self.gpu.stream)
        return held

    def zones_of(self, image: Bytes) -> list[Bytes]:
        """The red zones in a fetched image."""
        return [image[zone.begin:zone.end] for zone in self.layout.zones]

    def damage(self, zones: list[Bytes]) -> str | None:
        """The first damage that fetched red zones show."""
        found = (zone.damage(held) for zone, held in zip(self.layout.zones, zones, strict=True))
        return next((clause for clause in found if clause is not None), None)


def _word(value: float, dtype: DType) -> bytes:
    """Four bytes full of elements of that value."""
    if math.isnan(value):
        return POISON.to_bytes(4, "little")
    return np.full(4 // dtype.itemsize, value, dtype).tobytes()


class Memory:
    """The allocations of one executor. All methods are for use inside `Gpu.active`.

    Outputs and workspace each have one allocation, which grows when it must. Inputs whose arrays are all read-only are kept by
    identity, so that such an object is uploaded once; others belong to one call.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._scratch: dict[str, tuple[Any, int]] = {}
        self._inputs: OrderedDict[int, tuple[Inputs, Any, Placed]] = OrderedDict()
        self._image = np.empty(0, np.uint8)

    def place(self, inputs: Inputs, outputs: Mapping[str, Spec], workspace: Mapping[str, Spec]) -> tuple[Placed, Placed, Placed]:
        """The inputs, and room for outputs and workspace with fresh red zones, until the next call.

        Raises:
            OutOfMemory: the GPU has not enough memory.
        """
        # Making room for these may cost kept inputs, so they come first.
        placed = self._place_scratch("outputs", outputs), self._place_scratch("workspace", workspace)
        return self._upload(inputs), *placed

    def release(self, inputs: Inputs) -> None:
        """Ends a call: frees its inputs unless they may be used again."""
        if id(inputs) in self._inputs and any(array.flags.writeable for array in arrays_of(inputs).values()):
            self._forget(id(inputs))

    def free(self) -> None:
        """Gives all memory back to the GPU. The next call takes it again."""
        self._shrink(0, 0)
        while self._scratch:
            _, (allocation, _) = self._scratch.popitem()
            allocation.free()

    def _place_scratch(self, role: str, specs: Mapping[str, Spec]) -> Placed:
        layout = Layout(specs)
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
        arrays = arrays_of(inputs)
        layout = Layout({name: Spec(array.shape, array.dtype) for name, array in arrays.items()})
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
        if len(self._image) < placed.layout.total_bytes:
            self._image = np.empty(placed.layout.total_bytes, np.uint8)
        image = placed.fetch(self._image)
        self._gpu.stream.synchronize()
        fault = placed.damage(placed.zones_of(image))
        for name in placed.layout.spans:
            if fault is None and not same_bits(placed.layout.tensor(image, name), getattr(inputs, name)):
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
            raise OutOfMemory(f"the kernel needs {size} more bytes of GPU memory where {free} are free") from error

    def _shrink(self, entries: int, size: int) -> None:
        """Frees inputs, those first that were not used for longest, down to so many and to so many bytes."""
        while self._inputs and (
                len(self._inputs) > entries
                or sum(placed.layout.total_bytes for _, _, placed in self._inputs.values()) > size):
            self._forget(next(iter(self._inputs)))

    def _forget(self, key: int) -> None:
        _, allocation, _ = self._inputs.pop(key)
        allocation.free()


def arrays_of(inputs: Inputs) -> dict[str, AnyFloats]:
    """The arrays that are there, by the name of the kernels' pointer."""
    return {name: array for name in READ if (array := getattr(inputs, name)) is not None}

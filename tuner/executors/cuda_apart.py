"""Device memory for tools that watch every access: each tensor has an allocation of exactly its size, and nothing is filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.executors.arrays import Spec
from tuner.executors.cuda_context import Gpu
from tuner.executors.cuda_memory import Layout, Memory, Placed, arrays_of
from tuner.inputs import Inputs


class Apart(Layout):
    """Tensors that lie anywhere: `spans` holds addresses, and no zone surrounds them.

    Args:
        specs: by tensor name.
        addresses: of each tensor.
    """

    def __init__(self, specs: Mapping[str, Spec], addresses: Mapping[str, int]) -> None:
        self.specs = dict(specs)
        self.spans = {name: (addresses[name], addresses[name] + spec.nbytes) for name, spec in specs.items()}
        self.zones = ()
        self.total_bytes = 0


class ApartMemory(Memory):
    """The memory of one call at a time, given back when it ends.

    Where tensors lie between red zones in one allocation, and outputs and workspace hold a value, as in Memory, an access next
    to a tensor is within the allocation, and nothing that is read was never written.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self._held: list[Any] = []

    def place(self, inputs: Inputs, outputs: Mapping[str, Spec], workspace: Mapping[str, Spec]) -> tuple[Placed, Placed, Placed]:
        """As Memory.place, without red zones."""
        arrays = arrays_of(inputs)
        placed = self._place_apart({name: Spec(array.shape, array.dtype) for name, array in arrays.items()})
        for name, array in arrays.items():
            placed.write(name, array)
        return placed, self._place_apart(outputs), self._place_apart(workspace)

    def release(self, inputs: Inputs) -> None:
        """Ends a call: frees all that it had."""
        while self._held:
            self._held.pop().free()

    def _place_apart(self, specs: Mapping[str, Spec]) -> Placed:
        addresses = {}
        for name, spec in specs.items():
            allocation = self._allocate(max(spec.nbytes, 1))
            self._held.append(allocation)
            addresses[name] = int(allocation)
        return Placed(self._gpu, Apart(specs, addresses), 0)

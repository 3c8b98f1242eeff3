"""A plan: everything an executor must do to run one kernel source, as data. Executors replay it and know no variant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from codegen.dtypes import ELEMENT_BYTES
from codegen.expr import ONE, Expr


@dataclass(frozen=True, slots=True)
class Buffer:
    """Scratch memory of one call, reached in the kernels as the Params field `name`.

    Its contents are undefined when a call begins, and nothing is kept from one call to the next.

    Attributes:
        name: also the name of its pointer in Params.
        size: its elements.
        dtype: their data type, one of dtypes.ELEMENT_BYTES.
    """

    name: str
    size: Expr
    dtype: str = "float32"

    def bytes(self, rows: int, sms: int) -> int:
        """Its size in bytes."""
        return self.size.evaluate(rows, sms) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Fill:
    """Set every byte of these tensors (outputs or buffers) to zero. A tensor whose pointer is null is passed over."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """Run one kernel: a one-dimensional grid of `grid` blocks of `block` threads, `shared_bytes` dynamic shared memory.

    A grid of zero blocks is not launched.

    Attributes:
        overlaps: it may begin while the launch before it still runs, as far as that lets it ("Programmatic Dependent Launch" in
            the CUDA C++ Programming Guide). Every thread of such a kernel calls wait_for_launch_before(), and touches nothing
            that the call writes before that has returned. It takes a GPU whose `Limits.overlaps_launches` holds.
    """

    kernel: str
    grid: Expr
    block: int
    shared_bytes: int = 0
    overlaps: bool = False


Step = Fill | Launch


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one call, in stream order, and the scratch memory they share.

    Attributes:
        steps: fills and launches; all of them belong to the time of a call.
        workspace: scratch buffers.
        splits: the value of the Params field `splits`, into how many parts the rows are cut.
    """

    steps: tuple[Step, ...]
    workspace: tuple[Buffer, ...] = ()
    splits: Expr = ONE

    def __post_init__(self) -> None:
        for before, step in self.pairs:
            if isinstance(step, Launch) and step.overlaps and not isinstance(before, Launch):
                raise ValueError(f"{step.kernel} overlaps with no launch: there is none right before it")

    @property
    def pairs(self) -> tuple[tuple[Step | None, Step], ...]:
        """Each step with the one right before it; None before the first."""
        return tuple(zip((None, *self.steps), self.steps, strict=False))

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The launch steps alone."""
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def overlapping(self) -> frozenset[str]:
        """The kernels of launches that overlap with the one before."""
        return frozenset(launch.kernel for launch in self.launches if launch.overlaps)

    @property
    def followed(self) -> frozenset[str]:
        """The kernels of launches that the next one overlaps with."""
        return frozenset(before.kernel for before, launch in pairwise(self.launches) if launch.overlaps)

    def overlapped(self) -> Plan:
        """The same with every launch right behind a launch overlapping with that."""
        steps = [replace(step, overlaps=True) if isinstance(step, Launch) and isinstance(before, Launch) else step
                 for before, step in self.pairs]
        return replace(self, steps=tuple(steps))

    def workspace_bytes(self, rows: int, sms: int) -> int:
        """Scratch memory of a call in bytes, each buffer starting at a multiple of 256."""
        return sum(-(-buffer.bytes(rows, sms) // 256) * 256 for buffer in self.workspace)

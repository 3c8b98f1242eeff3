"""What is to be computed: the sizes of one LayerNorm+Linear backward pass and the gradients asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from codegen.dtypes import OWN_CLASS, check_accuracy, check_dtypes
from codegen.errors import InvalidProblem
from codegen.tensors import OUTPUTS

GRADIENTS = OUTPUTS
"""The five outputs, in the order in which every signature, record and report lists them."""

ALL_GRADIENTS = frozenset(GRADIENTS)


@dataclass(frozen=True, slots=True)
class Shape:
    """The four sizes of a call: x is [batch, seq, hidden], w is [out, hidden], dy is [batch, seq, out].

    Raises:
        InvalidProblem: a size is negative, or hidden or out is zero.
    """

    batch: int
    seq: int
    hidden: int
    out: int

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.out < 1:
            raise InvalidProblem(f"hidden and out must be at least 1, not {self.hidden} and {self.out}")
        if self.batch < 0 or self.seq < 0:
            raise InvalidProblem(f"batch and seq cannot be negative, as in {self.batch},{self.seq}")

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads "B,S,H,O" ("4,4,8,16").

        Raises:
            InvalidProblem: the text is not four whole numbers, or they are no valid sizes.
        """
        parts = text.replace("x", ",").split(",")
        if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
            raise InvalidProblem(f"a shape is four whole numbers B,S,H,O such as 4,4,8,16, not {text!r}")
        return cls(*(int(part) for part in parts))

    @property
    def rows(self) -> int:
        """M = batch * seq, the number of rows of x and dy."""
        return self.batch * self.seq

    def __str__(self) -> str:
        return f"{self.batch},{self.seq},{self.hidden},{self.out}"

    @property
    def slug(self) -> str:
        """The shape as part of a file name: "4x4x8x16"."""
        return f"{self.batch}x{self.seq}x{self.hidden}x{self.out}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One tuning problem.

    Attributes:
        rows: M, the row count the kernel is tuned for. Row counts are a run-time argument of every kernel: the
            rendered source does not depend on this number, only the choice of config does.
        hidden: H, the row length of x.
        out: O, the row length of dy.
        dtype: data type of x, dy and dx (codegen/dtypes.py).
        wants: the gradients to compute, a subset of GRADIENTS.
        deterministic: only kernels whose results are bitwise reproducible, on any GPU of the target's architecture.
        param_dtype: data type of gamma, beta, w and their gradients: `dtype` or float32; empty stands for `dtype`.
        accuracy: the class every kernel must meet (dtypes.CLASS_ERRORS); empty stands for that of `dtype`.

    Raises:
        InvalidProblem: a size is out of range, `wants` is empty or names something else, or results of this data type cannot
            meet the accuracy class.
        UnsupportedDtype: the data types are not supported, or not together.
    """

    rows: int
    hidden: int
    out: int
    dtype: str = "float32"
    wants: frozenset[str] = field(default=ALL_GRADIENTS)
    deterministic: bool = False
    param_dtype: str = ""
    accuracy: str = ""

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise InvalidProblem(f"the number of rows cannot be negative, as {self.rows} is")
        if self.hidden < 1 or self.out < 1:
            raise InvalidProblem(f"hidden and out must be at least 1, not {self.hidden} and {self.out}")
        object.__setattr__(self, "param_dtype", self.param_dtype or self.dtype)
        check_dtypes(self.dtype, self.param_dtype)
        object.__setattr__(self, "accuracy", self.accuracy or OWN_CLASS[self.dtype])
        check_accuracy(self.accuracy, self.dtype)
        check_wants(self.wants)

    @classmethod
    def of(cls, shape: Shape, *, dtype: str = "float32", wants: Iterable[str] | None = None,
           deterministic: bool = False, param_dtype: str = "", accuracy: str = "") -> Problem:
        """The problem of a shape; `wants` None asks for all five gradients."""
        chosen = ALL_GRADIENTS if wants is None else frozenset(wants)
        return cls(shape.rows, shape.hidden, shape.out, dtype, chosen, deterministic, param_dtype, accuracy)

    @property
    def wants_key(self) -> str:
        """The wanted gradients in their fixed order: "dx,dw"."""
        return ",".join(name for name in GRADIENTS if name in self.wants)


def check_wants(wants: Iterable[str]) -> None:
    """Raises InvalidProblem unless `wants` is a non-empty subset of GRADIENTS."""
    names = set(wants)
    if unknown := sorted(names - ALL_GRADIENTS):
        raise InvalidProblem(f"{unknown[0]!r} is no gradient; choose from {', '.join(GRADIENTS)}")
    if not names:
        raise InvalidProblem(f"no gradient is wanted; choose at least one of {', '.join(GRADIENTS)}")

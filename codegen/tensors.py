"""The tensors of one call, in one table: their order in every signature, their shapes and their data types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from codegen.dtypes import ITEMSIZE

Role = Literal["input", "output", "saved"]
Extent = Literal["rows", "hidden", "out"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a call.

    Attributes:
        name: its name everywhere, and its pointer in Params.
        role: "input" and "saved" are read only; "saved" may have been kept by the forward pass.
        extents: its shape, outermost first.
        of: whose data type it has: "data" (x, dy, dx), "param" (gamma, beta, w and all parameter gradients) or "float32".
        absence: what a null pointer stands for; empty where the pointer is never null.
    """

    name: str
    role: Role
    extents: tuple[Extent, ...]
    of: Literal["data", "param", "float32"]
    absence: str = ""

    def shape(self, rows: int, hidden: int, out: int) -> tuple[int, ...]:
        """Its shape in elements."""
        sizes = {"rows": rows, "hidden": hidden, "out": out}
        return tuple(sizes[extent] for extent in self.extents)

    def dtype(self, dtype: str, param_dtype: str) -> str:
        """Its data type where x has `dtype` and w has `param_dtype`."""
        return {"data": dtype, "param": param_dtype, "float32": "float32"}[self.of]


_NOT_WANTED = "not wanted"

TENSORS = (
    Tensor("dy", "input", ("rows", "out"), "data"),
    Tensor("x", "input", ("rows", "hidden"), "data"),
    Tensor("gamma", "input", ("hidden",), "param", "all ones"),
    Tensor("beta", "input", ("hidden",), "param", "all zeros"),
    Tensor("w", "input", ("out", "hidden"), "param"),
    Tensor("dx", "output", ("rows", "hidden"), "data", _NOT_WANTED),
    Tensor("dgamma", "output", ("hidden",), "param", _NOT_WANTED),
    Tensor("dbeta", "output", ("hidden",), "param", _NOT_WANTED),
    Tensor("dw", "output", ("out", "hidden"), "param", _NOT_WANTED),
    Tensor("db", "output", ("out",), "param", _NOT_WANTED),
    Tensor("mean", "saved", ("rows",), "float32", "recomputed"),
    Tensor("rstd", "saved", ("rows",), "float32", "recomputed"),
)
"""In the order of the fields of Params."""

BY_NAME = {tensor.name: tensor for tensor in TENSORS}
INPUTS = tuple(tensor.name for tensor in TENSORS if tensor.role == "input")
OUTPUTS = tuple(tensor.name for tensor in TENSORS if tensor.role == "output")
SAVED = tuple(tensor.name for tensor in TENSORS if tensor.role == "saved")
READ = INPUTS + SAVED
"""Everything a kernel reads and never writes."""


def gradient_shapes(rows: int, hidden: int, out: int) -> dict[str, tuple[int, ...]]:
    """The shape of each gradient, in order."""
    return {name: BY_NAME[name].shape(rows, hidden, out) for name in OUTPUTS}


def itemsize(name: str, dtype: str, param_dtype: str) -> int:
    """Bytes of one element of a tensor."""
    return ITEMSIZE[BY_NAME[name].dtype(dtype, param_dtype)]

"""The one argument of every kernel: `struct Params`, its C text and its bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from codegen.dtypes import ELEMENT_TYPES, ITEMSIZE
from codegen.plan import Plan
from codegen.problem import Problem
from codegen.tensors import BY_NAME, READ, TENSORS, Tensor

_EXTENTS = {"rows": "rows", "hidden": "HIDDEN", "out": "OUT"}
_TYPES = {"data": "data_t", "param": "param_t", "float32": "float"}


def pointer_fields(plan: Plan) -> tuple[str, ...]:
    """The pointer fields in order: inputs, outputs, saved statistics, scratch buffers."""
    return tuple(BY_NAME) + tuple(buffer.name for buffer in plan.workspace)


def declaration(plan: Plan) -> str:
    """The C++ text of the struct, in terms of the types of templates/_types.cu.j2.

    It has the same layout for nvcc and for any 64-bit host compiler.
    """
    lines = [_field(tensor) for tensor in TENSORS]
    lines += [f"  {ELEMENT_TYPES[buffer.dtype]}* {buffer.name};  // scratch" for buffer in plan.workspace]
    lines += ["  int64_t rows;", "  float eps;", "  int splits;  // parts the rows are cut into"]
    return "struct Params {\n" + "\n".join(lines) + "\n};"


def short_types(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """The 16-bit data types among those of the tensors and the scratch buffers, in a fixed order."""
    used = {problem.dtype, problem.param_dtype, *(buffer.dtype for buffer in plan.workspace)}
    return tuple(dtype for dtype, size in ITEMSIZE.items() if size == 2 and dtype in used)


def pack(plan: Plan, values: Mapping[str, int | float]) -> bytes:
    """The struct's bytes, little-endian. A pointer that `values` lacks is null; rows, eps and splits must be there."""
    fields = pointer_fields(plan)
    pointers = [int(values.get(name, 0)) for name in fields]
    return struct.pack(f"<{len(fields)}Qqfi", *pointers, int(values["rows"]), float(values["eps"]), int(values["splits"]))


def _field(tensor: Tensor) -> str:
    qualifier = "const " if tensor.name in READ else ""
    shape = ", ".join(_EXTENTS[extent] for extent in tensor.extents)
    absence = f"; null: {tensor.absence}" if tensor.absence else ""
    return f"  {qualifier}{_TYPES[tensor.of]}* {tensor.name};  // [{shape}]{absence}"

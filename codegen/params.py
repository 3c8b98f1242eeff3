"""The one argument of every kernel: `struct Params`, its C text and its bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from codegen.plan import Plan
from codegen.problem import GRADIENTS
from codegen.tensors import INPUTS, READ, SAVED

_COMMENTS = {
    "dy": "[rows, OUT]", "x": "[rows, HIDDEN]", "gamma": "[HIDDEN]; null: all ones", "beta": "[HIDDEN]; null: all zeros",
    "w": "[OUT, HIDDEN]", "dx": "[rows, HIDDEN]; an output that is null is not wanted", "dgamma": "[HIDDEN]",
    "dbeta": "[HIDDEN]", "dw": "[OUT, HIDDEN]", "db": "[OUT]",
    "mean": "[rows]; saved by the forward pass; null: recomputed", "rstd": "[rows]; likewise",
}


def pointer_fields(plan: Plan) -> tuple[str, ...]:
    """The pointer fields in order: inputs, outputs, saved statistics, scratch buffers."""
    return INPUTS + GRADIENTS + SAVED + tuple(buffer.name for buffer in plan.workspace)


def declaration(plan: Plan) -> str:
    """The C++ text of the struct. It has the same layout for nvcc and for any 64-bit host compiler."""
    lines = []
    for name in pointer_fields(plan):
        qualifier = "const float" if name in READ else "float"
        comment = _COMMENTS.get(name, "scratch")
        lines.append(f"  {qualifier}* {name};  // {comment}")
    lines += ["  int64_t rows;", "  float eps;", "  int splits;  // parts the rows are cut into"]
    return "struct Params {\n" + "\n".join(lines) + "\n};"


def pack(plan: Plan, values: Mapping[str, int | float]) -> bytes:
    """The struct's bytes, little-endian. A pointer that `values` lacks is null; rows, eps and splits must be there."""
    fields = pointer_fields(plan)
    pointers = [int(values.get(name, 0)) for name in fields]
    return struct.pack(f"<{len(fields)}Qqfi", *pointers, int(values["rows"]), float(values["eps"]), int(values["splits"]))

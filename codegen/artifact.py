"""The artifact: one .cu file with a C interface that needs nothing of this project, and its header, as text."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import Any

from codegen.dtypes import CLASS_ERRORS, ITEMSIZE, OPERAND_ROUNDOFF, dtype_words
from codegen.errors import InvalidConfig
from codegen.expr import ROWS, Expr, const
from codegen.plan import Fill, Plan
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.render import Source, render_template
from codegen.tensors import BY_NAME, INPUTS, Extent

MAX_GRID = 2**31 - 1
"""Blocks of a grid in x: "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide."""

MAX_ROWS = 2**40
"""More rows than any GPU holds, and few enough that no size of a plan comes near 2^63."""

MAX_SMS = 1024
"""More SMs than any GPU has; the row count a grid allows may depend on them."""

BANNER_WIDTH = 110
"""Columns of a sentence in the banner."""

SCHEMA = 1
"""Version of the JSON that `<name>_info()` returns."""

_INPUT_MEANINGS = {
    "dy": "gradient of y", "x": "input of the LayerNorm", "gamma": "its scale; NULL: all ones",
    "beta": "its shift; NULL: all zeros", "w": "weight of the Linear"}


@dataclass(frozen=True, slots=True)
class ArtifactKernel:
    """One config of an artifact.

    Attributes:
        source: its rendered source.
        last_rows: the largest row count it serves; None: all that the ones before it do not.
    """

    source: Source
    last_rows: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """How exact one gradient was where it was validated.

    Attributes:
        normwise: relative Frobenius error.
        bound_ratio: largest error of an element in multiples of its bound.
    """

    normwise: float
    bound_ratio: float


@dataclass(frozen=True, slots=True)
class ArtifactInfo:
    """What the file says of itself.

    Attributes:
        shape: the tuned shape.
        gpu: name of the GPU it was tuned for.
        arch: nvcc architecture of that GPU, "sm_90a".
        time_us: microseconds of one call at the tuned row count.
        measured: whether that time was measured on that GPU; otherwise it was predicted.
        floor_us: what no kernel is expected to beat, microseconds.
        errors: by gradient.
        generator: name and version of what made the file.
        checks: what the tuned config has passed besides validation, and what was not run, as sentences.
    """

    shape: Shape
    gpu: str
    arch: str
    time_us: float
    measured: bool
    floor_us: float
    errors: Mapping[str, ErrorFigures]
    generator: str
    checks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ArtifactText:
    """The two files: best.cu and best.h."""

    cu: str
    header: str


@dataclass(frozen=True, slots=True)
class _Range:
    """A config and the row counts it serves, as the template shows them."""

    number: int
    source: Source
    text: str
    first_rows: int
    last_rows: int | None

    @property
    def namespace(self) -> str:
        return f"config_{self.number}"

    @property
    def rows(self) -> str:
        if self.last_rows is None:
            return f"{self.first_rows} rows and more" if self.first_rows else "any number of rows"
        return f"{self.first_rows} to {self.last_rows} rows"

    @property
    def plan(self) -> Plan:
        return self.source.plan

    @property
    def kernels(self) -> dict[str, int]:
        """The most dynamic shared memory any launch of each kernel asks for."""
        most: dict[str, int] = {}
        for launch in self.plan.launches:
            most[launch.kernel] = max(launch.shared_bytes, most.get(launch.kernel, 0))
        return most

    def steps(self, outputs: Mapping[str, Expr]) -> list[dict[str, Any]]:
        """The plan's steps; a fill of several tensors as several, each with its size."""
        sizes = {**outputs, **{buffer.name: buffer.size for buffer in self.plan.workspace}}
        steps: list[dict[str, Any]] = []
        for before, step in self.plan.pairs:
            if isinstance(step, Fill):
                steps += [{"fill": name, "size": sizes[name]} for name in step.names]
            else:
                steps.append({"launch": step, "before": before})
        return steps


def artifact(kernels: Sequence[ArtifactKernel], info: ArtifactInfo) -> ArtifactText:
    """The text of an artifact.

    Args:
        kernels: configs of one problem, by rising row counts; the last serves all that remain.
        info: what the banner and `<name>_info()` say.

    Raises:
        InvalidConfig: the configs are of different problems, do not rise, leave rows over, or one cannot be launched on as
            many rows as it is to serve.
    """
    problem = _problem(kernels)
    ranges = _ranges(kernels)
    max_rows = most_rows(ranges[-1].plan)
    outputs = _output_sizes(problem)
    context = {
        "problem": problem, "info": info, "ranges": ranges, "outputs": outputs, "tensors": _described_tensors(problem),
        "dtype_words": dtype_words(problem.dtype, problem.param_dtype), "itemsize": ITEMSIZE,
        "class_error": CLASS_ERRORS[problem.accuracy], "operand_roundoff": OPERAND_ROUNDOFF[problem.accuracy],
        "max_rows": max_rows, "max_rows_limited_by_grid": max_rows < MAX_ROWS,
        "banner": _banner(problem, ranges, info), "info_json": _info_json(problem, ranges, info, max_rows),
        "uses_sms": any(size.uses("sms") for item in ranges for size in _sizes(item.plan)),
        "uses_fills": any(isinstance(step, Fill) for item in ranges for step in item.plan.steps),
        "uses_overlap": any(launch.overlaps for item in ranges for launch in item.plan.launches),
        "uses_workspace": any(item.plan.workspace for item in ranges),
        "test_rows": _test_rows(ranges, info.shape.rows),
    }
    return ArtifactText(render_template("artifact.cu.j2", **context), render_template("artifact.h.j2", **context))


def most_rows(plan: Plan) -> int:
    """The largest row count, up to MAX_ROWS, at which every grid of the plan can be launched; grids only grow with the rows."""
    grids = [plan.splits, *(launch.grid for launch in plan.launches)]

    def fits(rows: int) -> bool:
        return all(grid.evaluate(rows, sms) <= MAX_GRID for grid in grids for sms in (1, MAX_SMS))

    low, high = 0, MAX_ROWS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _problem(kernels: Sequence[ArtifactKernel]) -> Problem:
    if not kernels:
        raise InvalidConfig("an artifact needs at least one config")
    first = kernels[0].source.problem
    for kernel in kernels:
        other = kernel.source.problem
        if _interface(other) != _interface(first):
            raise InvalidConfig("the configs of one artifact must have the same sizes, data types, accuracy class and gradients")
    return first


def _ranges(kernels: Sequence[ArtifactKernel]) -> list[_Range]:
    ranges: list[_Range] = []
    first = 0
    for number, kernel in enumerate(kernels, start=1):
        source, last = kernel.source, kernel.last_rows
        if (last is None) != (number == len(kernels)) or (last is not None and last < first):
            raise InvalidConfig("the configs of an artifact must serve rising row counts, the last one all that remain")
        if last is not None and last > (most := most_rows(source.plan)):
            raise InvalidConfig(f"{source.config} can be launched on {most} rows at most, not on {last}")
        # Kernels stand in a namespace without external names, where C linkage would undo that.
        ranges.append(_Range(number, source, source.text.replace('extern "C" __global__', "__global__").strip(), first, last))
        first = 0 if last is None else last + 1
    return ranges


def _interface(problem: Problem) -> tuple[object, ...]:
    """What all configs of an artifact have in common."""
    return (problem.hidden, problem.out, problem.dtype, problem.param_dtype, problem.accuracy, problem.wants)


def _extents(problem: Problem) -> dict[Extent, Expr]:
    return {"rows": ROWS, "hidden": const(problem.hidden), "out": const(problem.out)}


def _output_sizes(problem: Problem) -> dict[str, Expr]:
    """Elements of each gradient."""
    extents = _extents(problem)
    return {name: reduce(mul, (extents[extent] for extent in BY_NAME[name].extents)) for name in GRADIENTS}


def _described_tensors(problem: Problem) -> list[dict[str, str]]:
    """Name, data type, shape and meaning of each tensor of a call, in words."""
    extents = {"rows": "rows", "hidden": str(problem.hidden), "out": str(problem.out)}
    wanted = {True: "overwritten; NULL: not wanted, and not computed", False: "not computed by this file: NULL"}
    return [{"name": name, "dtype": BY_NAME[name].dtype(problem.dtype, problem.param_dtype),
             "shape": ", ".join(extents[extent] for extent in BY_NAME[name].extents),
             "meaning": _INPUT_MEANINGS.get(name) or wanted[name in problem.wants]} for name in INPUTS + GRADIENTS]


def _sizes(plan: Plan) -> list[Expr]:
    return [plan.splits, *(launch.grid for launch in plan.launches), *(buffer.size for buffer in plan.workspace)]


def _test_rows(ranges: Sequence[_Range], tuned: int) -> list[int]:
    """Row counts of the self-test beside the tuned one: none, one, a whole and a broken tile, and both sides of every change."""
    changes = [rows for item in ranges if item.last_rows is not None for rows in (item.last_rows, item.last_rows + 1)]
    return sorted({0, 1, 16, 17, *changes} - {tuned})


def _tuned(ranges: Sequence[_Range], info: ArtifactInfo) -> _Range:
    """The config that serves the tuned row count."""
    return next(item for item in ranges if item.last_rows is None or info.shape.rows <= item.last_rows)


def _one_line(text: str) -> str:
    """Text from outside as part of a comment that ends with its line."""
    return " ".join(text.split())


def _banner(problem: Problem, ranges: Sequence[_Range], info: ArtifactInfo) -> list[tuple[str, str]]:
    """Labels and texts; an empty label continues the one before."""
    tuned = _tuned(ranges, info)
    how = "measured: replayed from a graph, warm" if info.measured else "predicted by a cost model, not measured"
    lines = [("Shape", f"B,S,H,O = {info.shape}, tuned for {info.shape.rows} rows"),
             ("Types", f"{dtype_words(problem.dtype, problem.param_dtype)}; accuracy class {problem.accuracy}"),
             ("Config", str(tuned.source.config))]
    if len(ranges) > 1:
        lines.append(("", f"for {tuned.rows}"))
    for item in ranges:
        if item is not tuned:
            why = "where the tuned one would be slow, inexact or short of memory; validated, not timed"
            lines += [("", str(item.source.config)), ("", f"for {item.rows}, {why}")]
    lines += [
        ("GPU", f"{_one_line(info.gpu)}, {info.arch}"),
        ("Time", f"{info.time_us:.3g} us a call, {how}"),
        ("", f"the floor of {info.floor_us:.3g} us is {100 * info.floor_us / info.time_us:.0f} % of that: one launch, or the "
             "tensors at copy bandwidth"),
    ]
    label = "Errors"
    for name in (name for name in GRADIENTS if name in info.errors):
        figures = info.errors[name]
        worst = f"the worst element at {figures.bound_ratio:.2f} of its bound"
        lines.append((label, f"{name:<6} {figures.normwise:.1e} of its norm; {worst}"))
        label = ""
    label = "Gate"
    for sentence in info.checks:
        for line in textwrap.wrap(sentence, BANNER_WIDTH, break_on_hyphens=False):
            lines.append((label, line))
            label = ""
    return [*lines, ("Made by", _one_line(info.generator))]


def _info_json(problem: Problem, ranges: Sequence[_Range], info: ArtifactInfo, max_rows: int) -> str:
    shape = info.shape
    content = {
        "schema": SCHEMA,
        "generator": info.generator,
        "shape": [shape.batch, shape.seq, shape.hidden, shape.out],
        "dtype": problem.dtype,
        "param_dtype": problem.param_dtype,
        "accuracy": problem.accuracy,
        "wants": [name for name in GRADIENTS if name in problem.wants],
        "config": str(_tuned(ranges, info).source.config),
        "configs": [{"last_rows": item.last_rows, "config": str(item.source.config)} for item in ranges],
        "max_rows": max_rows,
        "gpu": info.gpu,
        "arch": info.arch,
        "time_us": info.time_us,
        "time_is": "measured" if info.measured else "predicted",
        "floor_us": info.floor_us,
        "errors": {
            name: {"normwise": _finite(figures.normwise), "bound_ratio": _finite(figures.bound_ratio)}
            for name, figures in info.errors.items()},
    }
    # It stands in a raw string literal that ends with )json" and in which nothing else needs care.
    lines = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items()]
    return ("{\n" + ",\n".join(lines) + "\n}").replace(')json"', '\\u0029json"')


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Results of one run against what is right for its data, in blocks, so that a large result needs no large temporaries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from codegen.dtypes import OWN_CLASS
from codegen.problem import ALL_GRADIENTS
from codegen.tensors import BY_NAME, gradient_shapes
from tuner.bounds import FORMATS, accuracy_class, bounds, normwise_scales, rounded_bound
from tuner.dtypes import NUMPY
from tuner.inputs import AnyFloats, Gradients, Inputs, Repeated
from tuner.reference import Array64, reference

BLOCK_ELEMENTS = 1 << 16
"""Elements compared at a time: their float64 temporaries stay in the cache."""


@dataclass(frozen=True, slots=True)
class Worst:
    """The element of a gradient that lies furthest from the right value, as a multiple of its bound."""

    ratio: float
    index: int
    bound: float


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """What one gradient must be.

    Attributes:
        name: the gradient.
        shape: its shape.
        dtype: its data type (codegen.dtypes).
        value: the right values, a table [P, N] of P rows (vectors: N = 1), in float32 or float64.
        bound: the largest error of each of them, of the same shape, never NaN; None: they must be met exactly.
        signs: for a result of more rows than `value`: its row r is row r mod P times signs[r]. None: `value` as it is.
        norm: what the normwise error is relative to; 0 where it is not asked for.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    value: AnyFloats
    bound: NDArray[np.float32] | None
    signs: NDArray[np.int8] | None
    norm: float

    def _blocks(self, got: AnyFloats) -> Iterator[tuple[int, AnyFloats, AnyFloats, slice]]:
        """Per block: the flat index of its first element, the result in float32, what is right, and its rows in `value`."""
        period, width = self.value.shape
        table = got.reshape(-1, width)
        step = max(1, BLOCK_ELEMENTS // width)
        start = 0
        while start < len(table):
            first = start % period
            count = min(step, period - first, len(table) - start)
            rows = slice(first, first + count)
            value = self.value[rows]
            if self.signs is not None:
                value = value * self.signs[start:start + count, None]
            yield start * width, table[start:start + count].astype(np.float32, copy=False), value, rows
            start += count

    def form_fault(self, got: AnyFloats | None) -> str | None:
        """Why this is no result at all: missing, of another shape or data type."""
        if got is None:
            return f"{self.name} is missing"
        if got.shape != self.shape:
            return f"{self.name} has the shape {got.shape} instead of {self.shape}"
        if got.dtype != NUMPY[self.dtype]:
            return f"{self.name} is {got.dtype} instead of {self.dtype}"
        if not got.flags.c_contiguous:
            return f"{self.name} is not C-contiguous"
        return None

    @np.errstate(invalid="ignore")
    def finiteness_fault(self, got: AnyFloats) -> str | None:
        """The first element that is finite where it must not be, or the reverse. Infinity and NaN count as equal.

        Where the largest number of the data type lies within the bound of the right value, either will do.
        """
        overflow = FORMATS[self.dtype].overflow
        for offset, block, value, rows in self._blocks(got):
            if self.bound is None and np.array_equal(block, value):  # a NaN equals nothing, and what is right here is finite
                continue
            bound = 0.0 if self.bound is None else self.bound[rows].astype(np.float64)
            size = np.abs(value, dtype=np.float64)
            may_be_finite, may_be_infinite = size - bound < overflow, ~(size + bound < overflow)
            misplaced = ~np.where(np.isfinite(block), may_be_finite, may_be_infinite)
            if misplaced.any():
                i = int(misplaced.argmax())
                return f"{self._element(offset + i)}: {block.flat[i]:.9g} where {value.flat[i]:.9g} is right"
        return None

    def equality_fault(self, got: AnyFloats) -> str | None:
        """The first element that differs from the exact value, and how many do."""
        fault, count = None, 0
        for offset, block, value, _ in self._blocks(got):
            wrong = block != value
            if fault is None and wrong.any():
                i = int(wrong.argmax())
                fault = f"{self._element(offset + i)}: {block.flat[i]:.9g} where exactly {value.flat[i]:.9g} is right"
            count += int(np.count_nonzero(wrong))
        return fault if count < 2 else f"{fault}, and {count - 1} more differ"

    def measure(self, got: AnyFloats) -> tuple[float, Worst]:
        """The Frobenius norm of the error relative to `norm` (infinite for an error where that is 0), and the worst element."""
        assert self.bound is not None
        square, worst = 0.0, Worst(0.0, 0, 0.0)
        for offset, block, value, rows in self._blocks(got):
            with np.errstate(invalid="ignore"):
                error: Array64 = np.abs(np.subtract(block, value, dtype=np.float64))
            error[~np.isfinite(block)] = 0.0
            square += float(np.vdot(error, error))
            bound = self.bound[rows]
            error /= bound
            if error.size and (ratio := float(error.max())) > worst.ratio:
                i = int(error.argmax())
                worst = Worst(ratio, offset + i, float(bound.flat[i]))
        if square == 0.0:
            return 0.0, worst
        return math.sqrt(square) / self.norm if self.norm > 0.0 else math.inf, worst

    def bound_fault(self, got: AnyFloats, worst: Worst) -> str | None:
        """The worst element, if it lies outside its bound."""
        if worst.ratio <= 1.0:
            return None
        right = self._right(worst.index)
        return (f"{self._element(worst.index)}: {float(got.flat[worst.index]):.9g} where {right:.9g} +- {worst.bound:.2g} is "
                f"right, {worst.ratio:.3g} times the bound")

    def _right(self, index: int) -> float:
        period, width = self.value.shape
        row, column = divmod(index, width)
        sign = 1 if self.signs is None else int(self.signs[row])
        return sign * float(self.value[row % period, column])

    def _element(self, index: int) -> str:
        place = np.unravel_index(index, self.shape)
        return f"{self.name}[{','.join(str(int(i)) for i in place)}]"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one run came to.

    Attributes:
        reason: the first fault, as a sentence; None where there is none.
        normwise: relative Frobenius error by gradient, where the case asks for it.
        ratios: the largest error in multiples of its bound, by gradient, of those that are not compared exactly.
    """

    reason: str | None
    normwise: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Case:
    """One run and how to judge it.

    Attributes:
        title: what the data is, for reasons: "exact probe, 33 rows".
        inputs: what to run on.
        targets: what the wanted gradients must be.
        accuracy: the accuracy class whose normwise limit applies; None: it is not tested here.
    """

    title: str
    inputs: Inputs
    targets: tuple[Target, ...]
    accuracy: str | None = None

    @property
    def wants(self) -> frozenset[str]:
        """The gradients to ask for."""
        return frozenset(target.name for target in self.targets)

    def judge(self, got: Gradients) -> Finding:
        """Compares in this order: form, places of non-finite values, exact values, the normwise limit, the bounds."""
        arrays = got.present()
        extra = sorted(arrays.keys() - self.wants)
        reason = f"{extra[0]} is there, but was not asked for" if extra else None
        reason = reason or _first(target.form_fault(arrays.get(target.name)) for target in self.targets)
        reason = reason or _first(target.finiteness_fault(arrays[target.name]) for target in self.targets)
        reason = reason or _first(
            target.equality_fault(arrays[target.name]) for target in self.targets if target.bound is None)
        if reason:
            return Finding(self._sentence(reason))
        measured = [(target, *target.measure(arrays[target.name])) for target in self.targets if target.bound is not None]
        normwise = {} if self.accuracy is None else {target.name: error for target, error, _ in measured}
        reason = _first(self._limit_fault(name, error) for name, error in normwise.items())
        reason = reason or _first(target.bound_fault(arrays[target.name], worst) for target, _, worst in measured)
        return Finding(self._sentence(reason), normwise, {target.name: worst.ratio for target, _, worst in measured})

    def _limit_fault(self, name: str, error: float) -> str | None:
        assert self.accuracy is not None
        limit = accuracy_class(self.accuracy).limit
        if error <= limit:
            return None
        return f"{name}: relative Frobenius error {error:.3g}, where accuracy class {self.accuracy} allows {limit:g}"

    def _sentence(self, reason: str | None) -> str | None:
        return None if reason is None else f"{reason} ({self.title})"


def _first(reasons: Iterator[str | None]) -> str | None:
    return next((reason for reason in reasons if reason), None)


def build_case(kind: str, data: Repeated, wants: frozenset[str], accuracy: str = "", *, inputs: Inputs | None = None,
               exact: frozenset[str] = frozenset(), normwise: bool = False) -> Case:
    """The case of judging a run on `data`, with reference and bounds worked out on its base alone.

    Args:
        kind: names the data in reasons.
        data: the rows, repeated or not.
        wants: the gradients asked for.
        accuracy: the accuracy class; empty stands for that of the data type.
        inputs: `data` written out, where the caller has it already.
        exact: the gradients that must be met exactly, up to one rounding to their data type at the end; the others are judged
            by their bound.
        normwise: whether the normwise limit of the class is tested as well.
    """
    base, counts = data.base, data.counts
    accuracy = accuracy or OWN_CLASS[base.dtype]
    right = reference(base, wants, data.weights).present()
    bounded = wants - exact
    limits = bounds(base, bounded, accuracy, counts).present() if bounded else {}
    scales = normwise_scales(base, counts) if normwise else {}
    shapes = gradient_shapes(data.rows, base.hidden, base.out)

    def target(name: str, value: AnyFloats) -> Target:
        dtype = BY_NAME[name].dtype(base.dtype, base.param_dtype)
        table = value if value.ndim == 2 else value[:, None]
        if name in exact:
            rounded = table.astype(np.float32).astype(NUMPY[dtype]).astype(np.float32)
            return Target(name, shapes[name], dtype, rounded, None, signs(name), 0.0)
        limit = rounded_bound(limits[name], value, dtype)
        bound = np.where(np.isnan(limit), 1.0, limit).reshape(table.shape).astype(np.float32)
        norm = 0.0
        if normwise:
            squares = np.einsum("rc,rc->r", table, table)
            norm = max(math.sqrt(squares @ counts if name == "dx" else squares.sum()), scales[name])
        return Target(name, shapes[name], dtype, table, bound, signs(name), norm)

    def signs(name: str) -> NDArray[np.int8] | None:
        return data.signs if name == "dx" else None

    targets = tuple(target(name, value) for name, value in right.items())
    title = f"{kind}, {data.rows} row{'s' * (data.rows != 1)}"
    return Case(title, data.expand() if inputs is None else inputs, targets, accuracy if normwise else None)


def bound_fault(inputs: Inputs, got: Gradients, wants: frozenset[str] = ALL_GRADIENTS, accuracy: str = "") -> str | None:
    """Why `got` is not the right result for `inputs`, any data at all, by the per-element bound; None where it is.

    `accuracy` empty stands for the class of the data type.

    Raises:
        InvalidProblem: `wants` is empty or names something else.
        InputError: there is no such accuracy class.
    """
    data = Repeated(inputs, np.ones(inputs.rows, np.int8))
    return build_case("the given data", data, wants, accuracy, inputs=inputs).judge(got).reason

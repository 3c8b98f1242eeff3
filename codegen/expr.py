"""Size expressions: what a plan says about sizes that are known only when the rows and the GPU are.

One evaluator here, one printer to C++ for the artifact; the two agree for every row count an int64 holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operator = Literal["+", "*", "min", "max", "ceil_div"]


@dataclass(frozen=True, slots=True)
class Expr:
    """A whole number computed from `rows` (rows of x) and `sms` (SMs of the GPU).

    A leaf holds an int or the name of a variable, a node an operator and two operands. Leaves are `const(n)`, `ROWS`
    and `SMS`; build nodes with +, *, `minimum`, `maximum` and `ceil_div`; operations on constants fold.
    """

    op: Operator | None
    leaf: int | Literal["rows", "sms"] | None = None
    left: Expr | None = None
    right: Expr | None = None

    def __add__(self, other: Expr | int) -> Expr:
        return _node("+", self, other)

    def __mul__(self, other: Expr | int) -> Expr:
        return _node("*", self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def evaluate(self, rows: int, sms: int) -> int:
        """The value for a row count and an SM count."""
        if self.op is None:
            if isinstance(self.leaf, int):
                return self.leaf
            return rows if self.leaf == "rows" else sms
        assert self.left is not None and self.right is not None
        return _apply(self.op, self.left.evaluate(rows, sms), self.right.evaluate(rows, sms))

    def cxx(self) -> str:
        """The same value as a C++ expression over `int64_t rows, sms` and the functions min_i64, max_i64, ceil_div."""
        if self.op is None:
            return f"INT64_C({self.leaf})" if isinstance(self.leaf, int) else str(self.leaf)
        assert self.left is not None and self.right is not None
        left, right = self.left.cxx(), self.right.cxx()
        if self.op in ("+", "*"):
            return f"({left} {self.op} {right})"
        function = {"min": "min_i64", "max": "max_i64", "ceil_div": "ceil_div"}[self.op]
        return f"{function}({left}, {right})"

    def uses(self, name: Literal["rows", "sms"]) -> bool:
        """Whether the value depends on that variable."""
        if self.op is None:
            return self.leaf == name
        assert self.left is not None and self.right is not None
        return self.left.uses(name) or self.right.uses(name)


def const(value: int) -> Expr:
    """A leaf that is always `value`."""
    return Expr(None, int(value))  # a bool is an int too, but not in C++


ONE = const(1)
ROWS = Expr(None, "rows")
SMS = Expr(None, "sms")


def minimum(left: Expr | int, right: Expr | int) -> Expr:
    """The smaller of the two."""
    return _node("min", left, right)


def maximum(left: Expr | int, right: Expr | int) -> Expr:
    """The larger of the two."""
    return _node("max", left, right)


def ceil_div(left: Expr | int, right: Expr | int) -> Expr:
    """left / right rounded up; left >= 0, right >= 1."""
    return _node("ceil_div", left, right)


def _apply(op: Operator, left: int, right: int) -> int:
    if op == "+":
        return left + right
    if op == "*":
        return left * right
    if op == "min":
        return min(left, right)
    if op == "max":
        return max(left, right)
    return -(-left // right)


def _node(op: Operator, left: Expr | int, right: Expr | int) -> Expr:
    a = const(left) if isinstance(left, int) else left
    b = const(right) if isinstance(right, int) else right
    if isinstance(a.leaf, int) and isinstance(b.leaf, int):
        return const(_apply(op, a.leaf, b.leaf))
    return Expr(op, None, a, b)

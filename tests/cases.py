"""The named cases all test modules draw from: shapes, and data with literal right values. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from codegen.problem import Shape
from tuner.inputs import Array32, Inputs

EPS = 1e-5


def array(values: object) -> Array32:
    return np.asarray(values, np.float32)


@dataclass(frozen=True, eq=False)
class Literal:
    """Inputs whose right results are known without a program.

    Attributes:
        expected: by gradient, its first elements in memory order, as printed in the report of the fault.
        exact: the gradients that every correct kernel meets exactly, whatever its order of operations.
        rtol: half a unit of the last printed digit, relative.
    """

    name: str
    inputs: Inputs
    expected: Mapping[str, tuple[float, ...]]
    rtol: float
    exact: frozenset[str] = field(default=frozenset())


def _large_mean(hidden: int) -> Inputs:
    return Inputs(
        dy=array([[1]]), x=array([1e4 + 1e-3 * np.arange(hidden)]), gamma=array(np.ones(hidden)), beta=array(np.zeros(hidden)),
        w=array([np.arange(hidden)]), eps=EPS)


LITERALS = (
    # A one-pass variance, E[x^2] - E[x]^2, loses everything at these means.
    Literal(
        "N1 mean 4e4",
        Inputs(dy=array([[1]]), x=array([[40000, 40001, 40002, 40003]]), gamma=array([1, 1, 1, 1]), beta=array([0, 0, 0, 0]),
               w=array([[1, 0, 0, 0]]), eps=EPS),
        {"dx": (0.268330, -0.357768, -0.089443, 0.178882), "dgamma": (-1.341635,)}, rtol=6e-6),
    Literal("N1 mean 1e4", _large_mean(16), {"dx": (-450.4409, -390.3821, -330.3233)}, rtol=2e-7),
    # Rows without variance: a tiny eps stands alone under the root.
    Literal(
        "N3 zero rows",
        Inputs(dy=array([[1]] * 3), x=array(np.zeros((3, 4))), gamma=array([1, 2, 3, 4]), beta=array([0.5] * 4),
               w=array([[1, 1, 1, 2]]), eps=1e-12),
        {"dx": (-2.5e6, -1.5e6, -0.5e6, 4.5e6) * 3, "dgamma": (0, 0, 0, 0), "dbeta": (3, 3, 3, 6), "dw": (1.5,) * 4,
         "db": (3,)},
        rtol=1e-7, exact=frozenset(("dgamma", "dbeta", "dw", "db"))),
    Literal(
        "N4 hidden size 1",
        Inputs(dy=array([[2], [3]]), x=array([[1e6], [7]]), gamma=array([5]), beta=array([3]), w=array([[4]]), eps=EPS),
        {"dx": (0, 0), "dgamma": (0,), "dbeta": (20,), "dw": (15,), "db": (5,)},
        rtol=0.0, exact=frozenset(("dx", "dgamma", "dbeta", "dw", "db"))),
)

# N9: of data and parameters; every pair there is.
DATA_TYPES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"),
              ("float16", "float32"))

# S1: unequal, odd extents; equal or even ones hide swapped indices.
RAGGED_HIDDEN = (1, 2, 3, 5, 31, 33, 63, 65, 127, 129, 229, 541, 1000, 1600, 2001, 8117)
RAGGED_OUT = (1, 3, 7, 16, 33, 257)
RAGGED_ROWS = (1, 2, 29, 71, 525, 1033)
COVERING_MULTIPLY_ADDS = 30_000_000


def _covering() -> tuple[Shape, ...]:
    """Every H with every O and every H with every row count, each once: 96 shapes of at most COVERING_MULTIPLY_ADDS.

    Row counts are dealt to the values of O in turn, from another start for each H; where that makes a shape too large, in falling
    order against the rising O.
    """
    shapes = []
    for i, hidden in enumerate(RAGGED_HIDDEN):
        turned = RAGGED_ROWS[i % 6:] + RAGGED_ROWS[:i % 6]
        fits = all(rows * out * hidden <= COVERING_MULTIPLY_ADDS for rows, out in zip(turned, RAGGED_OUT, strict=True))
        dealt = turned if fits else RAGGED_ROWS[::-1]
        shapes += [Shape(1, rows, hidden, out) for rows, out in zip(dealt, RAGGED_OUT, strict=True)]
    return tuple(shapes)


RAGGED_COVERING = _covering()
RAGGED_ALL = tuple(Shape(1, rows, hidden, out) for hidden, out, rows in product(RAGGED_HIDDEN, RAGGED_OUT, RAGGED_ROWS))

# S2: three readings of the same six rows.
SAME_ROWS = (Shape(2, 3, 8, 5), Shape(3, 2, 8, 5), Shape(1, 6, 8, 5))

# S3: past the largest grid.y and grid.z, in rows, in O and in H.
PAST_65535_ROWS = (Shape(1, 65535, 32, 8), Shape(1, 65536, 32, 8), Shape(128, 513, 32, 8))
PAST_65535_COLUMNS = (Shape(1, 3, 8, 70000), Shape(1, 3, 70000, 8))

# S6: rows longer than any shared memory.
VERY_LARGE_HIDDEN = (Shape(1, 3, 8192, 2), Shape(1, 3, 16384, 2), Shape(1, 3, 65536, 2), Shape(1, 3, 100003, 2))

# S7: nothing to do.
NO_ROWS = (Shape(0, 5, 8, 4), Shape(3, 0, 8, 4), Shape(0, 0, 1, 1))

# R1: hidden sizes that fill no power-of-two reduction; data: counting_inputs.
REDUCED_HIDDEN = (1, 17, 48, 100)

# R2: more rows than a block takes at a time, and more columns than it has threads, so that shared memory is written again while
# slow threads still read it.
BARRIERS = Shape(1, 64, 150, 16)
BARRIERS_LARGE = Shape(1, 8192, 2048, 64)

# R2 where the next tiles or steps are copied while one is worked on: more of them than there are stages. One block has ten tiles
# of 32 rows; dx takes ten steps of 32 in depth, G twenty-two. H and O let 16-bit rows be copied 16 bytes at a time.
MANY_TILES = Shape(1, 300, 40, 24)
MANY_STEPS = Shape(1, 700, 40, 296)

# V1: where the validator itself is put to the test.
VALIDATED = (Shape(4, 4, 8, 16), Shape(2, 71, 229, 33), Shape(1, 8192, 256, 256), Shape(1, 65536, 64, 64))


def counting_inputs(hidden: int, rows: int = 5, out: int = 3) -> Inputs:
    """R1: each row of x counts 1..H (mean 24.5 for H = 48); dy, w, gamma and beta are small and all different."""
    return Inputs(
        dy=array(np.arange(rows * out).reshape(rows, out) - 6), x=array(np.tile(np.arange(1, hidden + 1), (rows, 1))),
        gamma=array(1 + np.arange(hidden) % 5), beta=array(np.arange(hidden) % 3 - 1),
        w=array(np.arange(out * hidden).reshape(out, hidden) % 7 - 2), eps=EPS)

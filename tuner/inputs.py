"""The arrays of one backward pass, and seeded data that can see mistakes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.problem import GRADIENTS
from tuner.dtypes import FLOAT32, NUMPY, tensor_dtype
from tuner.errors import InputError, InputTypeError

Array32 = NDArray[np.float32]
AnyFloats = NDArray[np.floating[Any]]
"""Of float32, float16, bfloat16 or, in references, float64."""


def as_eps(eps: object) -> float:
    """The eps of LayerNorm, rounded to float32: what a kernel receives, whatever type the caller holds it in.

    Accepts float, int, NumPy floating and integer scalars, and arrays of those with no dimension.

    Raises:
        InputTypeError: any other type (bool, str, a longer array).
        InputError: eps is not positive and finite in float32.
    """
    if isinstance(eps, np.ndarray) and eps.ndim == 0:
        eps = eps[()]
    if isinstance(eps, bool) or not isinstance(eps, float | int | np.floating | np.integer):
        raise InputTypeError(f"eps must be a number, not {type(eps).__name__}")
    try:
        with np.errstate(over="ignore"):
            rounded = float(np.float32(eps))
    except OverflowError:  # an int beyond float64
        rounded = math.inf
    if not (math.isfinite(rounded) and rounded > 0.0):
        raise InputError(f"eps must be positive and finite in float32, which {eps} is not")
    return rounded


def _checked(name: str, array: object, ndim: int | None) -> AnyFloats:
    if not isinstance(array, np.ndarray):
        raise InputTypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if tensor_dtype(array) is None:
        raise InputTypeError(f"{name} must be float32, float16 or bfloat16 (ml_dtypes.bfloat16), not {array.dtype}; "
                             f"convert it with {name}.astype('float32')")
    if ndim is not None and array.ndim != ndim:
        raise InputError(f"{name} must have {ndim} dimension{'s' * (ndim > 1)}, not the shape {array.shape}")
    return array


@dataclass(frozen=True, eq=False, slots=True)
class Inputs:
    """What the backward pass of `y = Linear(LayerNorm(x))` reads. All arrays are C-contiguous.

    dy and x are float32, float16 or bfloat16 (ml_dtypes.bfloat16), both the same; gamma, beta and w have all three that data type
    or all three float32. `Inputs.from_arrays` takes arrays of any layout and any leading dimensions.

    Attributes:
        dy: incoming gradient [M, O].
        x: input of the LayerNorm [M, H].
        gamma: scale [H]; None stands for ones.
        beta: shift [H]; None stands for zeros.
        w: weight of the Linear [O, H].
        eps: added to the variance; rounded to float32 (see as_eps).
        mean, rstd: the rows' mean and 1/sqrt(variance + eps) [M], float32, where the forward pass saved them: both or neither.
            Kernels then read them instead of working them out.

    Raises:
        InputTypeError: an argument is of another type or data type, or data types do not go together.
        InputError: shapes do not agree, H or O is zero, an array is not C-contiguous, or eps is not positive.
    """

    dy: AnyFloats
    x: AnyFloats
    gamma: AnyFloats | None
    beta: AnyFloats | None
    w: AnyFloats
    eps: float
    mean: Array32 | None = None
    rstd: Array32 | None = None

    def __post_init__(self) -> None:
        for name, ndim in (("dy", 2), ("x", 2), ("gamma", 1), ("beta", 1), ("w", 2), ("mean", 1), ("rstd", 1)):
            array = getattr(self, name)
            if array is None and name in ("gamma", "beta", "mean", "rstd"):
                continue
            if not _checked(name, array, ndim).flags.c_contiguous:
                raise InputError(f"{name} must be C-contiguous; Inputs.from_arrays copies other layouts")
        self._check_dtypes()
        object.__setattr__(self, "eps", as_eps(self.eps))
        if self.hidden < 1 or self.out < 1:
            raise InputError(f"hidden and out must be at least 1, but w has the shape {self.w.shape}")
        rows, hidden = self.x.shape[0], self.hidden
        if (self.mean is None) != (self.rstd is None):
            raise InputError("mean and rstd belong together; give both or neither")
        if self.x.shape[1] != hidden:
            raise InputError(f"the last dimension of x is {self.x.shape[1]}, and that of w, which is [out, hidden], is {hidden}; "
                             "both must be the hidden size")
        for name, shape in (("dy", (rows, self.out)), ("gamma", (hidden,)), ("beta", (hidden,)),
                            ("mean", (rows,)), ("rstd", (rows,))):
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise InputError(f"{name} has the shape {array.shape}; with {rows} rows in x and w of the shape {self.w.shape} "
                                 f"it must be {shape}")

    def _check_dtypes(self) -> None:
        """Raises InputTypeError unless the data types go together."""
        allowed = dict.fromkeys((self.x.dtype, FLOAT32))
        if self.dy.dtype != self.x.dtype:
            raise InputTypeError(f"dy is {self.dy.dtype} but x is {self.x.dtype}; both must have the same data type")
        if self.w.dtype not in allowed:
            raise InputTypeError(f"w must be {' or '.join(str(dtype) for dtype in allowed)} where x is {self.x.dtype}, "
                                 f"not {self.w.dtype}")
        for name, array in (("gamma", self.gamma), ("beta", self.beta)):
            if array is not None and array.dtype != self.w.dtype:
                raise InputTypeError(f"{name} is {array.dtype} but w is {self.w.dtype}; "
                                     "gamma, beta and w must have the same data type")
        for name, array in (("mean", self.mean), ("rstd", self.rstd)):
            if array is not None and array.dtype != FLOAT32:
                raise InputTypeError(f"{name} must be float32, not {array.dtype}; statistics are kept in float32")

    @classmethod
    def from_arrays(cls, dy: AnyFloats, x: AnyFloats, gamma: AnyFloats | None, beta: AnyFloats | None, w: AnyFloats,
                    eps: float) -> Inputs:
        """Inputs from arrays of any memory layout, dy [..., O] and x [..., H] with the same leading dimensions.

        What is not C-contiguous (Fortran order, strided, expanded with stride 0) is copied; the rest is shared.

        Raises:
            InputTypeError, InputError: as for Inputs, and where the leading dimensions of dy and x differ.
        """
        for name, array in (("dy", dy), ("x", x)):
            if _checked(name, array, None).ndim < 1:
                raise InputError(f"{name} must have at least one dimension")
        if dy.shape[:-1] != x.shape[:-1]:
            raise InputError(f"dy {dy.shape} and x {x.shape} differ in their leading dimensions")
        return cls(_rows(dy), _rows(x), _compact("gamma", gamma), _compact("beta", beta), _c_order("w", w), eps)

    @property
    def dtype(self) -> str:
        """The data type of dy and x, as codegen.dtypes names it."""
        return self.x.dtype.name

    @property
    def param_dtype(self) -> str:
        """The data type of gamma, beta and w."""
        return self.w.dtype.name

    @property
    def rows(self) -> int:
        """M, the rows of x and dy."""
        return int(self.x.shape[0])

    @property
    def hidden(self) -> int:
        """H, the columns of x and w."""
        return int(self.w.shape[1])

    @property
    def out(self) -> int:
        """O, the columns of dy and the rows of w."""
        return int(self.w.shape[0])

    def first(self, rows: int) -> Inputs:
        """The same pass on the first `rows` rows; the arrays are shared."""
        mean, rstd = (None if saved is None else saved[:rows] for saved in (self.mean, self.rstd))
        return Inputs(self.dy[:rows], self.x[:rows], self.gamma, self.beta, self.w, self.eps, mean, rstd)


    def rounded_to(self, dtype: str, param_dtype: str = "") -> Inputs:
        """The same values rounded to other data types, to nearest even; without mean and rstd, which belong to the old values.

        Args:
            dtype: of dy and x.
            param_dtype: of gamma, beta and w; empty stands for `dtype`.
        """
        data, param = NUMPY[dtype], NUMPY[param_dtype or dtype]
        gamma, beta = (None if array is None else array.astype(param, copy=False) for array in (self.gamma, self.beta))
        return Inputs(self.dy.astype(data, copy=False), self.x.astype(data, copy=False), gamma, beta,
                      self.w.astype(param, copy=False), self.eps)


def _c_order(name: str, array: AnyFloats) -> AnyFloats:
    return np.ascontiguousarray(_checked(name, array, None))


def _compact(name: str, array: AnyFloats | None) -> AnyFloats | None:
    return None if array is None else _c_order(name, array)


def _rows(array: AnyFloats) -> AnyFloats:
    return np.ascontiguousarray(array.reshape(math.prod(array.shape[:-1]), array.shape[-1]))


def read_only(inputs: Inputs) -> Inputs:
    """The same inputs, whose arrays nobody can change any more: executors may keep what they made of them."""
    for array in (inputs.dy, inputs.x, inputs.gamma, inputs.beta, inputs.w, inputs.mean, inputs.rstd):
        if array is not None:
            array.flags.writeable = False
    return inputs


@dataclass(frozen=True, eq=False, slots=True)
class Gradients:
    """The five outputs dx [M, H], dgamma [H], dbeta [H], dw [O, H], db [O]; None where not wanted.

    What executors return has the data types of codegen.tensors: dx that of x, the others that of w.
    """

    dx: AnyFloats | None = None
    dgamma: AnyFloats | None = None
    dbeta: AnyFloats | None = None
    dw: AnyFloats | None = None
    db: AnyFloats | None = None

    def present(self) -> dict[str, AnyFloats]:
        """The gradients that are there, by name, in the order of GRADIENTS."""
        pairs = ((name, getattr(self, name)) for name in GRADIENTS)
        return {name: array for name, array in pairs if array is not None}


def random_inputs(rows: int, hidden: int, out: int, seed: int = 0, *, dtype: str = "float32", param_dtype: str = "") -> Inputs:
    """Well-conditioned random data on which every term of every gradient counts, rounded to the data types (Inputs.rounded_to).

    dy is standard normal, gamma in +-[0.5, 2], beta standard normal, and w has the mean 0.3, so that the terms with a mean
    over h do not vanish. Row means of x scatter around 0.7 and row deviations over [0.5, 2]: neither may be
    assumed, and no row is flat by chance, as short normal rows now and then are.
    """
    rng = np.random.default_rng([seed, 1])
    gamma = np.exp2(rng.uniform(-1.0, 1.0, hidden)) * rng.choice([-1.0, 1.0], hidden)
    w = (rng.standard_normal((out, hidden), np.float32) + np.float32(0.3)) / np.float32(math.sqrt(hidden))
    x = _standardised(rng, rows, hidden)
    x *= np.exp2(rng.uniform(-1.0, 1.0, (rows, 1))).astype(np.float32)
    x += rng.normal(0.7, 0.3, (rows, 1)).astype(np.float32)
    return Inputs(
        dy=rng.standard_normal((rows, out), np.float32), x=x, gamma=gamma.astype(np.float32),
        beta=rng.standard_normal(hidden, np.float32), w=w, eps=1e-5).rounded_to(dtype, param_dtype)


def _standardised(rng: np.random.Generator, rows: int, hidden: int) -> Array32:
    """Normal rows shifted and scaled to mean 0 and deviation 1 (all zeros where hidden is 1)."""
    x = rng.standard_normal((rows, hidden), np.float32)
    x -= x.mean(axis=1, keepdims=True)
    deviation = x.std(axis=1, keepdims=True)
    x /= np.where(deviation > 0.0, deviation, 1.0)
    return x


@dataclass(frozen=True, slots=True)
class _Extremes:
    """How far the hard data of one data type goes.

    Attributes:
        deviation_at_1e4: of the rows whose mean is 1e4; at least two of the steps between neighbouring values there.
        deviation: of the rows of large deviation.
        decades: over which rows of dy are spread, downwards.
        row: how many times the rest one row of dy is.
        column: how many times its neighbours every third column of w and dy is.
        narrow: whether all of dy is made smaller, so that the results stay in range.
    """

    deviation_at_1e4: float = 1.0
    deviation: float = 1e6
    decades: float = 12.0
    row: float = 1e6
    column: float = 1e-6
    narrow: bool = False


# A float16 is at most 65504, and has fewer digits below 6e-5. dx of flat rows is up to 316 (eps 1e-5) times dy @ w * gamma.
_EXTREMES = {
    "float32": _Extremes(),
    "bfloat16": _Extremes(deviation_at_1e4=128.0),
    "float16": _Extremes(deviation_at_1e4=16.0, deviation=4e3, decades=4.0, row=16.0, column=1e-2, narrow=True),
}


def hard_inputs(rows: int, hidden: int, out: int, seed: int = 0, *, dtype: str = "float32", param_dtype: str = "") -> Inputs:
    """Data on which a careless kernel loses its digits, each kind of row in turn; every value is finite and so is the result.

    Rows of x: ordinary; mean 1e4 at deviation 1 (a one-pass variance cancels); constant; zero; deviation 1e6; deviation
    1e-4, where eps rules; one outlier of 1e4. Rows of dy: ordinary; over twelve decades; zero. One row of dy
    is a million times the rest. Every third column of w and of dy is a million times smaller than its neighbours.
    The periods 7 and 11 and every tile size are coprime, so each kind meets each place in a tile.

    All of it is rounded to the data types. bfloat16 and float16 cannot tell values around 1e4 that differ by 1, so the deviation
    is 128 and 16 there. float16 has a narrow range besides: with it the deviation 1e6 is 4e3, the twelve decades are four, the
    millions are 16 (the row) and 100 (the columns), and all of dy is divided by 16 and, where O > H, by sqrt(O/H), since dn
    grows so.
    """
    extremes = _EXTREMES[dtype]
    rng = np.random.default_rng([seed, 2])
    base = random_inputs(rows, hidden, out, seed)
    x, dy, w = base.x.copy(), base.dy.copy(), base.w.copy()
    normal = _standardised(rng, rows, hidden)
    x[1::7] = 1e4 + extremes.deviation_at_1e4 * normal[1::7]
    x[2::7] = rng.standard_normal((len(x[2::7]), 1), np.float32)
    x[3::7] = 0.0
    x[4::7] = extremes.deviation * normal[4::7]
    x[5::7] = 1e-4 * normal[5::7]
    x[6::7, rng.integers(hidden)] += 1e4
    dy[1::11] *= np.float32(10.0) ** rng.uniform(-extremes.decades, 0.0, (len(dy[1::11]), 1)).astype(np.float32)
    dy[2::11] = 0.0
    if rows:
        dy[rows // 2] *= extremes.row
    w[:, 2::3] *= extremes.column
    dy[:, 2::3] *= extremes.column
    if extremes.narrow:
        dy /= 16.0 * math.sqrt(max(1.0, out / hidden))
    return Inputs(dy, x, base.gamma, base.beta, w, base.eps).rounded_to(dtype, param_dtype)


@dataclass(frozen=True, eq=False, slots=True)
class Repeated:
    """Many rows made of few: row r is row r mod P of `base` (P rows), its dy multiplied by signs[r] = +-1.

    All gradients are linear in dy, so those of all the rows follow from the base alone: row r of dx is signs[r] times row
    r mod P of the base's, and the parameter gradients are the base's with row p weighted by `weights[p]`.
    """

    base: Inputs
    signs: NDArray[np.int8]

    @property
    def rows(self) -> int:
        """M, the rows after repetition."""
        return len(self.signs)

    @property
    def weights(self) -> NDArray[np.float64]:
        """The sum of the signs with which each row of the base occurs [P]."""
        return self._per_base_row(self.signs.astype(np.float64))

    @property
    def counts(self) -> NDArray[np.float64]:
        """How often each row of the base occurs [P]."""
        return self._per_base_row(np.ones(self.rows))

    def _per_base_row(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        totals = np.zeros(self.base.rows)
        np.add.at(totals, np.arange(self.rows) % self.base.rows, values)
        return totals

    def first(self, rows: int) -> Repeated:
        """The same data cut off after `rows` rows."""
        return Repeated(self.base.first(min(rows, self.base.rows)), self.signs[:rows])

    def expand(self) -> Inputs:
        """The data written out, M rows."""
        base, period = self.base, max(self.base.rows, 1)
        x = np.resize(base.x, (self.rows, base.hidden))
        dy = np.resize(base.dy, (self.rows, base.out))
        for start in range(0, self.rows, period):
            dy[start:start + period] *= self.signs[start:start + period, None]
        return Inputs(dy, x, base.gamma, base.beta, base.w, base.eps)


def repeated(base: Inputs, rows: int, seed: int = 0) -> Repeated:
    """`rows` rows out of the base's, each with a random sign, so that long sums keep growing as random sums do."""
    signs = np.random.default_rng([seed, 4]).integers(0, 2, rows, np.int8) * np.int8(2) - np.int8(1)
    return Repeated(base if rows >= base.rows else base.first(rows), signs)

"""The five gradients in float64, written as their definitions say: the judge of every kernel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from codegen.problem import ALL_GRADIENTS, check_wants
from codegen.tensors import gradient_shapes
from tuner.inputs import Gradients, Inputs

Array64 = NDArray[np.float64]

CHUNK_ELEMENTS = 1 << 21
"""Elements of one float64 temporary; about ten are alive at a time, so beyond its results the reference needs 200 MB."""


def row_chunks(inputs: Inputs) -> Iterator[slice]:
    """Slices that cover the rows, short enough for float64 temporaries of CHUNK_ELEMENTS."""
    step = max(1, CHUNK_ELEMENTS // max(inputs.hidden, inputs.out))
    for start in range(0, inputs.rows, step):
        yield slice(start, min(start + step, inputs.rows))


def normalised(inputs: Inputs, rows: slice) -> tuple[Array64, Array64]:
    """xhat [rows, H] and rstd [rows, 1] in float64."""
    x = inputs.x[rows].astype(np.float64)
    x -= x.mean(axis=1, keepdims=True)
    rstd = 1.0 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + inputs.eps)
    x *= rstd
    return x, rstd


def scale_and_shift(inputs: Inputs) -> tuple[Array64, Array64]:
    """gamma and beta [H] in float64: ones and zeros where they are absent."""
    gamma = np.ones(inputs.hidden) if inputs.gamma is None else inputs.gamma.astype(np.float64)
    beta = np.zeros(inputs.hidden) if inputs.beta is None else inputs.beta.astype(np.float64)
    return gamma, beta


def zeros(inputs: Inputs, wants: frozenset[str]) -> dict[str, Array64]:
    """The wanted gradients, all zero, in float64."""
    shapes = gradient_shapes(inputs.rows, inputs.hidden, inputs.out)
    return {name: np.zeros(shape) for name, shape in shapes.items() if name in wants}


@np.errstate(invalid="ignore")
def reference(inputs: Inputs, wants: frozenset[str] = ALL_GRADIENTS, weights: Array64 | None = None) -> Gradients:
    """The wanted gradients in float64, of the inputs as they are: already rounded to their data types.

    With mean and rstd of each row, xhat = (x - mean) * rstd and dn = dy @ w:

        dx     = rstd * (dn*gamma - mean_h(dn*gamma) - xhat * mean_h(dn*gamma*xhat))
        dgamma = sum_m dn*xhat      dbeta = sum_m dn
        dw     = dy^T @ (xhat*gamma + beta)      db = sum_m dy

    `weights` [M] counts row m weights[m] times in the parameter gradients (see Repeated); None counts each row once.
    Works through the rows in chunks; memory beyond the results does not grow with M. Infinities and NaN in the inputs spread as
    the formulas say.

    Raises:
        InvalidProblem: `wants` is empty or names something else.
    """
    check_wants(wants)
    results = zeros(inputs, wants)
    gamma, beta = scale_and_shift(inputs)
    w = inputs.w.astype(np.float64)
    for rows in row_chunks(inputs):
        dy = inputs.dy[rows].astype(np.float64)
        weighted = dy if weights is None else dy * weights[rows, None]
        xhat, rstd = normalised(inputs, rows)
        if "db" in wants:
            results["db"] += weighted.sum(axis=0)
        if "dw" in wants:
            results["dw"] += weighted.T @ (xhat * gamma + beta)
        if wants.isdisjoint(("dx", "dgamma", "dbeta")):
            continue
        dn = dy @ w
        if "dx" in wants:
            g = dn * gamma
            dot = np.mean(g * xhat, axis=1, keepdims=True)
            results["dx"][rows] = rstd * (g - g.mean(axis=1, keepdims=True) - xhat * dot)
        if weights is not None:
            dn *= weights[rows, None]
        if "dgamma" in wants:
            results["dgamma"] += np.sum(dn * xhat, axis=0)
        if "dbeta" in wants:
            results["dbeta"] += dn.sum(axis=0)
    return Gradients(**results)

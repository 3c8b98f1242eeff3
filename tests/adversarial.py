"""Data sets of one kind of difficulty each, harder than the rows that tuner.inputs.hard_inputs mixes. Results are finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tuner.inputs import Array32, Inputs, random_inputs

SHAPE = (520, 48, 300)
"""Rows, H and O: more than one promotion chunk of each, none of them full at the end."""


def over_decades(rng: np.random.Generator, decades: float, *shape: int) -> Array32:
    """Factors from 10^-decades to 1, their logarithms uniform."""
    factors: Array32 = (10.0 ** rng.uniform(-decades, 0.0, shape)).astype(np.float32)
    return factors


def _large_mean(inputs: Inputs, rng: np.random.Generator) -> Inputs:
    return replace(inputs, x=np.float32(1e4) + rng.standard_normal(inputs.x.shape, np.float32))


def _constant_rows(inputs: Inputs, rng: np.random.Generator) -> Inputs:
    """Two of three are constant, from 1e-3 to 1e3, so that xhat is 0 and rstd 1/sqrt(eps)."""
    x = inputs.x.copy()
    constant = np.arange(inputs.rows) % 3 > 0
    x[constant] = rng.choice([-1, 1], (constant.sum(), 1)) * 1e3 * over_decades(rng, 6.0, constant.sum(), 1)
    return replace(inputs, x=x)


def _heavy_tailed_dy(inputs: Inputs, rng: np.random.Generator) -> Inputs:
    return replace(inputs, dy=inputs.dy * over_decades(rng, 12.0, *inputs.dy.shape))


def _rows_of_dy_over_decades(inputs: Inputs, rng: np.random.Generator) -> Inputs:
    return replace(inputs, dy=inputs.dy * over_decades(rng, 12.0, inputs.rows, 1))


def _tiny_gradients(inputs: Inputs, rng: np.random.Generator) -> Inputs:
    return replace(inputs, dy=inputs.dy * np.float32(1e-7))


def _tiny_columns(inputs: Inputs, rng: np.random.Generator) -> Inputs:
    """Every other column of dy and of w over twelve decades."""
    dy, w = inputs.dy.copy(), inputs.w.copy()
    dy[:, 1::2] *= over_decades(rng, 12.0, dy[:, 1::2].shape[1])
    w[:, 1::2] *= over_decades(rng, 12.0, w[:, 1::2].shape[1])
    return replace(inputs, dy=dy, w=w)


def _outliers(inputs: Inputs, rng: np.random.Generator) -> Inputs:
    """One value in a thousand of x, dy and w is a thousand to a million times the rest."""
    def with_outliers(array: Array32) -> Array32:
        there = rng.random(array.shape) < 1e-3
        result: Array32 = np.where(there, 1e6 * array * over_decades(rng, 3.0, *array.shape), array).astype(np.float32)
        return result
    return replace(inputs, x=with_outliers(inputs.x), dy=with_outliers(inputs.dy), w=with_outliers(inputs.w))


def _everything(inputs: Inputs, rng: np.random.Generator) -> Inputs:
    for change in (_large_mean, _constant_rows, _tiny_columns, _heavy_tailed_dy, _tiny_gradients):
        inputs = change(inputs, rng)
    return inputs


KINDS: Mapping[str, Callable[[Inputs, np.random.Generator], Inputs]] = {
    "large mean": _large_mean,
    "constant rows": _constant_rows,
    "dy over twelve decades": _heavy_tailed_dy,
    "rows of dy over twelve decades": _rows_of_dy_over_decades,
    "gradients of 1e-7": _tiny_gradients,
    "tiny columns": _tiny_columns,
    "outliers": _outliers,
    "everything at once": _everything,
}


def adversarial_inputs(kind: str, rows: int, hidden: int, out: int, seed: int = 0) -> Inputs:
    """Random data (tuner.inputs.random_inputs) made difficult in one way, a key of KINDS."""
    rng = np.random.default_rng([seed, sorted(KINDS).index(kind)])
    return KINDS[kind](random_inputs(rows, hidden, out, seed), rng)

"""A variant that exists in tests alone: more than a million combinations, half of them valid, and times to search through."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

from codegen.config import Config, Value
from codegen.expr import const
from codegen.limits import Limits
from codegen.plan import Launch, Plan
from codegen.problem import Problem
from codegen.variant import Clash, Params, Variant, number
from codegen.variants import VARIANTS
from tuner.work import KERNELS, Setting, Work

NAME = "big"

CHOICES: Mapping[str, tuple[Value, ...]] = {
    "tile_m": (32, 64, 128, 256), "tile_n": (32, 64, 128, 256), "tile_k": (16, 32, 64), "warps": (2, 4, 8, 16),
    "stages": (2, 3, 4, 5), "splits": (1, 2, 4, 8, 16, 32, 64, 128, 256), "arithmetic": ("x3", "x6"),
    "promote": (64, 128, 256, 512), "order": (1, 4, 8, 16), "epilogue": ("finish", "pass"), "planes": (0, 1),
    "reduction": ("two_pass", "atomic")}
"""1,769,472 combinations."""

FEW: Mapping[str, tuple[Value, ...]] = {
    **CHOICES, "tile_m": (64, 128), "tile_n": (64, 128), "stages": (2, 3), "splits": (1, 4, 16, 64), "order": (1, 8)}
"""49,152 of them."""


def _crowded(problem: Problem, params: Params, limits: Limits) -> str | None:
    per_thread = number(params, "tile_m") * number(params, "tile_n") // (32 * number(params, "warps"))
    return None if 16 <= per_thread <= 128 else f"{per_thread} sums a thread are too few or too many"


def _too_large(problem: Problem, params: Params, limits: Limits) -> str | None:
    needed = _shared_bytes(params)
    return f"needs {needed} bytes of shared memory" if needed > limits.shared_per_block else None


def _mismatched(problem: Problem, params: Params, limits: Limits) -> str | None:
    return "atomic needs more than one split" if params["reduction"] == "atomic" and params["splits"] == 1 else None


def _refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
    return "promotes in the middle of a step" if number(params, "promote") < 2 * number(params, "tile_k") else None


def _shared_bytes(params: Params) -> int:
    return 4 * (number(params, "tile_m") + number(params, "tile_n")) * number(params, "tile_k") * number(params, "stages")


def variant(choices: Mapping[str, tuple[Value, ...]], clashes: bool = True) -> Variant:
    """The variant with these choices, with its rules given as clashes or all in one."""
    rules = (Clash(("tile_m", "tile_n", "warps"), _crowded), Clash(("tile_m", "tile_n", "tile_k", "stages"), _too_large),
             Clash(("splits", "reduction"), _mismatched))

    def refuses(problem: Problem, params: Params, limits: Limits) -> str | None:
        reasons = (rule.refuses(problem, params, limits) for rule in rules)
        return next(filter(None, reasons), None) or _refuses(problem, params, limits)

    return Variant(
        NAME, "big: for tests.", choices, {name: values[0] for name, values in choices.items()},
        refuses=_refuses if clashes else refuses, inexact=lambda problem, params: None, wasteful=lambda problem, params: None,
        constants=lambda problem, params: {}, plan=lambda problem, params: Plan((Launch(NAME, const(1), 32),)),
        clashes=rules if clashes else ())


def _cost(setting: Setting) -> Work:
    return Work(chain=2000.0 * _smooth(setting.params), instructions=0.0, wavefronts=0.0, l2_bytes=0.0)


@contextmanager
def registered(choices: Mapping[str, tuple[Value, ...]] = CHOICES, clashes: bool = True) -> Iterator[None]:
    """The variant is one of VARIANTS, and the cost model knows it, inside the block."""
    found = {NAME: variant(choices, clashes)}
    with mock.patch.dict(VARIANTS, found), mock.patch.dict(KERNELS, {NAME: _cost}):  # type: ignore[arg-type]
        yield


def _smooth(params: Params) -> float:
    """Parameters that pull on one another, as in a matrix product: tile sizes, what fits on chip, how the rows are cut."""
    size = {name: math.log2(number(params, name)) for name in ("tile_m", "tile_n", "warps", "promote", "order")}
    splits = math.log2(number(params, "splits"))
    area = size["tile_m"] + size["tile_n"] - 14
    factors = (
        1.0 if params["arithmetic"] == "x3" else 1.5, 1 + 0.12 * area**2, 1 + 0.08 * abs(size["tile_m"] - size["tile_n"]),
        1 + 0.1 * (area + 14 - size["warps"] - 11) ** 2, 1 + 0.25 * (_shared_bytes(params) / 1e5 - 1) ** 2,
        1 + 0.05 * (splits - 4 + 0.5 * area) ** 2, 1.06 if params["reduction"] == "atomic" and splits > 3 else 1.0,
        1.03 if params["reduction"] == "two_pass" and splits <= 3 else 1.0, 1 + 0.04 * abs(size["promote"] - 8),
        1 + 0.05 * abs(size["order"] - 2), 1.08 if params["epilogue"] == "finish" and params["stages"] == 5 else 1.0,
        1.04 if params["epilogue"] == "pass" else 1.0, 1.1 if (params["arithmetic"] == "x3") != bool(params["planes"]) else 1.0)
    return math.prod(factors)


def time_us(config: Config) -> float:
    """Microseconds of a config: smooth, and up to six per cent of what no model knows."""
    return 100.0 * _smooth(config.as_dict()) * (1 + 0.06 * (zlib.crc32(str(config).encode()) % 1000) / 1000)

"""All variants, simplest first. A new one is a template, a module with its rules and plan, and an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from codegen import (
    gemm_mma,
    gemm_wgmma,
    reduction,
    row_shared,
    row_thread,
    row_warp,
    tile_cluster,
    tile_mma,
    tile_wgmma,
    weight_ahead,
    weight_mma,
    weight_stream,
)
from codegen.config import Value
from codegen.problem import Problem
from codegen.variant import Params, Variant, number

VARIANTS: Mapping[str, Variant] = {
    variant.name: variant for variant in (
        row_thread.VARIANT, row_warp.VARIANT, row_shared.VARIANT, weight_stream.VARIANT, weight_ahead.VARIANT,
        weight_mma.VARIANT, tile_mma.VARIANT, gemm_mma.VARIANT, gemm_wgmma.VARIANT, tile_wgmma.VARIANT,
        tile_cluster.VARIANT)
}

UNTRIED: frozenset[str] = frozenset()
"""Variants that have not run on a GPU yet. They are validated as all others are, but take part only where they are named."""

UNTRIED_VALUES: Mapping[tuple[str, str], tuple[Value, ...]] = {}
"""By variant and parameter, values that have not run on a GPU yet. They are validated as all others are, but take part in no
search: only a config that is given whole can have them."""


def default_names() -> tuple[str, ...]:
    """The variants that take part where none are named."""
    return tuple(name for name in VARIANTS if name not in UNTRIED)


def tried(variant: Variant) -> Variant:
    """The variant without the values of UNTRIED_VALUES."""
    choices = {name: tuple(value for value in values if value not in UNTRIED_VALUES.get((variant.name, name), ()))
               for name, values in variant.choices.items()}
    return replace(variant, choices=choices)


def constants(problem: Problem, variant: Variant, params: Params) -> dict[str, int]:
    """Every named integer of a rendered source: the variant's own, then those of the second pass."""
    named = variant.constants(problem, params)
    if params["reduction"] == "two_pass" and "splits" in params:
        named |= reduction.second_pass(problem, number(params, "splits"))
    return named

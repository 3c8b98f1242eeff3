"""One config of each variant and reduction, for tests that take any."""

from __future__ import annotations

from codegen.arithmetic import OWN_ARITHMETIC
from codegen.config import Config
from codegen.limits import Limits
from codegen.problem import Problem
from codegen.space import make_config, nearest_runnable
from codegen.variants import VARIANTS

OF_FLOAT32 = [name for name, variant in VARIANTS.items()
              if set(variant.choices.get("arithmetic", ())) != set(OWN_ARITHMETIC.values())]
"""All variants but those whose arithmetics are of 16-bit data alone."""


ALWAYS_FIT = ("row_thread", "row_warp")
"""Variants that run every shape: whatever does not fit on chip is read again."""


def first_dtype(variant: str) -> str:
    """float32, where the variant takes it; else bfloat16."""
    return "float32" if variant in OF_FLOAT32 else "bfloat16"


def config_with(problem: Problem, limits: Limits, variant: str, reduction: str) -> Config | None:
    """The variant's defaults with this reduction; where they do not go together, the nearest config that can run, if any."""
    kept = ("reduction", "arithmetic") if problem.dtype == "float32" else ("reduction",)  # 16-bit data has one of its own
    return nearest_runnable(problem, make_config(variant, {"reduction": reduction}), limits, kept)


def every_reduction(problem: Problem, limits: Limits) -> list[Config]:
    """A config for every variant with every reduction that can run the problem."""
    found = (config_with(problem, limits, name, str(reduction))
             for name, variant in VARIANTS.items() for reduction in variant.choices["reduction"])
    return [config for config in found if config is not None]

"""Artifacts the tests share: their configs, and what they say of themselves."""

from __future__ import annotations

from dataclasses import replace

from codegen.artifact import ArtifactInfo, ArtifactKernel, ArtifactText, ErrorFigures, artifact
from codegen.expr import SMS, minimum
from codegen.limits import target
from codegen.plan import Launch
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.render import Source, render
from codegen.space import parse_config
from tests.configs import every_reduction

LIMITS = target("sm_80")
SHAPE = Shape(3, 5, 24, 7)
PROBLEM = Problem.of(SHAPE)
INFO = ArtifactInfo(SHAPE, "Some GPU", "sm_90a", 2.04, True, 0.51, {name: ErrorFigures(1.2e-7, 0.31) for name in GRADIENTS},
                    "lnl-tuner 0.1.0")

SINGLE_BLOCK = "row_warp:warps=2,splits=1,reduction=single_block"
THREE = ((SINGLE_BLOCK, 40), ("row_thread:reduction=atomic,threads=32", 300), ("row_shared:reduction=two_pass,splits=64", None))
"""Configs of one, two and two steps, with a fill and without, and the last row count of each."""


def typed(dtype: str, param_dtype: str) -> Problem:
    """PROBLEM in other data types."""
    return Problem.of(SHAPE, dtype=dtype, param_dtype=param_dtype)


def suited(problem: Problem) -> tuple[tuple[str, int | None], ...]:
    """THREE without those that its data types rule out: atomic additions to 16 bits."""
    return tuple(entry for entry in THREE if "atomic" not in entry[0] or problem.param_dtype == "float32")


EVERY_REDUCTION = [str(config) for config in every_reduction(PROBLEM, LIMITS)]


def source(config: str, problem: Problem = PROBLEM) -> Source:
    return render(problem, parse_config(config))


def make(*configs: tuple[str, int | None], problem: Problem = PROBLEM, info: ArtifactInfo = INFO) -> ArtifactText:
    """The artifact of these configs, each with the last row count it serves."""
    return artifact([ArtifactKernel(source(config, problem), last) for config, last in configs], info)


def one(config: str, problem: Problem = PROBLEM, info: ArtifactInfo = INFO) -> ArtifactText:
    """The artifact of one config."""
    return make((config, None), problem=problem, info=info)


def with_sms() -> Source:
    """A source whose grid, splits and workspace depend on the number of SMs."""
    plain = source("row_shared:reduction=two_pass,splits=64")
    kernel, second = plain.plan.launches
    splits = minimum(SMS * 2, plain.plan.splits)
    (partial,) = plain.plan.workspace
    width = partial.size.evaluate(1, 1)
    plan = replace(plain.plan, steps=(Launch(kernel.kernel, splits, kernel.block, kernel.shared_bytes), second), splits=splits,
                   workspace=(replace(partial, size=splits * width),))
    return replace(plain, plan=plan)

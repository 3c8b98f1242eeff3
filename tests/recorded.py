"""Recorded spaces that tests make up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from codegen.config import Config
from codegen.limits import target
from codegen.problem import Problem, Shape
from tuner.candidates import survey
from tuner.records import Status
from tuner.replay.recorded import Origin, Recorded, Result

SHAPE = "4,4,8,16"


def made_up(times: Callable[[Config], float | None], variants: tuple[str, ...], count: int | None = None,
            shape: str = SHAPE) -> Recorded:
    """A space whose configs take these times; None: the compiler refused it.

    Args:
        count: how many of the configs are recorded, any ones; None: all.
    """
    problem, limits = Problem.of(Shape.parse(shape)), target("sm_90")
    valid = survey(problem, limits, variants).valid
    chosen = valid if count is None else random.Random(0).sample(valid, count)
    results = {
        config: Result(Status.COMPILE_ERROR, "out of luck") if (time_us := times(config)) is None
        else Result(Status.OK, time_us=time_us) for config in chosen}
    origin = Origin(
        shape, problem.dtype, problem.param_dtype, problem.accuracy, problem.wants_key, False, 1e-5, 0, variants, "NVIDIA Test",
        "nvcc 0", {}, limits)
    return Recorded(origin, Counter(config.variant for config in valid), [], results)

"""What a tuning run is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.problem import Problem, Shape
from tuner.costmodel import tensor_bytes
from tuner.errors import InputError
from tuner.inputs import as_eps
from tuner.timing.regimes import as_regime

MAX_BYTES = 1 << 40
"""Tensors of one call that no machine holds: a shape with more is a slip of the pen."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to tune for; see `tune` for the meaning of each, and for `ablation`, whether to look what each parameter of the winner
    is worth, tuner.ablation."""

    shape: Shape
    dtype: str = "float32"
    eps: float = 1e-5
    deterministic: bool = False
    variants: tuple[str, ...] | None = None
    trials: int | None = None
    timeout: float | None = None
    seed: int = 0
    wants: frozenset[str] | None = None
    command: str = "tuner.tune"
    param_dtype: str = ""
    accuracy: str = ""
    regime: str = "warm"
    ablation: bool = False

    def problem(self) -> Problem:
        """The problem of the shape.

        Raises:
            InvalidProblem, UnsupportedDtype: as Problem.
            InputError, InputTypeError: the other values make no sense.
        """
        as_eps(self.eps)
        as_regime(self.regime)
        if self.variants is not None and not self.variants:
            raise InputError("no variant is left to try; name at least one, or leave the choice out")
        if self.trials is not None and self.trials < 1:
            raise InputError(f"the number of trials must be at least 1, not {self.trials}")
        if self.timeout is not None and not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise InputError(f"the timeout must be more than 0 seconds and finite, not {self.timeout}; leave it out for the "
                             "default")
        if self.seed < 0:
            raise InputError(f"the seed must be a whole number from 0, not {self.seed}")
        if self.shape.rows == 0:
            raise InputError(f"the shape {self.shape} has no rows, so there is nothing to tune; use batch and seq of 1 or more")
        problem = Problem.of(self.shape, dtype=self.dtype, wants=self.wants, deterministic=self.deterministic,
                             param_dtype=self.param_dtype, accuracy=self.accuracy)
        if (size := tensor_bytes(problem)) > MAX_BYTES:
            raise InputError(f"the tensors of the shape {self.shape} take {size / MAX_BYTES:.1f} TiB, more than any machine has "
                             "for one call; use smaller sizes")
        return problem

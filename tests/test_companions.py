"""The configs of an artifact beside the winner: valid, and as reproducible as it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from codegen.config import Config
from codegen.problem import Problem
from codegen.render import Source
from codegen.space import parse_config, why_refused, why_wasteful
from tuner.companions import choose_companion
from tuner.errors import NoValidKernel
from tuner.executors import Executor, Program
from tuner.guess import best_predicted
from tuner.inputs import Gradients

PROBLEM = Problem(100_000, 16, 12)
REPRODUCIBLE = "row_shared:threads=128,reduction=single_block,splits=1"


def won_by(config: str) -> SimpleNamespace:
    """As much of a run's result as the choice looks at."""
    return SimpleNamespace(winner=SimpleNamespace(config=parse_config(config)), info=SimpleNamespace(seed=0))


class Spoiled:
    """An executor that leaves out the last row of dx in programs of some configs."""

    name = "host"

    def __init__(self, executor: Executor, spoils: Config | None) -> None:
        self.limits, self._executor, self._spoils = executor.limits, executor, spoils
        self.compiled: list[Config] = []

    def compile(self, source: Source) -> Program:
        self.compiled.append(source.config)
        program = self._executor.compile(source)
        if self._spoils in (None, source.config):
            return SimpleNamespace(run=lambda inputs, wants: _without_last_row(program.run(inputs, wants)))  # type: ignore[return-value]
        return program


def _without_last_row(gradients: Gradients) -> Gradients:
    assert gradients.dx is not None
    dx = gradients.dx.copy()
    dx[-1] = np.nan
    return replace(gradients, dx=dx)


def test_it_is_fit_at_the_row_count_and_reproducible_as_the_winner_is(host_executor: Executor) -> None:
    config = choose_companion(host_executor, won_by(REPRODUCIBLE), PROBLEM)  # type: ignore[arg-type]
    assert config["reduction"] != "atomic"
    assert why_refused(PROBLEM, config, host_executor.limits) is None
    assert why_wasteful(PROBLEM, config) is None


def test_one_that_is_predicted_to_be_best_but_wrong_is_passed_over(host_executor: Executor) -> None:
    favourite = best_predicted(replace(PROBLEM, deterministic=True), host_executor.limits)
    executor = Spoiled(host_executor, favourite)
    config = choose_companion(executor, won_by(REPRODUCIBLE), PROBLEM)  # type: ignore[arg-type]
    assert executor.compiled[0] == favourite
    assert config != favourite


def test_where_none_is_valid_there_is_none(host_executor: Executor) -> None:
    with pytest.raises(NoValidKernel, match="100000 rows"):
        choose_companion(Spoiled(host_executor, None), won_by(REPRODUCIBLE), PROBLEM)  # type: ignore[arg-type]

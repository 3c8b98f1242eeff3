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
from tests.fake_gpu import lost_at
from tuner.companions import HOST_ROWS, choose_companion
from tuner.errors import NoValidKernel
from tuner.executors import Executor, Program
from tuner.guess import best_predicted
from tuner.inputs import Gradients, Inputs

PROBLEM = Problem(100_000, 16, 12)
REPRODUCIBLE = "row_shared:threads=128,reduction=single_block,splits=1"


def won_by(config: str) -> SimpleNamespace:
    """As much of a run's result as the choice looks at."""
    return SimpleNamespace(winner=SimpleNamespace(config=parse_config(config)), info=SimpleNamespace(seed=0))


class Spoiled:
    """An executor that leaves out the last row of dx in programs of some configs."""

    measures = False

    def __init__(self, executor: Executor, spoils: Config | None) -> None:
        self.limits, self._executor, self._spoils = executor.limits, executor, spoils
        self.compiled: list[Config] = []

    def compile(self, source: Source) -> Program:
        self.compiled.append(source.config)
        program = self._executor.compile(source)
        if self._spoils in (None, source.config):
            return SimpleNamespace(  # type: ignore[return-value]
                run=lambda inputs, wants: _without_last_row(program.run(inputs, wants)), variations=program.variations)
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


def test_once_the_gpu_is_lost_it_is_validated_on_the_cpu(host_executor: Executor) -> None:
    gpu = lost_at(lambda gpu, config: True)
    problem = Problem(64, 16, 12)
    config = choose_companion(gpu, won_by(REPRODUCIBLE), problem)  # type: ignore[arg-type]
    assert config["reduction"] != "atomic"
    assert why_refused(problem, config, host_executor.limits) is None


def test_a_row_count_beyond_all_memory_is_stood_for_by_fewer(host_executor: Executor) -> None:
    """Short rows cost a CPU much more than their products."""
    rows: list[int] = []

    class Watching(Spoiled):
        def compile(self, source: Source) -> Program:
            program = super().compile(source)

            def run(inputs: Inputs, wants: frozenset[str]) -> Gradients:
                rows.append(inputs.rows)
                return program.run(inputs, wants)

            return SimpleNamespace(run=run, variations={})  # type: ignore[return-value]

    nobody = parse_config("row_thread")
    choose_companion(Watching(host_executor, nobody), won_by(REPRODUCIBLE), Problem(1 << 30, 2, 2))  # type: ignore[arg-type]
    assert max(rows) == HOST_ROWS


def test_where_none_is_valid_there_is_none(host_executor: Executor) -> None:
    with pytest.raises(NoValidKernel, match="100000 rows"):
        choose_companion(Spoiled(host_executor, None), won_by(REPRODUCIBLE), PROBLEM)  # type: ignore[arg-type]

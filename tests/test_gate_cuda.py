"""The safety gate on a GPU: each tool finds what it is for in kernels whose results are right, and nothing in those of a run."""

from __future__ import annotations

from contextlib import closing

import pytest

from codegen.problem import Problem, Shape
from codegen.render import render
from codegen.space import parse_config
from tests import planted_sanitized
from tests.planted_sanitized import FAULT, FAULTS, planted
from tuner.choose import open_isolated
from tuner.executors import Executor
from tuner.gate.checks import Check, Outcome
from tuner.gate.gate import seconds_of
from tuner.gate.sanitizer import MOST_SECONDS, ROWS, TOOLS, Sanitizer
from tuner.records import Status
from tuner.store import Store
from tuner.tuning import Request, TuningRun
from tuner.validate import Validator

pytestmark = pytest.mark.cuda

PROBLEM = Problem.of(Shape(1, 70, 20, 12))
CONFIG = parse_config("row_warp:warps=4,rows=1,reduction=two_pass")


def found(cuda_executor: Executor, store: Store, module: str = "tuner.gate.sanitized") -> dict[str, Check]:
    assert cuda_executor.bus_id is not None
    checker = Sanitizer(PROBLEM, cuda_executor.bus_id, cuda_executor.limits, store.root, module)
    return {check.name: check for check in checker.check(CONFIG, MOST_SECONDS)}


def test_in_a_right_kernel_no_tool_finds_anything(cuda_executor: Executor, store: Store) -> None:
    said = f"nothing found at {', '.join(map(str, ROWS))} rows"
    assert found(cuda_executor, store) == {tool: Check(tool, Outcome.PASSED, said) for tool in TOOLS}


@pytest.mark.parametrize("tool", FAULTS)
def test_each_tool_finds_what_validation_does_not_see(cuda_executor: Executor, store: Store, tool: str,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT, tool)
    program = cuda_executor.compile(planted(render(PROBLEM, CONFIG)))
    assert Validator(PROBLEM).validate(program.run).ok
    checks = found(cuda_executor, store, planted_sanitized.__name__)
    assert checks[tool].outcome is Outcome.FAILED, checks


def test_the_winner_of_a_run_has_passed_everything_in_time(store: Store) -> None:
    with closing(open_isolated("cuda", store=store)) as workers:
        run = TuningRun(Request(Shape(4, 4, 8, 16), variants=("row_warp",), trials=40, deterministic=True, timeout=60.0), workers)
        run.execute()
    result = run.result()
    assert result.winner is not None and not result.rejections().get(Status.UNSAFE.value)
    assert {check.name: check.outcome for check in result.checks} == dict.fromkeys(
        ("other data", *TOOLS, "bit-equality"), Outcome.PASSED)
    assert seconds_of(60.0) == 15.0

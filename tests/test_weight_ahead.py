"""What is weight_ahead's own: both ways through its kernels, pieces of w that end early and others, and what it refuses."""

from __future__ import annotations

import pytest

from codegen.config import Value
from codegen.problem import ALL_GRADIENTS, GRADIENTS, Problem
from codegen.render import render
from codegen.space import make_config, why_not, why_refused
from tests.variant_cases import LIMITS, assert_right
from tuner.costmodel import predict
from tuner.executors.host import HostExecutor
from tuner.inputs import hard_inputs
from tuner.store import Store
from tuner.toolchain import find_nvcc

NAME = "weight_ahead"
SMALL: dict[str, Value] = {"threads": 128, "across": 32, "rows": 4, "outs": 32, "unroll": 4}


@pytest.mark.parametrize(("dtype", "waiting", "stores", "out"), [
    ("float32", "registers", "streaming", 64), ("float32", "shared", "plain", 61), ("bfloat16", "registers", "plain", 61),
    ("bfloat16", "shared", "streaming", 64),
])
def test_as_many_rows_as_it_takes_at_once_and_more(dtype: str, waiting: str, stores: str, out: int,
                                                   host_executor: HostExecutor) -> None:
    """Up to ROWS rows take the fast way, more the general one; several batches of loads, the last one with fewer rows of w."""
    config = make_config(NAME, {**SMALL, "waiting": waiting, "stores": stores})
    for rows in (0, 1, 4, 9):
        assert_right(host_executor, config, hard_inputs(rows, 512, out, dtype=dtype), ALL_GRADIENTS)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_each_gradient_alone_of_16_bit_parameters(gradient: str, host_executor: HostExecutor) -> None:
    """Whose sums of dw need scratch memory, where dw is wanted."""
    config = make_config(NAME, {**SMALL, "waiting": "shared"})
    for rows in (3, 9):
        assert_right(host_executor, config, hard_inputs(rows, 128, 40, dtype="bfloat16"), frozenset((gradient,)))


@pytest.mark.parametrize(("hidden", "values", "says"), [
    (256, {"threads": 128, "across": 256}, "none that lie 256 across"), (256, {"across": 128}, "without a column"),
    (256, {"unroll": 16}, "fewer rows of w than it would load at once"), (250, {"stores": "streaming"}, "16 bytes at once"),
    (256, {"rows": 16, "unroll": 16, "threads": 256, "outs": 128}, "registers"),
])
def test_what_does_not_go_together_is_refused(hidden: int, values: dict[str, Value], says: str) -> None:
    reason = why_refused(Problem(4, hidden, 256), make_config(NAME, {**SMALL, **values}), LIMITS)
    assert reason is not None and says in reason


def test_it_is_a_candidate_for_the_rows_it_takes_at_once_alone() -> None:
    config = make_config(NAME, SMALL)
    assert [rows for rows in range(1, 8) if why_not(Problem(rows, 256, 256), config, LIMITS) is None] == [3, 4]


def test_a_launch_that_overlaps_is_predicted_to_cost_less() -> None:
    problem = Problem(4, 768, 2304)
    apart, overlapped = (predict(problem, make_config(NAME, {**SMALL, "launches": launches}), LIMITS).time_us
                         for launches in ("apart", "overlapped"))
    assert overlapped == pytest.approx(apart - LIMITS.launch_us)


def test_loads_of_w_are_as_wide_as_can_be_and_registers_suffice(store: Store) -> None:
    """Values of both types, 16 bytes at once, and nothing spilled."""
    for dtype, vector in (("float32", 4), ("bfloat16", 8)):
        source = render(Problem(1, 4096, 4096, dtype), make_config(NAME, {
            "threads": 256, "across": 128, "rows": 1, "outs": 64, "unroll": 8, "stores": "streaming"}))
        assert f"constexpr int VECTOR = {vector};" in source.text
        reports = find_nvcc("sm_90a").compile(source.text, "sm_90a", store).reports
        assert {launch.kernel: reports[launch.kernel].spill_bytes for launch in source.plan.launches} == {
            "weight_ahead": 0, "ahead_finish": 0}

"""Variants whose launches overlap: launches=overlapped. What the host executor asks of them: tests/test_host_overlap.py."""

from __future__ import annotations

import pytest

from codegen.config import Config, Value
from codegen.problem import ALL_GRADIENTS, Problem
from codegen.render import render
from codegen.space import parse_config, why_refused
from codegen.variants import VARIANTS
from tests.variant_cases import LIMITS, SMALL, assert_right
from tuner.executors.host import HostExecutor
from tuner.inputs import hard_inputs
from tuner.store import Store
from tuner.toolchain import find_nvcc

CASES = [("row_shared:threads=64,lanes=32,rows=1,tile=4x4,splits=16", "float32"), ("weight_ahead", "bfloat16"),
         ("weight_mma:rows=16,outs=32,columns=32,warp_outs=16,statistics=launch", "float32"),
         ("weight_mma:rows=16,outs=32,columns=32,warp_outs=16,statistics=block,arithmetic=bf16", "bfloat16"),
         ("tile_wgmma:teams=2,stages=3", "float32")]
"""Configs and the data they are for."""


def overlapped(text: str) -> Config:
    name, _, values = text.partition(":")
    small = values or ",".join(f"{key}={value}" for key, value in SMALL[name].items())
    return parse_config(f"{name}:{small},launches=overlapped")


@pytest.mark.parametrize(("text", "dtype"), CASES, ids=[f"{text}-{dtype}" for text, dtype in CASES])
def test_kernels_wait_for_what_they_read(text: str, dtype: str, host_executor: HostExecutor) -> None:
    """Whatever is wanted; also of no rows, where some launches have no blocks."""
    for wants in (ALL_GRADIENTS, {"dx"}, {"dbeta"}):
        for rows in (0, 33) if wants == ALL_GRADIENTS else (33,):
            assert_right(host_executor, overlapped(text), hard_inputs(rows, 64, 72, dtype=dtype), frozenset(wants))


@pytest.mark.parametrize(("text", "dtype"), CASES, ids=[f"{text}-{dtype}" for text, dtype in CASES])
def test_all_but_the_first_overlap(text: str, dtype: str) -> None:
    source = render(Problem(33, 64, 72, dtype), overlapped(text))
    launches = source.plan.launches
    assert len(launches) > 1 and [launch.overlaps for launch in launches] == [False] + [True] * (len(launches) - 1)
    calls = [source.text.count(f"  {called}();") for called in ("wait_for_launch_before", "let_next_launch_begin")]
    assert calls == [len(launches) - 1] * 2


@pytest.mark.parametrize(("text", "dtype"), CASES[:1] + CASES[4:], ids=lambda value: value.partition(":")[0])
def test_device_code_is_no_other_for_it(text: str, dtype: str, store: Store) -> None:
    """Two instructions more: no register is spilled for them."""
    name = text.partition(":")[0]
    source = render(Problem(4096, 64, 72, dtype), overlapped(text))
    reports = find_nvcc("sm_90a").compile(source.text, "sm_90a", store).reports
    assert {kernel: report.spill_bytes for kernel, report in reports.items()} == dict.fromkeys(reports, 0) and name in reports


def test_one_launch_overlaps_with_none() -> None:
    alone: dict[str, Value] = {"reduction": "single_block", "splits": 1, "launches": "overlapped"}
    assert not VARIANTS["row_shared"].plan(Problem(4, 8, 16), {**VARIANTS["row_shared"].defaults, **alone}).overlapping
    reason = VARIANTS["row_shared"].wasteful(Problem(4, 8, 16), {**VARIANTS["row_shared"].defaults, **alone})
    assert reason is not None and "changes nothing" in reason
    assert why_refused(Problem(4, 8, 16), overlapped("row_shared:reduction=single_block,splits=1"), LIMITS) is None

"""Which configs an artifact holds: for which row counts each is taken, and that all of them are served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codegen.config import Config
from codegen.limits import TARGETS, most_memory, target
from codegen.problem import Problem
from codegen.reduction import MAX_SINGLE_BLOCK_ROWS
from codegen.render import render
from codegen.space import make_config, parse_config, why_not, why_refused, why_unfit, why_wasteful
from tests.artifact_cases import PROBLEM, SINGLE_BLOCK
from tuner.artifact import ABSURDLY_SLOW, LAST_STEP, MAX_CONFIGS, serve_all_rows
from tuner.costmodel import predict
from tuner.guess import best_predicted

H200 = target("sm_90")


@pytest.fixture
def by_rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No config is too slow."""
    monkeypatch.setattr("tuner.artifact.ABSURDLY_SLOW", float("inf"))


def served(problem: Problem, config: str, choose: dict[int, str]) -> list[tuple[str, int | None]]:
    """Configs and last row counts, where `choose` has what is taken for a row count."""
    kernels = serve_all_rows(render(problem, parse_config(config)), H200, lambda at: parse_config(choose[at.rows]))
    return [(str(kernel.source.config), kernel.last_rows) for kernel in kernels]


@pytest.mark.usefixtures("by_rules_alone")
def test_a_config_that_is_fit_everywhere_stands_alone() -> None:
    assert served(replace(PROBLEM, rows=300), "row_warp", {}) == [(str(make_config("row_warp")), None)]


@pytest.mark.usefixtures("by_rules_alone")
def test_a_single_block_gives_way_to_the_choice_for_the_first_row_count_it_is_not_fit_for() -> None:
    assert MAX_SINGLE_BLOCK_ROWS == 4096
    assert served(PROBLEM, SINGLE_BLOCK, {8192: "row_warp"}) == [
        (str(parse_config(SINGLE_BLOCK)), 4096), (str(make_config("row_warp")), None)]


@pytest.mark.usefixtures("by_rules_alone")
def test_a_tuned_row_count_that_is_no_power_of_two_is_served() -> None:
    problem = replace(PROBLEM, rows=4000)
    assert served(problem, SINGLE_BLOCK, {8192: "row_warp"})[0] == (str(parse_config(SINGLE_BLOCK)), 4096)
    shared = "row_shared:splits=16,reduction=two_pass"  # one chain of 4096 rows a split
    assert served(replace(PROBLEM, rows=65000), shared, {131072: "row_warp"})[0][1] == 65536
    assert served(replace(PROBLEM, rows=65537), SINGLE_BLOCK, {131072: "row_warp"})[0][1] == 65537


@pytest.mark.usefixtures("by_rules_alone")
def test_the_last_of_three_is_chosen_for_the_largest_row_count_if_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.artifact.MAX_CONFIGS", 3)
    shared = "row_shared:splits={},reduction=two_pass"
    most = 2**29  # 2 * 24 + 7 values of four bytes a row; twice as many rows would take more than the 144 GB of a GH200
    chosen = {8192: shared.format(16), 131072: shared.format(32), most: "row_warp"}
    assert served(PROBLEM, SINGLE_BLOCK, chosen) == [
        (str(parse_config(SINGLE_BLOCK)), 4096), (str(parse_config(chosen[8192])), 65536), (str(make_config("row_warp")), None)]


def test_too_few_blocks_for_many_rows_give_way() -> None:
    """Four blocks are right for any number of rows, and leave nearly all of a GPU idle at a million."""
    problem, few = Problem(16, 8, 16), parse_config("row_warp:splits=4,reduction=two_pass")
    kernels = serve_all_rows(render(problem, few), H200, lambda at: best_predicted(at, H200))
    assert kernels[0].source.config == few

    def times(config: Config, rows: int) -> float:
        """The predicted time in multiples of the best there is."""
        at = replace(problem, rows=rows)
        return predict(at, config, H200).time_us / predict(at, best_predicted(at, H200), H200).time_us

    assert times(few, 1 << 20) > 10 * times(kernels[-1].source.config, 1 << 20)
    for kernel in kernels[:-1]:
        assert kernel.last_rows is not None
        assert times(kernel.source.config, kernel.last_rows) <= ABSURDLY_SLOW < times(kernel.source.config, 2 * kernel.last_rows)
    assert times(kernels[-1].source.config, 1 << 30) == pytest.approx(1.0)


@pytest.mark.usefixtures("by_rules_alone")
def test_the_last_config_is_fit_at_both_ends_of_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is best for the most rows may need more workspace than fewer rows are allowed."""
    monkeypatch.setattr("tuner.artifact.MAX_CONFIGS", 3)
    problem = Problem(16, 512, 512)
    asked: list[int] = []

    def choose(at: Problem) -> Config:
        asked.append(at.rows)
        if at.rows < 1 << 15:
            return parse_config(SINGLE_BLOCK)
        return parse_config(f"row_warp:splits={1024 if at.rows == max(asked) else 32},reduction=two_pass,grads=identity")

    kernels = serve_all_rows(render(problem, parse_config(SINGLE_BLOCK)), H200, choose)
    first, last = kernels[-2].last_rows, kernels[-1].source.config
    assert first == 8192 and last["splits"] == 32 and asked[-1] == max(asked) // LAST_STEP
    assert why_unfit(replace(problem, rows=first + 1), last, H200) is None


@pytest.mark.usefixtures("by_rules_alone")
def test_fewer_rows_than_a_bounded_workspace_allows_have_a_config_of_their_own() -> None:
    problem = Problem(1 << 20, 512, 512)
    two_pass = "row_warp:splits=128,reduction=two_pass,grads=identity"
    below = next(rows for rows in (2**n for n in range(19, -1, -1))
                 if why_refused(replace(problem, rows=rows), parse_config(two_pass), H200))
    other = "row_warp:splits=16,reduction=two_pass,grads=identity"
    assert served(problem, two_pass, {2 * below - 1: other}) == [
        (str(parse_config(other)), 2 * below - 1), (str(parse_config(two_pass)), None)]


@pytest.mark.parametrize("problem", [Problem(16, 8, 16), Problem(512, 64, 64), Problem(1 << 20, 64, 64), Problem(8192, 768, 2304),
                                     Problem(1, 4096, 4096), Problem(16, 8, 16, deterministic=True)],
                         ids=lambda problem: f"{problem.rows}-{problem.hidden}-{problem.out}-{problem.deterministic}")
def test_every_row_count_has_a_config_that_is_fit(problem: Problem) -> None:
    kernels = serve_all_rows(render(problem, best_predicted(problem, H200)), H200, lambda at: best_predicted(at, H200))
    assert 1 <= len(kernels) <= MAX_CONFIGS and kernels[-1].last_rows is None
    assert any(kernel.source.config == best_predicted(problem, H200) for kernel in kernels)
    held = most_memory(H200.arch) // (4 * (2 * problem.hidden + problem.out))
    for rows in (2**n for n in range(held.bit_length())):
        config = next(kernel.source.config for kernel in kernels if kernel.last_rows is None or rows <= kernel.last_rows)
        at = replace(problem, rows=rows)
        assert why_unfit(at, config, H200) is None
        assert "idle" not in (why_wasteful(at, config) or "")


@pytest.mark.usefixtures("by_rules_alone")
def test_row_counts_that_no_gpu_can_hold_have_no_config_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(1 << 20, 64, 64)
    tuned = best_predicted(problem, H200)
    first_refused = next(rows for rows in (2**n for n in range(20, 40)) if why_not(replace(problem, rows=rows), tuned, H200))
    needed = first_refused * 4 * (2 * 64 + 64)

    def last_rows() -> list[int | None]:
        kernels = serve_all_rows(render(problem, tuned), H200, lambda at: make_config("row_warp"))
        return [kernel.last_rows for kernel in kernels]

    monkeypatch.setattr("tuner.artifact.most_memory", lambda arch: needed - 1)
    assert last_rows() == [None]
    monkeypatch.setattr("tuner.artifact.most_memory", lambda arch: 10**15)
    assert last_rows() == [first_refused // 2, None]


def test_no_gpu_has_more_memory_than_the_most_of_its_architecture() -> None:
    assert most_memory("sm_90a") == most_memory("sm_90") == 144 * 10**9
    assert most_memory("sm_103a") == max(most_memory(name) for name in (*TARGETS, "sm_103"))

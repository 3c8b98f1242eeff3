"""Statistics of times: the interval of the median against the binomial distribution and against its own promise."""

from __future__ import annotations

import json
from statistics import median

import numpy as np
import pytest

from tuner.timing.stats import LEVEL, Summary, interval, iqr


@pytest.mark.parametrize(("n", "rank", "level"), [
    (1, 1, 0.0), (2, 1, 0.5), (3, 1, 0.75), (5, 1, 0.9375), (6, 1, 0.96875), (8, 1, 0.9921875), (9, 2, 0.9609375),
    (10, 2, 0.978515625), (12, 3, 0.96142578125), (20, 6, 0.9586105346679688), (100, 40, 0.9647997997822952)])
def test_the_interval_is_that_of_the_tables(n: int, rank: int, level: float) -> None:
    """Ranks and levels as in Conover's and every other table of the binomial distribution with p = 1/2."""
    values = [float(n - index) for index in range(n)]  # n, ..., 1: of value k, k - 1 are smaller
    found = interval(values)
    assert (found.low, found.high) == (rank, n + 1 - rank)
    assert found.level == pytest.approx(level, abs=1e-12)


def test_the_interval_keeps_its_promise_whatever_the_distribution() -> None:
    random = np.random.default_rng(7)
    for draw, right in ((random.standard_exponential, np.log(2.0)), (random.standard_cauchy, 0.0)):
        found = [interval(draw(9).tolist()) for _ in range(4000)]
        share = sum(one.low <= right <= one.high for one in found) / len(found)
        assert share == pytest.approx(found[0].level, abs=3.0 * (0.04 * 0.96 / 4000) ** 0.5)


def test_many_values_are_no_trouble() -> None:
    found = interval([float(index) for index in range(2000)])
    assert found.level >= LEVEL
    assert found.high - found.low == pytest.approx(1.96 * 2000**0.5, rel=0.05)


def test_quartiles() -> None:
    assert iqr([3.0]) == 0.0
    assert iqr([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0


def test_one_round_is_summed_up_by_its_samples() -> None:
    summary = Summary.of([[5.0, 1.0, 2.0, 4.0, 3.0, 6.0]])
    assert (summary.median, summary.low, summary.high, summary.samples, summary.rounds) == (3.5, 1.0, 6.0, 6, 1)
    assert summary.level >= LEVEL


def test_of_several_rounds_each_is_one_value() -> None:
    """A hundred samples of one round say no more of the others than one does."""
    rounds = [[10.0 + step] * 100 for step in range(6)]
    summary = Summary.of(rounds)
    assert summary.median == median(range(10, 16)) and (summary.low, summary.high) == (10.0, 15.0)
    assert (summary.samples, summary.rounds) == (600, 6)
    assert Summary.of([[1.0], [3.0]]).level == 0.5


def test_a_summary_survives_json() -> None:
    summary = Summary.of([[1.0, 2.0], [1.5, 2.5]])
    assert Summary.from_json(json.loads(json.dumps(summary.as_json()))) == summary

"""Searches played on recorded spaces: the same every time, faults cost their candidate alone, and comparisons add up."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from codegen import space
from codegen.config import Config
from codegen.variants import VARIANTS
from tests.fake_gpu import rugged
from tests.recorded import made_up
from tuner import cli
from tuner.arguments import FAILED, OK, USAGE
from tuner.costmodel import TERMS, predict
from tuner.records import Status
from tuner.replay import compare, fit, rivals
from tuner.replay.cli import replay, winner
from tuner.replay.field import Field, play
from tuner.replay.judge import Fault
from tuner.replay.recorded import load
from tuner.strategy import Listed

SOME = ("row_thread", "row_warp")


@cache
def field() -> Field:
    return Field(made_up(rugged, SOME))


# --- the file ----------------------------------------------------------------------------------------------------------------


def test_a_space_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = made_up(lambda config: None if config.variant == "row_thread" else rugged(config), SOME)
    path = tmp_path / "space.json.xz"
    written.save(path)
    found = load(path)
    assert found.origin == written.origin and found.sizes == written.sizes
    assert {config: (result.status, result.reason) for config, result in found.results.items()} == {
        config: (result.status, result.reason) for config, result in written.results.items()}
    assert found.times == pytest.approx(written.times, rel=1e-5)
    assert list(tmp_path.iterdir()) == [path]


def test_a_space_says_how_much_of_it_is_recorded() -> None:
    whole = field().recorded
    assert whole.extent() == f"{whole.size} of {whole.size} valid configs"
    some = made_up(rugged, SOME)
    dropped = [config for config in some.results if config.variant == "row_warp"][3:]
    for config in dropped:
        del some.results[config]
    left, of = some.size - len(dropped), some.sizes["row_warp"]
    assert some.extent() == f"{left} of {some.size} valid configs (3 of {of} of row_warp)"


def test_a_space_of_variants_that_are_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.json.xz"
    made_up(rugged, SOME).save(path)
    monkeypatch.setattr(space, "VARIANTS", {name: VARIANTS[name] for name in VARIANTS if name != "row_thread"})
    assert cli.main(["--replay", str(path)]) == USAGE
    assert "record the space again" in capsys.readouterr().err


# --- playing -----------------------------------------------------------------------------------------------------------------


def test_what_is_told_late_is_still_told_in_order() -> None:
    told: list[Config] = []

    class Watched(Listed):
        def tell(self, config: Config, time_us: float | None) -> None:
            told.append(config)
            assert time_us == field().times[config]

    tried = play(Watched(field().candidates), field(), 20, ahead=7)
    assert tried == told == list(field().candidates[:20])


def test_the_fraction_of_the_optimum_is_that_of_the_best_so_far() -> None:
    ordered = sorted(field().times, key=field().times.__getitem__)
    assert field().reached([ordered[9], ordered[3], ordered[0]], 2) == field().best_us / field().times[ordered[3]]
    assert field().reached([ordered[9], ordered[3], ordered[0]], 3) == 1.0
    assert field().reached([], 5) == 0.0


def test_a_replay_is_the_same_every_time_and_finds_the_best() -> None:
    first, again = (replay(field(), 60, seed=3) for _ in range(2))
    assert first == again and len(first) == 60
    assert winner(first).best_us <= 1.05 * field().best_us


@pytest.mark.parametrize("fault", Fault)
def test_a_planted_fault_costs_its_candidate_alone(fault: Fault) -> None:
    sound = replay(field(), 10_000, seed=0)
    best = winner(sound)
    others = [record.config for record in sound if record is not best][::10]
    planted = replay(field(), 10_000, seed=0, faults=dict.fromkeys(others, fault))
    assert {record.config for record in planted} == {record.config for record in sound}
    assert winner(planted) == best
    assert all(record.status is not Status.OK and record.reason for record in planted if record.config in others)
    assert winner(replay(field(), 10_000, seed=0, faults={best.config: fault})).config != best.config


def test_the_search_does_without_what_is_planted() -> None:
    """One in five candidates fails, among them the best one: the search still comes near the best of those that are left."""
    faults = {config: list(Fault)[number % 3] for number, config in enumerate(sorted(field().times, key=rugged)[::5])}
    left = min(time_us for config, time_us in field().times.items() if config not in faults)
    assert winner(replay(field(), 60, seed=1, faults=faults)).best_us <= 1.1 * left


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.json.xz"
    field().recorded.save(path)
    assert cli.main(["--replay", str(path), "--trials", "20", "--runs", "2"]) == OK
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == ["seed 0", "seed 1", "2 runs"]
    assert "20 tried" in said[0]
    assert cli.main(["--replay", str(path), "--trials", "0"]) == USAGE
    assert cli.main(["--replay", str(tmp_path / "none")]) == USAGE
    made_up(lambda config: None, SOME).save(path)
    assert cli.main(["--replay", str(path), "--trials", "5"]) == FAILED
    assert "Traceback" not in capsys.readouterr().err


# --- comparing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["guided", "unaided", "random", "predicted", "tpe"])
def test_every_search_tries_candidates_once_each(name: str) -> None:
    rival = rivals.rivals()[name]
    tried = rival(field(), 40, 2)
    assert len(tried) == len(set(tried)) == 40 and set(tried) <= set(field().candidates)
    assert rival(field(), 40, 2) == tried
    assert set(rival(Field(made_up(rugged, SOME, 30)), 40, 2)) == set(Field(made_up(rugged, SOME, 30)).candidates)


def test_an_unaided_search_tries_the_same_whatever_is_predicted() -> None:
    other = Field(field().recorded)
    other.__dict__["predicted"] = dict.fromkeys(reversed(field().candidates), 1.0)
    assert rivals.unaided(other, 40, 2) == rivals.unaided(field(), 40, 2)
    assert rivals.guided(other, 40, 2) != rivals.guided(field(), 40, 2)


def test_every_config_has_a_row_of_its_own_in_the_table_for_kernel_tuner() -> None:
    choices, configs = rivals._table(field())
    assert sorted(configs.values(), key=str) == sorted(field().candidates, key=str)
    for row in configs:
        assert len(row) == len(choices) and all(value in choices[name] for name, value in zip(choices, row, strict=True))


def test_an_interval_holds_the_difference_and_tells_luck_from_skill() -> None:
    rng = np.random.default_rng(1)
    good, bad = ([np.clip(rng.normal(mean, 0.02, (30, 4)), 0, 1) for _ in range(3)] for mean in (0.98, 0.9))
    ahead = compare.difference(good, bad)
    assert 0.06 < ahead.low < ahead.mean < ahead.high < 0.1
    same = compare.difference(good, [np.roll(space, 1, axis=0) for space in good])
    assert same.low < 0 < same.high and same.mean == pytest.approx(0, abs=1e-12)
    assert compare.difference(bad, good).high < 0


def test_a_comparison_is_written_for_readers_and_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.json.xz"
    field().recorded.save(path)
    out = tmp_path / "out"
    assert compare.main([str(path), "--seeds", "2", "--rivals", "guided,random", "--out", str(out)]) == OK
    text, content = (out / "search.md").read_text(), json.loads((out / "search.json").read_text())
    assert "| guided |" in text and "| random |" in text and "95 % interval" in text
    assert f"times of {field().recorded.origin.device}:\n\n    python -m tuner.replay.compare {path} --seeds 2 " in text
    reached = content["reached"]["guided"]["space.json.xz"]
    assert np.shape(reached) == (2, 4) and all(row == sorted(row) for row in reached)
    assert content["tried"]["random"]["space.json.xz"] == [len(field().candidates)] * 2
    assert content["ahead_of"]["random"]["low"] <= content["ahead_of"]["random"]["mean"]
    assert compare.main([str(path), "--rivals", "nobody", "--out", str(out)]) == USAGE
    assert compare.main([str(path), "--seeds", "0"]) == USAGE
    assert "nobody" in capsys.readouterr().err


def test_what_cannot_be_compared_or_written_is_said_before_anything_is_played(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compare, "compare", lambda *_: pytest.fail("played"))
    recorded, path = field().recorded, tmp_path / "space.json.xz"
    recorded.save(path)
    assert compare.main([str(path), "--out", str(path)]) == USAGE
    assert "choose another folder with --out" in capsys.readouterr().err
    empty = tmp_path / "empty.json.xz"
    replace(recorded, results={}).save(empty)
    assert compare.main([str(path), str(empty), "--out", str(tmp_path / "out")]) == USAGE
    assert "empty.json.xz has no time; record more of it" in capsys.readouterr().err and not (tmp_path / "out").exists()


# --- the cost model's fit ----------------------------------------------------------------------------------------------------


def test_ranks_are_spearmans() -> None:
    values = np.array([3.0, 1.0, 4.0, 1.5])
    assert fit.spearman(values, values**3) == pytest.approx(1.0)
    assert fit.spearman(values, -values) == pytest.approx(-1.0)
    assert fit.spearman(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(3**0.5 / 2)


def test_a_sample_predicts_what_the_model_does() -> None:
    recorded = field().recorded
    kernels: dict[str, int] = {}
    one = fit.sample(recorded, kernels)
    expected = [predict(recorded.origin.problem(), config, recorded.origin.limits).time_us for config in recorded.times]
    assert fit.predicted(one, fit.start(kernels)) == pytest.approx(expected)


def test_a_fit_finds_weights_that_were_hidden_in_the_times() -> None:
    """Times are those of other weights: two terms and one kernel are off. The fit orders them, and a space it has not seen."""
    kernels: dict[str, int] = {}
    spaces = [fit.sample(made_up(rugged, ("row_shared", "row_warp"), 300, shape), kernels)
              for shape in ("4,4,8,16", "32,16,64,64", "8,16,32,128")]
    hidden = fit.start(kernels)
    for place, factor in ((TERMS.index("issue"), 3.0), (TERMS.index("atomics"), 6.0),
                          (len(TERMS) + 1 + kernels["row_warp"], 2.5)):
        hidden[place] += np.log(factor)
    known = [fit.Sample(one.name, fit.predicted(one, hidden), one.constant, one.terms, one.kernels, one.owners) for one in spaces]
    found = fit.fit(known[:2], kernels)
    before, after = (fit.spearman(fit.predicted(known[2], logs), known[2].measured) for logs in (fit.start(kernels), found))
    assert after > 0.98 > before


def test_a_kernel_that_is_slower_than_predicted_says_little_of_others() -> None:
    """Terms could be at fault as well; but they bear on all kernels, and the fit looks for the least that explains the times."""
    kernels: dict[str, int] = {}
    seen, other = (fit.sample(made_up(rugged, (name,), 200, "4,64,64,128"), kernels) for name in ("row_warp", "row_shared"))
    start = fit.start(kernels)
    hidden = start.copy()
    hidden[len(TERMS) + 1 + kernels["row_warp"]] += np.log(3.0)
    slower = fit.Sample(seen.name, fit.predicted(seen, hidden), seen.constant, seen.terms, seen.kernels, seen.owners)
    found = fit.fit([slower], kernels)
    assert fit.predicted(seen, found) == pytest.approx(slower.measured, rel=0.1)
    assert fit.predicted(other, found) == pytest.approx(fit.predicted(other, start), rel=0.05)


def test_a_fit_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        field().recorded.save(path)
    assert fit.main([*map(str, paths), "--out", str(tmp_path)]) == OK
    said = (tmp_path / "costmodel.md").read_text()
    assert "fitted to others" in said and f"python -m tuner.replay.fit {paths[0]}" in said
    made_up(lambda config: None, SOME).save(paths[0])
    assert fit.main([*map(str, paths), "--out", str(tmp_path)]) == USAGE
    assert "fewer than two times" in capsys.readouterr().err

"""The regime from the command line to the report: chosen once, recorded everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.limits import target
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.space import make_config
from tests.fake_gpu import FakeGpu
from tests.test_records import INFO, MEASURED
from tests.trials import read_trials
from tuner import cli, tune
from tuner.errors import InputError
from tuner.outcome import TuneResult
from tuner.report import best_json, report_markdown
from tuner.timing.regimes import REGIMES
from tuner.timing.stats import Summary
from tuner.tuning import Request
from tuner.validate import GradientError

SHAPE = Shape(4, 4, 8, 16)


def result(said: tuple[str, ...] = (), regime: str = "warm") -> TuneResult:
    errors = {name: GradientError(1e-7, 0.5) for name in GRADIENTS}
    best = replace(MEASURED, errors=errors)
    other = replace(best, config=make_config("row_thread"), final_us=2.24,
                    times={"warm": Summary(2.24, 0.1, 2.2, 2.3, 0.96, 180, 9)})
    return TuneResult(replace(INFO, regime=regime), Problem.of(SHAPE), target("sm_90"), (other, best), best, said=said)


def test_the_report_has_the_finalists_in_both_regimes_and_the_winner_first() -> None:
    page = report_markdown(result(("2 finalists cannot be told apart", "the GPU was hot")))
    assert "warm times decide" in page
    rows = [line for line in page.splitlines() if line.startswith("| `") and " to " in line]
    assert rows == [
        f"| `{make_config('row_warp')}` | 2.25 (0.03) | 2.24 to 2.27, 96% | 4.50 (0.10) | 4.40 to 4.70, 96% |",
        f"| `{make_config('row_thread')}` | 2.24 (0.10) | 2.20 to 2.30, 96% | – | – |"]
    assert "* 2 finalists cannot be told apart.\n* The GPU was hot.\n" in page
    assert "| finalist | cold | interval | warm | interval |" in report_markdown(result(regime="cold"))


def test_best_json_has_both_regimes_and_what_was_said() -> None:
    values = json.loads(best_json(result(("the GPU was hot",), "cold")))
    assert values["run"]["regime"] == "cold" and values["said"] == ["the GPU was hot"]
    assert values["winner"]["times"]["cold"]["median"] == 4.5


def test_without_final_times_nothing_is_said_of_them() -> None:
    plain = replace(MEASURED, times={}, errors={name: GradientError(1e-7, 0.5) for name in GRADIENTS})
    assert "## Times" not in report_markdown(TuneResult(INFO, Problem.of(SHAPE), target("sm_90"), (plain,), plain))


def test_the_regime_is_one_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="no regime 'hot'"):
        Request(SHAPE, regime="hot").problem()
    with pytest.raises(SystemExit) as ended:
        cli.main(["--shape", "4,4,8,16", "--regime", "hot"])
    assert ended.value.code == 2 and "hot" in capsys.readouterr().err


def test_a_run_records_its_regime() -> None:
    assert tune(SHAPE, executor=FakeGpu(), variants="row_thread", trials=1, regime="cold").info.regime == "cold"


def test_runs_in_another_regime_have_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNL_REPORTS", str(tmp_path))
    folders = [cli._default_folder(FakeGpu(), Request(SHAPE, regime=regime)).name for regime in ("warm", "cold")]
    assert folders == ["4x4x8x16-float32", "4x4x8x16-float32-cold"]


def test_without_a_gpu_the_regime_is_ignored_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LNL_REPORTS", str(tmp_path))
    assert cli.main(["--shape", "1,2,4,3", "--executor", "host", "--variants", "row_thread", "--trials", "1",
                     "--regime", "cold"]) == 0
    assert "--regime is ignored, since times are predicted" in capsys.readouterr().err
    (written,) = tmp_path.glob("*/*/trials.jsonl")
    assert read_trials(written)[0].regime == "warm"  # so that a run without the option can resume it, and the other way round
    assert [path.name for path in tmp_path.glob("*/*")] == ["1x2x4x3-float32"]


@pytest.mark.cuda
@pytest.mark.parametrize("regime", REGIMES)
def test_on_the_card_a_run_has_its_finalists_in_both_regimes(tmp_path: Path, regime: str) -> None:
    assert cli.main(["--shape", "8,16,64,64", "--executor", "cuda", "--trials", "6", "--regime", regime,
                     "--out", str(tmp_path)]) == 0
    values = json.loads((tmp_path / "best.json").read_text())
    times, final = values["winner"]["times"], values["winner"]["time"]["final_us"]
    assert set(times) == set(REGIMES) and times[regime]["median"] == final
    assert times[regime]["low"] <= final <= times[regime]["high"]
    assert times["cold"]["median"] > times["warm"]["median"]
    assert times[regime]["rounds"] >= 3 and times[regime]["level"] >= 0.75
    assert "degrees Celsius" in " ".join(values["said"]) or "nvidia-ml-py" in " ".join(values["said"])
    page = (tmp_path / "report.md").read_text()
    assert f"{regime} times decide" in page and "| finalist |" in page

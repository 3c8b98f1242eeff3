"""The states of a clock: what is measured when, what is said of it, and the command on a made-up GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.space import parse_config
from tests.fake_bench import RatedGpu
from tests.fake_gauge import FakeGauge
from tests.fake_gpu import failing_launch
from tuner.bench import clocks
from tuner.bench.clocks import BACK_TO_BACK, STEPS, Seen, states, summary, table
from tuner.timing.health import POWER_LIMIT, Reading

HIGH, LOW = Reading(1980, 300.4, 50), Reading(1485, 700.0, 61, frozenset((POWER_LIMIT,)))


class Card:
    """Fast for the first measurement after a pause, and slow from the next on."""

    def __init__(self) -> None:
        self.gauge = FakeGauge(HIGH)
        self.log: list[str | float] = []
        self._rested = True

    def pause(self, seconds: float) -> None:
        self.log.append(seconds)
        self._rested = True

    def measure(self) -> float:
        self.log.append("measured")
        self.gauge.now = HIGH if self._rested else LOW
        us, self._rested = (750.0 if self._rested else 840.0), False
        return us


def test_pauses_come_before_their_measurements_and_the_gauges_are_read_behind_each() -> None:
    card = Card()
    seen = list(states(card.measure, card.gauge, card.pause))
    assert [one.step for one in seen] == [step for step, _, count in STEPS for _ in range(count)]
    assert card.gauge.looks == len(seen) == card.log.count("measured")
    assert [entry for entry in card.log if entry != "measured"] == [1.5, 0.3, 0.8]
    for one in seen:
        assert (one.us, one.reading) == ((840.0, LOW) if one.step == BACK_TO_BACK else (750.0, HIGH))
    after = card.log.index(1.5)
    assert card.log[after - 1] == card.log[after + 1] == "measured"


def test_both_states_are_a_sentence() -> None:
    card = Card()
    assert summary(list(states(card.measure, card.gauge, card.pause))) == (
        "After pauses 750 us at 1980 MHz; back to back 840 us at 1485 MHz (power limit): 1.12 times as long.")
    told_nothing = [Seen("first", 18.26, Reading()), Seen(BACK_TO_BACK, 18.33, Reading()), Seen(BACK_TO_BACK, 18.41, Reading())]
    assert summary(told_nothing) == "After pauses 18.3 us; back to back 18.3 to 18.4 us: 1.01 times as long."


def test_every_measurement_is_a_row() -> None:
    lines = table([Seen("first", 749.4, HIGH), Seen(BACK_TO_BACK, 22.22, LOW), Seen("after 0.3 s", 1.0, Reading())])
    assert lines[2:] == ["| first | 749 | 1980 | 300 | 50 | nothing |", "| back to back | 22.2 | 1485 | 700 | 61 | power limit |",
                         "| after 0.3 s | 1 |  |  |  | nothing |"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RatedGpu:
    """The one there is; it has gauges, and nobody waits."""
    made = RatedGpu(times=lambda config: 12.34)
    monkeypatch.setenv("LNL_WISDOM", str(tmp_path / "wisdom"))
    monkeypatch.setattr(clocks, "open_gpu", lambda: made)
    monkeypatch.setattr(clocks, "_gauge", lambda executor: FakeGauge(LOW))
    monkeypatch.setattr(clocks, "STEPS", (("first", 0.0, 1), (BACK_TO_BACK, 0.0, 2)))
    return made


def test_the_command_writes_a_page(gpu: RatedGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = ["row_thread:threads=64", "row_warp:warps=2"]
    arguments = ["--shapes", "seed", "--dtype", "bfloat16", *(word for text in configs for word in ("--config", text))]
    assert clocks.main([*arguments, "--out", str(tmp_path)]) == 0
    page, said = (tmp_path / "clocks.md").read_text(), capsys.readouterr().out
    assert page.startswith("# Times and clocks, NVIDIA Test\n") and "`python -m tuner.bench.clocks --shapes seed --dtype" in page
    assert page.count("## seed, bfloat16") == page.count("| back to back | 12.3 | 1485 | 700 | 61 | power limit |") / 2 == 2
    assert "seed: After pauses 12.3 us at 1485 MHz (power limit)" in said and f"written: {tmp_path / 'clocks.md'}" in said


def test_without_a_config_it_is_the_kernel_of_a_call(gpu: RatedGpu, tmp_path: Path) -> None:
    assert clocks.main(["--shapes", "seed;1,9,8,4", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "clocks.md").read_text()
    assert "## seed, float32" in page and "## 1x9x8x4, float32" in page and len(set(gpu.timed)) >= 1


@pytest.mark.parametrize(("arguments", "says"), [
    (["--config", "row_warp:warps=2"], "--config is a kernel of one shape"), (["--shapes", "sed"], "some of seed, tiny"),
    (["--shapes", "seed", "--config", "row_warp:warps=3"], "warps")])
def test_what_makes_no_sense_is_a_sentence(gpu: RatedGpu, arguments: list[str], says: str, tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert clocks.main([*arguments, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("clocks: ") and says in said and said.count("\n") == 1
    assert not (tmp_path / "clocks.md").exists()


def test_a_kernel_that_is_wrong_is_not_timed(gpu: RatedGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config("row_warp:warps=2")
    gpu.kernels = {config: failing_launch}
    assert clocks.main(["--shapes", "seed", "--config", str(config), "--out", str(tmp_path)]) == 1
    assert "is no kernel for it: launch error" in capsys.readouterr().err and not (tmp_path / "clocks.md").exists()


def test_without_a_gpu_or_its_gauges_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                tmp_path: Path) -> None:
    monkeypatch.setattr(clocks, "open_gpu", RatedGpu)  # whose gauges nobody can find
    assert clocks.main(["--shapes", "seed", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "clocks: NVIDIA Test has no gauges\n" and not list(tmp_path.iterdir())


@pytest.mark.cuda
def test_clocks_are_read_on_a_gpu(tmp_path: Path) -> None:
    assert clocks.main(["--shapes", "seed", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "clocks.md").read_text().count("MHz") >= 3

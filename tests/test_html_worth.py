"""What a page says of the winner's parameters, and of what became of the run: from what it said itself at its end."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from codegen.space import parse_config
from reports.build import build
from tests.fake_gpu import FakeGpu, lost_at, stub_artifact
from tests.html_page import Page
from tests.report_cases import written
from tests.trials import read_trials
from tuner import cli as tuner_cli
from tuner import pages, publish
from tuner.changed import Changed
from tuner.gate.checks import Check, Outcome
from tuner.records import Record, RunInfo, Status
from tuner.study.earlier import read_earlier

SHAPE = "4,4,8,16"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunInfo, list[Record]]:
    """The folder of a run on a GPU, and its records."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "write_artifact", stub_artifact)
        patch.setattr(tuner_cli, "open_isolated", lambda name, target: FakeGpu())
        assert tuner_cli.main(["--shape", SHAPE, "--variants", "row_shared", "--trials", "60", "--out", str(folder)]) == 0
    return folder, *read_trials(folder / "trials.jsonl")


Tuned = tuple[Path, RunInfo, list[Record]]


def ending(folder: Path) -> dict[str, Any]:
    earlier = read_earlier(folder / "trials.jsonl")
    assert earlier is not None
    return dict(earlier.end)


def page_of(folder: Path) -> Page:
    page = Page(build(folder).read_text(encoding="utf-8"))
    assert page.faults == [] and page.loads == [] and page.scripts == 0
    return page


def said(tuned: Tuned, folder: Path, finished: bool = True, **changes: object) -> str:
    """The words of a page whose run ended otherwise."""
    _, info, records = tuned
    return page_of(written(folder, info, records, finished, {**ending(tuned[0]), **changes})).text


def test_the_ablation_stands_in_the_page_with_its_figures(tuned: Tuned) -> None:
    end = ending(tuned[0])
    found = [Changed.from_json(values) for values in end["ablation"]]
    page = page_of(tuned[0])
    rows = page.tables["worth"]
    timed = {(row[0].text, row[2].text.partition(" with ")[0]): row for row in rows if len(row) == 5}
    assert {(one.parameter, str(one.value)) for one in found if one.ratios} == set(timed) and len(timed) > 12
    for one in found:
        if one.ratios:
            row = timed[one.parameter, str(one.value)]
            winner = {name: str(value) for name, value in parse_config(end["winner"]).params}
            tied = [f"{name}={value}" for name, value in one.config.params
                    if name != one.parameter and str(value) != winner[name]]
            assert row[1].text == winner[one.parameter] and row[3].value == one.us
            assert row[4].value == sorted(one.ratios)[len(one.ratios) // 2]
            assert row[2].text == f"{one.value}{' with ' * bool(tied)}{', '.join(tied)}"
    for name in {one.parameter for one in found}:
        points = page.points.get(f"worth-wide-worth-{name}", [])
        assert len(points) == sum(one.parameter == name and bool(one.ratios) for one in found)
    refused = [one for one in found if one.status is Status.REFUSED]
    said = {(row[0].text, value): row[3].text for row in rows if len(row) == 4 for value in row[2].text.split(", ")}
    assert refused and {(one.parameter, str(one.value)): f"no candidate: {one.reason}" for one in refused} == said
    assert "timed in turns with it when the search was over" in page.text and "no ablation made for the purpose" not in page.text
    assert "more --trials may" not in page.text


def test_the_ablation_stands_in_the_report_for_readers_of_markdown(tuned: Tuned) -> None:
    lines = (tuned[0] / "report.md").read_text(encoding="utf-8").splitlines()
    winner = dict(part.split("=") for part in ending(tuned[0])["winner"].partition(":")[2].split(","))
    for one in map(Changed.from_json, ending(tuned[0])["ablation"]):
        row = f"| {one.parameter} | {winner[one.parameter]} | {one.value} |"
        found = [line for line in lines if line.startswith(row)]
        assert len(found) == bool(one.ratios) and all(line.endswith(f"| {one.times:.2f} |") for line in found)


def test_kernels_that_the_search_did_not_reach_and_that_are_faster_are_counted(tuned: Tuned, tmp_path: Path) -> None:
    found = [Changed.from_json(values) for values in ending(tuned[0])["ablation"]]
    first, second = [number for number, one in enumerate(found) if one.ratios][:2]
    found[first] = replace(found[first], ratios=(0.97, 0.9, 0.95))
    found[second] = replace(found[second], ratios=(0.97, 1.01, 0.95))
    assert "1 of them was faster by more than 2 %" in said(tuned, tmp_path / "run", ablation=[one.as_json() for one in found])


def test_the_ablation_of_another_winner_is_not_shown(tuned: Tuned, tmp_path: Path) -> None:
    winner = ending(tuned[0])["winner"]
    other = next(str(record.config) for record in tuned[2] if record.status is Status.OK and str(record.config) != winner)
    _, info, records = tuned
    short = [record for record in records if str(record.config) != winner]
    page = page_of(written(tmp_path / "run", info, short, True, ending(tuned[0])))
    assert "no ablation made for the purpose" in page.text and other in page.text


def test_without_a_gpu_every_value_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "write_artifact", stub_artifact)
    assert tuner_cli.main(["--shape", SHAPE, "--executor", "host", "--variants", "row_warp", "--trials", "1", "--out",
                           str(tmp_path)]) == 0
    page = page_of(tmp_path)
    _, records = read_trials(tmp_path / "trials.jsonl")
    us = {record.time_us for record in records}
    rows = [row for row in page.tables["worth"] if len(row) == 5]
    assert len(rows) > 4 and {row[3].value for row in rows} <= us
    assert "by the cost model; those that were not run were not validated" in page.text
    assert "by predicted time: PED-ANOVA" in page.text


# --- what became of the run ----------------------------------------------------------------------------------------------------


def test_a_run_that_lost_its_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pages.OFF, "on")
    monkeypatch.setattr(publish, "write_artifact", stub_artifact)
    gpu = lost_at(lambda gpu, config: len(gpu.timed) == 10)
    monkeypatch.setattr(tuner_cli, "open_isolated", lambda name, target: gpu)
    assert tuner_cli.main(["--shape", SHAPE, "--variants", "row_warp", "--out", str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.faults == []
    assert "The GPU was lost after row_warp:" in page.text and "This run did not come to its end" in page.text


def test_an_interrupted_run_says_so(tuned: Tuned, tmp_path: Path) -> None:
    words = said(tuned, tmp_path / "run", finished=False, interrupted=True)
    assert "This run was interrupted; the page has what was finished until then. --resume goes on with it" in words


def test_several_gpus_a_resumed_run_and_the_gate_are_told(tuned: Tuned, tmp_path: Path) -> None:
    clauses = ["candidates were tried on GPUs 0, 1, 2; the finals and the safety gate ran on GPU 0 (0000:3b:00.0)",
               "GPU 2 was lost, and the others went on without it: <b>gone</b>", "31 of the candidates were tried by the run of"]
    gate = [Check("memcheck", Outcome.PASSED, "nothing found").as_json(), Check("racecheck", Outcome.NOT_RUN, "late").as_json()]
    words = said(tuned, tmp_path / "run", said=clauses, gate=gate)
    assert all(clause[1:] in words for clause in clauses)
    assert "--resume goes on with it" not in words
    assert "Safety gate: memcheck: passed, nothing found; racecheck: not run, late." in words


def test_a_run_that_was_no_better_keeps_all_it_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """best.* stay those of the earlier run, and the page says so; nothing of it needs them."""
    monkeypatch.setattr(publish, "write_artifact", stub_artifact)
    dates = []
    for factor in (1.0, 3.0):
        gpu = FakeGpu()
        times, gpu.times = gpu.times, lambda config, factor=factor: factor * times(config)  # noqa: B023
        monkeypatch.setattr(tuner_cli, "open_isolated", lambda name, target, gpu=gpu: gpu)
        arguments = ["--shape", SHAPE, "--variants", "row_thread", "--seed", str(int(factor)), "--out", str(tmp_path)]
        assert tuner_cli.main(arguments) == 0
        dates.append(read_trials(tmp_path / "trials.jsonl")[0].date)
    page = page_of(tmp_path)
    assert f"best.cu, best.h and best.json in this folder are those of the run of {dates[0]}" in page.text
    assert "timed in turns with it when the search was over" in page.text and "other data: passed" in page.text
    assert not re.search(r'id="code"', page.source)

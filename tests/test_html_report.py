"""report.html: every figure is the records', and any reader can read it."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from codegen.config import Config
from codegen.problem import GRADIENTS
from reports.build import build
from reports.charts import look_of
from reports.page import run_page
from reports.run import read_run
from reports.svg import SERIES
from reports.words import plain, without_place
from tests.browser import look, print_out
from tests.eyes import EYES, linear, oklab
from tests.fake_gpu import FakeGpu, failing_launch, stub_artifact
from tests.html_page import Page
from tests.report_cases import PUBLISHED, ROOT, SEED, published_records, written
from tests.trials import read_trials
from tuner import cli as tuner_cli
from tuner import pages, publish
from tuner.calls import configs
from tuner.records import Record, RunInfo, Status
from tuner.validate import GradientError

STYLE = (ROOT / "reports/style.css").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def published() -> tuple[Page, RunInfo, list[Record], dict[str, Any]]:
    """The page of a published run, and what its files say."""
    folder = PUBLISHED / SEED
    info, records = published_records()
    return Page(run_page(read_run(folder))), info, records, json.loads((folder / "best.json").read_text(encoding="utf-8"))


Published = tuple[Page, RunInfo, list[Record], dict[str, Any]]


# --- the figures ---------------------------------------------------------------------------------------------------------------


def test_every_candidate_stands_in_the_page_with_its_figures(published: Published) -> None:
    page, _, records, _ = published
    rows = page.tables["candidates"]
    assert len(rows) == len(records) == 500
    for number, (row, record) in enumerate(zip(rows, records, strict=True), 1):
        assert (row[0].value, row[1].text, row[4].text) == (number, record.status.value, str(record.config))
        assert (row[2].value, row[3].value) == (record.best_us, record.worst_bound_ratio)


def test_the_winner_is_that_of_best_json(published: Published) -> None:
    page, info, _, best = published
    winner = best["winner"]
    us, floor = winner["time"]["final_us"], best["floor_us"]
    heading = re.search(r"<h1>(.*?)</h1>", page.source)
    assert heading is not None and f'value="{us!r}"' in heading[1] and "measured" in heading[1]
    for figure in (us, floor, us / floor, floor / us):
        assert any(float(value) == pytest.approx(figure, rel=1e-12) for value, _ in page.numbers)
    assert winner["config"] in page.text and info.command in page.text and info.date in page.text and info.version in page.text
    rows = {row[0].text: row for row in page.tables["errors"]}
    assert set(rows) == set(GRADIENTS)
    for name, error in winner["errors"].items():
        assert (rows[name][1].value, rows[name][3].value) == (error["normwise"], error["bound_ratio"])
    [kernel] = page.tables["resources"]
    assert [kernel[1].value, kernel[2].value, kernel[3].value] == [79, 2240, 0]


def test_shown_numbers_round_the_exact_ones(published: Published) -> None:
    """What a reader sees is what a program reads, to three digits or those of its unit."""
    for value, shown in published[0].numbers:
        number = float(shown.replace(",", "").removesuffix("%")) / (100 if shown.endswith("%") else 1)
        assert number == pytest.approx(float(value), rel=0.006, abs=0.0051)


def test_families_are_those_of_the_records(published: Published) -> None:
    page, _, records, _ = published
    found = {row[0].text: [cell.value for cell in row[1:]] for row in page.tables["families"]}
    for name in {record.config.variant for record in records}:
        times = [record.best_us for record in records if record.config.variant == name]
        assert found.pop(name) == [len(times), len(times), min(times), median(times), max(times)]
    assert not found


def test_the_improvements_are_those_of_the_search(published: Published) -> None:
    page, _, records, _ = published
    best, expected = math.inf, []
    for number, record in enumerate(records, 1):
        if record.time_us is not None and record.time_us < best:
            best = record.time_us
            expected.append((number, best, str(record.config)))
    assert [(row[0].value, row[1].value, row[2].text) for row in page.tables["improvements"]] == expected


def test_a_parameter_is_worth_what_changing_it_alone_cost(published: Published) -> None:
    page, _, records, best = published
    us = {str(record.config): record.time_us for record in records}
    winner = best["winner"]["config"]
    rows = [row for row in page.tables["worth"] if row[-1].values]
    assert len(rows) > 8
    for row in rows:
        other = winner.replace(f"{row[0].text}={row[1].text}", f"{row[0].text}={row[2].text}")
        assert other != winner and row[3].value == us[other]
        assert row[4].value == pytest.approx(us[other] / us[winner], rel=1e-12)
    near = {text for text in us if len(set(text.split(",")) ^ set(winner.split(","))) == 2}
    assert len(near) == len(rows)


@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_points_of_the_figures_lie_where_the_records_say(kind: str, published: Published) -> None:
    """Horizontal places in the strips, and vertical ones in the history, are linear in the logarithm of the time."""
    page, _, records, _ = published
    for name in {record.config.variant for record in records}:
        mine = [(number, record) for number, record in enumerate(records, 1) if record.config.variant == name]
        strip = page.points[f"families-{kind}-family-{name}"]
        assert _linear([x for x, _ in strip], [math.log(us) for us in sorted(record.best_us for _, record in mine)])
        history = page.points[f"history-{kind}-history-{name}"]
        assert _linear([x for x, _ in history], [number for number, _ in mine])
        assert _linear([y for _, y in history], [math.log(record.time_us or math.nan) for _, record in mine])
        roofline = page.points[f"roofline-{kind}-roofline-{name}"]
        assert _linear([y for _, y in roofline], [-math.log(record.best_us) for _, record in mine])


def _linear(places: list[float], values: list[float]) -> bool:
    """Whether places, rounded to hundredths of a unit of the figure, are a linear function of the values."""
    assert len(places) == len(values) > 1
    low, high = values.index(min(values)), values.index(max(values))
    slope = (places[high] - places[low]) / (values[high] - values[low])
    return all(abs(places[low] + slope * (value - values[low]) - place) < 0.05
               for place, value in zip(places, values, strict=True))


def test_importance_is_shared_out_among_the_parameters(published: Published) -> None:
    page, _, _, best = published
    names = {part.partition("=")[0] for part in best["winner"]["config"].partition(":")[2].split(",")}
    shares = {row[0].text: row[1].value for row in page.tables["importance"]}
    assert set(shares) <= names and sum(shares.values()) == pytest.approx(1)
    assert "PED-ANOVA" in page.text


def test_the_benchmark_beside_the_run_is_quoted(published: Published) -> None:
    rows = json.loads((PUBLISHED / "bench.json").read_text(encoding="utf-8"))["rows"]
    row = next(row for row in rows if row["name"] == "seed" and row["dtype"] == "float32")
    shown = {value for value, _ in published[0].numbers}
    assert {repr(row["ours"]["warm"]["median"]), repr(row["ratio"]), repr(row["peers"]["compile"]["warm"]["median"])} <= shown


def test_the_code_is_best_cu_to_the_letter(published: Published) -> None:
    code = re.search(r'<pre class="highlight".*?</pre>', published[0].source, flags=re.DOTALL)
    assert code is not None
    parsed = Page(code[0])
    assert "".join(parsed.words).strip() == (PUBLISHED / SEED / "best.cu").read_text(encoding="utf-8").strip()
    assert code[0].count('<span class="k') > 100


# --- the page ----------------------------------------------------------------------------------------------------------------


def test_the_page_is_valid_and_needs_nothing_else(published: Published) -> None:
    page = published[0]
    assert page.faults == [] and page.loads == [] and page.scripts == 0
    assert page.source.startswith("<!DOCTYPE html>\n<html lang=\"en\">") and '<meta name="viewport"' in page.source
    assert re.search(r"(?:src|href)=.https?:", page.source) is None and "var(--" in page.source
    assert page.source.count("<svg role") == page.source.count("<title id=") == page.source.count("<desc id=") == 12


@pytest.mark.parametrize("broken", ["<p><table data-of='x'></table></p>", "<p>", "</p>", "<i id='a'></i><i id='a'></i>",
                                    "<a href='#b'></a>", "<svg></svg>"])
def test_the_parser_of_these_tests_sees_faults(broken: str) -> None:
    assert Page(broken).faults


@pytest.mark.parametrize("load", ["<img src='http://x/y.png'>", "<link href='//x/y.css'>", "<style>a{b:url(y.png)}</style>"])
def test_the_parser_of_these_tests_sees_loads(load: str) -> None:
    assert Page(load).loads


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_accessibility_asks_for(scheme: str) -> None:
    """WCAG 2.2, 1.4.3: 4.5 for text; 1.4.11: 3 for what a figure shows."""
    colours = _colours(scheme)
    for ground in ("card", "page"):
        for text in ("ink", "muted", "accent", "good", "bad", "key", "comment", "string", "number", "name"):
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert all(_contrast(colours[f"series-{number}"], colours["card"]) >= 3 for number in range(len(SERIES)))


def _colours(scheme: str) -> dict[str, str]:
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part)) for part in STYLE.split("@media")[:2])
    return light if scheme == "light" else light | dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("eyes", list(EYES))
def test_families_differ_for_all_eyes(scheme: str, eyes: str) -> None:
    """Five times what can just be told apart in Oklab (0.02); and no two of up to a hundred have colour and marker in common."""
    colours = _colours(scheme)
    seen = [oklab(colours[f"series-{number}"], EYES[eyes]) for number in range(len(SERIES))]
    assert min(math.dist(one, other) for one, other in combinations(seen, 2)) > 0.09
    assert len(set(map(look_of, range(100)))) == 100 and len({look_of(number)[1] for number in range(10)}) == 10


def _contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        red, green, blue = linear(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.chromium
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_a_browser_shows_it_on_screens_and_phones(width: int, scheme: str, tmp_path: Path, published: Published) -> None:
    page = tmp_path / "report.html"
    page.write_text(published[0].source, encoding="utf-8")
    seen = look(page, width, scheme, tmp_path)
    assert seen.console == []
    assert seen.values["content"] <= seen.values["width"] and seen.values["outside"] == 0
    assert (seen.values["wide"], seen.values["narrow"]) == ((6, 0) if width > 1000 else (0, 6))
    light = [sum(map(int, re.findall(r"\d+", seen.values[name])[:3])) > 3 * 127 for name in ("background", "ink")]
    assert light == [scheme == "light", scheme == "dark"]
    assert seen.values["point"] != "rgb(0, 0, 0)"


@pytest.mark.chromium
def test_a_printed_page_is_short(tmp_path: Path, published: Published) -> None:
    """The list of all candidates and the code, which take 40 sheets, stay out."""
    page = tmp_path / "report.html"
    page.write_text(published[0].source, encoding="utf-8")
    assert 3 <= print_out(page, tmp_path) <= 12


@pytest.mark.chromium
def test_the_browser_of_these_tests_sees_faults(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<figure><svg><text>x</text></svg></figure><div style="width: 500px">x</div><script>throw 1</script>')
    seen = look(page, 390, "light", tmp_path)
    assert len(seen.console) == 1 and seen.values["content"] > seen.values["width"]


def test_a_thousand_candidates_take_seconds_and_few_megabytes(tmp_path: Path, published: Published) -> None:
    """Seconds of this process, since other processes may have the machine."""
    _, info, records, _ = published
    space = configs("4,4,8,16", variants=["row_warp", "row_shared", "row_thread"])[:1000]
    many = [replace(records[number % len(records)], config=config) for number, config in enumerate(space)]
    folder = written(tmp_path / "many", info, many)
    shutil.copy(PUBLISHED / SEED / "best.cu", folder)
    began = time.process_time()
    page = build(folder)
    assert time.process_time() - began < 10
    assert len(many) == 1000 and page.stat().st_size < 5e6
    assert len(Page(page.read_text(encoding="utf-8")).tables["candidates"]) == 1000


# --- runs of every kind ------------------------------------------------------------------------------------------------------


def tuned(folder: Path, arguments: str, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu | None = None) -> Page:
    """The page that a run leaves."""
    monkeypatch.setenv(pages.OFF, "on")
    monkeypatch.setattr(publish, "write_artifact", stub_artifact)
    if gpu is not None:
        monkeypatch.setattr(tuner_cli, "open_isolated", lambda name, target: gpu)
    tuner_cli.main(["--shape", "4,4,8,16", *arguments.split(), "--out", str(folder)])
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_a_run_on_the_cpu_leaves_a_page_that_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    page = tuned(tmp_path, "--executor host --variants row_thread --trials 2", monkeypatch)
    info, records = read_trials(tmp_path / "trials.jsonl")
    assert str(tmp_path / "report.html") in capsys.readouterr().out.replace("\n", "")
    assert page.faults == [] and page.loads == []
    assert "us, predicted" in page.text and "no GPU was used" in page.text
    valid = [record for record in records if record.status is Status.OK]
    left = sorted(record.time_us or 0 for record in records if record.status is Status.NOT_RUN)
    [family] = page.tables["families"]
    assert [family[2].value, family[3].value, family[-1].value] == [
        len(valid), min(record.best_us for record in valid), left[0]]
    best = json.loads((tmp_path / "best.json").read_text())
    assert sum(row[1].value for row in page.tables["steps"]) == pytest.approx(best["winner"]["time"]["us"])
    assert info.versions["Python"] in page.text and "stub" in page.text


def test_rejected_candidates_are_counted_by_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = configs("4,4,8,16", variants=["row_thread"])
    gpu = FakeGpu(kernels={space[0]: failing_launch, space[1]: failing_launch}, refused=frozenset(space[2:3]))
    page = tuned(tmp_path, "--variants row_thread --trials 40", monkeypatch, gpu)
    _, records = read_trials(tmp_path / "trials.jsonl")
    counts = Counter(record.status.value for record in records if record.status is not Status.OK)
    assert set(counts) == {"launch error", "compile error"}
    assert {row[0].text: row[1].value for row in page.tables["reasons"]} == counts
    assert len(page.points["history-wide-history-rejected"]) == counts.total()
    finals = {row[0].text: row[1].value for row in page.tables["finals"]}
    assert finals == {str(record.config): record.times["warm"].median for record in records if record.times}
    assert page.faults == []


def test_the_rates_of_the_run_are_the_ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.limits = replace(gpu.limits, copy_tbps=3.21, launch_us=0.77)
    page = tuned(tmp_path, "--variants row_thread --trials 3", monkeypatch, gpu)
    ceilings = {row[0].text: (row[1].value, row[3].text) for row in page.tables["ceilings"]}
    assert ceilings["device memory"] == (3.21, "measured when the run began")
    assert ceilings["one launch"] == (0.77, "measured when the run began")
    assert ceilings["float32 units"][1].startswith("from the table")


def test_without_what_draws_the_run_ends_well_and_says_how_to_get_the_page(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pages.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    with pytest.raises(FileNotFoundError):
        tuned(tmp_path, "--variants row_thread --trials 3", monkeypatch, FakeGpu())
    said = " ".join(capsys.readouterr().out.split())
    assert "matplotlib is not installed" in said and f"python -m reports {tmp_path} writes it" in said
    assert (tmp_path / "best.json").exists() and (tmp_path / "report.md").exists()


def test_damage_and_interruption_are_said(tmp_path: Path, published: Published) -> None:
    _, info, records, _ = published
    folder = written(tmp_path / "run", info, records[:30], finished=False)
    with (folder / "trials.jsonl").open("a") as file:
        file.write('{"config": "row_thr\nnonsense\n')
    page = Page(build(folder).read_text(encoding="utf-8"))
    assert "2 lines of trials.jsonl could not be read and are left out" in page.text
    assert "did not come to its end" in page.text
    assert len(page.tables["candidates"]) == 30


def test_a_run_without_a_valid_kernel_has_a_page_too(tmp_path: Path, published: Published) -> None:
    reason = "dx[0,0] is <script>alert(1)</script> & wrong"
    bad = [replace(record, status=Status.WRONG, reason=reason, time_us=None, final_us=None,
                   errors={"dx": GradientError(math.inf, math.inf)}) for record in published[2][:5]]
    page = Page(build(written(tmp_path / "run", published[1], bad)).read_text(encoding="utf-8"))
    assert "No valid kernel" in page.text and reason in page.text
    assert page.scripts == 0 and page.faults == []
    assert [[row[0].text, row[1].value] for row in page.tables["reasons"]] == [["wrong result", 5]]


def test_files_of_another_run_are_not_taken_for_this_one(tmp_path: Path, published: Published) -> None:
    """best.cu, best.json and their floor may be an earlier run's, which were kept."""
    folder = tmp_path / SEED
    shutil.copytree(PUBLISHED / SEED, folder)
    _, info, records, _ = published
    later = replace(info, date="2026-12-24T00:00:00+00:00")
    slow = sorted(records, key=lambda record: record.best_us)[250:]
    run = read_run(written(folder, later, slow))
    assert run.code == "" and run.winner is not None
    assert run.winner.best_us == min(record.best_us for record in slow)


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (1.2e-5, "1.20e-05"), (0.0512, "0.0512"), (0.51, "0.510"),
                                             (1.957, "1.96"), (9.996, "10.0"), (25.47, "25.5"), (13073.4, "13,073"),
                                             (9999.6, "10,000"), (math.inf, "inf")])
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert plain(value) == text


@pytest.mark.parametrize("command", ["bench --tune --out /a/b --shapes gpt2", "bench --tune --shapes gpt2 --out=/a/b"])
def test_a_command_is_shown_without_where_its_files_went(command: str) -> None:
    assert without_place(command) == "bench --tune --shapes gpt2"


def test_configs_may_break_behind_each_parameter(published: Published) -> None:
    config: Config = published[2][0].config
    assert str(config).replace(",", ",<wbr>") in published[0].source

"""Pages of files that are damaged, hostile or of another version: a page or a sentence, and never a traceback."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from codegen.limits import target
from codegen.problem import GRADIENTS
from codegen.space import make_config, parse_config
from reports.benchmark import read_benchmark
from reports.build import build
from reports.ending import Ending
from reports.index import index_page
from reports.page import run_page
from reports.run import read_run
from tests.html_page import Page
from tests.report_cases import PUBLISHED, SEED, published_records, written
from tuner.errors import InputError
from tuner.records import Record, RunInfo, Status
from tuner.validate import GradientError

ODD: list[Any] = [None, True, -1, 0, 1e308, math.nan, math.inf, -0.5, "", "x", "<script>alert(1)</script>", "9" * 400, [], {},
                  [1], {"a": 1}, "\ud800", 10**30]
"""What may stand in the place of any value."""


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, other in inside:
        yield from _places(other, (*place, key))


def damaged(values: Any, count: int, seed: int) -> Iterator[Any]:
    """Copies of JSON values, in each of which one value is gone or an odd one."""
    rng, text = random.Random(seed), json.dumps(values)
    places = list(_places(values))
    for _ in range(count):
        copy = json.loads(text)
        *way, last = rng.choice(places)
        holder = copy
        for key in way:
            holder = holder[key]
        if rng.random() < 0.25:
            del holder[last]
        else:
            holder[last] = rng.choice(ODD)
        yield copy


@pytest.fixture(scope="module")
def lines() -> list[Any]:
    """The header of a published run, with an end, and some of its records."""
    header, *records = map(json.loads, (PUBLISHED / SEED / "trials.jsonl").read_text().splitlines()[:30])
    best = json.loads((PUBLISHED / SEED / "best.json").read_text())
    config = best["winner"]["config"]
    changed = {"parameter": "threads", "config": config, "status": "ok", "reason": None, "us": 2.0, "ratios": [1.1, 1.2]}
    header["end"] = {"limits": asdict(target("sm_90")), "winner": config, "lost": "lost", "interrupted": False,
                     "said": ["a", "b"], "gate": [{"name": "a", "outcome": "passed", "said": "b"}],
                     "ablation": [changed, changed]}
    return [header, *(record for record in records if record["status"] == "ok"), best["winner"]]


def files(folder: Path, lines: list[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trials.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def test_a_damaged_header_is_a_run_or_a_sentence(lines: list[Any], tmp_path: Path) -> None:
    header = {name: value for name, value in lines[0].items() if name != "end"}
    seen = {"run": 0, "sentence": 0}
    for other in damaged(header, 150, 1):
        try:
            run = read_run(files(tmp_path, [other, *lines[1:4]]))
        except InputError as error:
            seen["sentence"] += 1
            assert "\n" not in str(error) and len(str(error)) < 1500
        else:
            seen["run"] += 1
            assert run.problem.rows > 0 and all(isinstance(count, int) for count in run.info.refused.values())
    assert min(seen.values()) > 30


def test_a_damaged_end_is_read_as_far_as_it_can_be(lines: list[Any], tmp_path: Path) -> None:
    whole = Ending.of(lines[0]["end"])
    assert whole.ablation and whole.checks and whole.limits and whole.said and whole.winner and whole.lost
    lost = 0
    for other in damaged(lines[0]["end"], 400, 2):
        ending = Ending.of(other)
        assert isinstance(ending.winner, str) and all(one.parameter for one in ending.ablation)
        assert ending.limits is None or (0 < ending.limits.copy_tbps < math.inf and isinstance(ending.limits.sms, int))
        assert all(isinstance(text, str) and text for check in ending.checks for text in check.values())
        lost += ending != whole
    assert lost > 100
    for odd in ODD:
        run = read_run(files(tmp_path, [{**lines[0], "end": odd}, *lines[1:4]]))
        assert run.ending == Ending() or odd == {"a": 1}


def test_a_damaged_benchmark_is_results_or_a_sentence(tmp_path: Path) -> None:
    values = json.loads((PUBLISHED / "bench.json").read_text())
    values["rows"] = values["rows"][:2]
    for part in values["parts"]:
        part["asked"] = ["other float32, class fp32"]
    path, seen = tmp_path / "bench.json", {"results": 0, "sentence": 0}
    for other in damaged(values, 300, 3):
        path.write_text(json.dumps(other))
        try:
            results = read_benchmark(path)
        except InputError as error:
            seen["sentence"] += 1
            assert "\n" not in str(error)
        else:
            assert results is not None
            seen["results"] += 1
            assert all(row.ratio is None or row.ratio > 0 for row in results.rows)
            assert all(row.share is None or row.share > 0 for row in results.rows)
            assert all(isinstance(title, str) for title in results.missing)
    assert min(seen.values()) > 50


@pytest.mark.parametrize("place", ["ours warm median", "peers compile cold median", "floor bytes_us", "floor launch_us",
                                   "floor matrix_us"])
@pytest.mark.parametrize("odd", [0, -1.0, math.nan, math.inf, 1e300, "1", [1]], ids=str)
def test_a_time_that_is_none_is_seen(place: str, odd: object, tmp_path: Path) -> None:
    values = json.loads((PUBLISHED / "bench.json").read_text())
    *way, last = place.split()
    holder = values["rows"][3]
    for key in way:
        holder = holder[key]
    holder[last] = odd
    (tmp_path / "bench.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"bench\.json .*; move it away, or run python -m tuner bench again"):
        index_page(tmp_path)


@pytest.mark.parametrize("odd", [-0.1, math.nan, math.inf, "0.1", None], ids=str)
def test_a_noise_that_is_none_is_seen(odd: object, tmp_path: Path) -> None:
    values = json.loads((PUBLISHED / "bench.json").read_text())
    values["rows"][3]["ours"]["warm"]["noise"] = odd
    (tmp_path / "bench.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"bench\.json has a row with a figure"):
        index_page(tmp_path)


def test_a_benchmark_without_rows_is_none(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps({**json.loads((PUBLISHED / "bench.json").read_text()), "rows": []}))
    with pytest.raises(InputError, match=r"bench\.json has no row; move it away"):
        index_page(tmp_path)


def test_damaged_records_are_left_out_and_the_others_stand(lines: list[Any], tmp_path: Path) -> None:
    """One page of whole records and ten times as many damaged ones, of which many can be read."""
    other = [copy for number, record in enumerate(lines[1:]) for copy in damaged(record, 11, number)]
    page = Page(build(files(tmp_path / "run", [lines[0], *other, *lines[1:]])).read_text(encoding="utf-8"))
    assert page.faults == [] and page.scripts == 0 and page.loads == []
    shown = {row[4].text.partition(" ")[0]: row for row in page.tables["candidates"]}
    for record in lines[1:]:
        assert record["config"] in shown
    assert "could not be read and are left out" in page.text


def test_nothing_of_the_files_is_taken_for_html(lines: list[Any], tmp_path: Path) -> None:
    evil = "<script>alert('1')</script><img src=x onerror=y>&amp;\"'"
    info, records = published_records()
    info = replace(info, device=evil, command=evil, version=evil, sources=evil, versions={evil: evil}, refused={evil: 3})
    bad = replace(records[1], status=Status.WRONG, reason=evil)
    check = {"name": evil, "outcome": evil, "said": evil}
    end = {"winner": str(records[0].config), "lost": evil, "said": [evil, "half \ud800"], "gate": [check], "ablation": [
        {"parameter": "threads", "config": str(records[0].config), "status": "hang", "reason": evil, "us": None,
                         "ratios": []}]}
    folder = written(tmp_path / evil.replace("/", ""), info, [records[0], bad, *records[2:12]], True, end)
    (folder / "best.cu").write_text(f"// {evil}")
    (folder / "best.json").write_text(json.dumps({"run": info.as_json(), "winner": records[0].as_json()}))
    page = Page(build(folder).read_text(encoding="utf-8"))
    assert page.scripts == 0 and page.loads == [] and page.faults == []
    assert page.text.count(evil) > 10 and "Half ?." in page.text


def test_words_without_end_do_not_make_a_page_without_end(tmp_path: Path) -> None:
    info, records = published_records()
    reason = "ptxas error   : \n" * 20_000
    bad = [replace(record, status=Status.COMPILE_ERROR, reason=reason, time_us=None, final_us=None) for record in records[:200]]
    info = replace(info, command=reason)
    folder = written(tmp_path / "run", info, [*bad, *records[200:230]], True, {"lost": reason, "said": [reason] * 5})
    (folder / "best.json").write_text(json.dumps({"run": info.as_json(), "winner": records[0].as_json()}))
    (folder / "best.cu").write_text("int x = 1;\n" * 200_000)
    began = time.process_time()
    page = build(folder)
    assert page.stat().st_size < 5e6 and time.process_time() - began < 10
    words = page.read_text(encoding="utf-8")
    assert "more characters" in words and "Only its beginning is shown" in words


def test_a_single_candidate_makes_a_page(tmp_path: Path) -> None:
    info, records = published_records()
    page = Page(build(written(tmp_path / "run", info, records[:1])).read_text(encoding="utf-8"))
    assert page.faults == [] and len(page.tables["candidates"]) == 1 and len(page.tables["errors"]) == 5


@pytest.mark.parametrize("config", ["row_shared:threads=512,lanes=32,rows=8,vector=4,tile=8x8,splits=1024,reduction=single_block",
                                    "gemm_mma:parts=1,reduction=two_pass", "tile_mma:rows=16,warps=4,across=1"])
def test_a_winner_that_the_rules_of_today_refuse_has_its_times(config: str, tmp_path: Path) -> None:
    """The plan of its call is not known any more, so neither its bytes nor its steps are."""
    info, records = published_records()
    old = replace(records[0], config=parse_config(config))
    page = Page(build(written(tmp_path / "run", info, [old])).read_text(encoding="utf-8"))
    assert page.faults == [] and "steps" not in page.tables
    assert "The rules of today refuse the winner's config" in page.text
    [row] = page.tables["candidates"]
    assert row[2].value == old.best_us


def test_a_run_of_the_first_version_has_a_page(tmp_path: Path) -> None:
    """Whose header and records have only what they had then."""
    new = {"regime", "sources", "versions", "param_dtype", "finished", "end"}
    info = RunInfo("4,4,8,16", "float32", ",".join(GRADIENTS), False, 1e-5, "fp32", "cuda", "NVIDIA H200", target("sm_90").arch,
                   0, 5, None, "2026-11-29T00:00:00+00:00", "tuner", "0", 10, 5, {})
    errors = {name: GradientError(1e-7, 0.1) for name in GRADIENTS}
    record = Record(make_config("row_thread"), Status.OK, None, 9.0, True, errors=errors, rows=(16,))
    header = {name: value for name, value in info.as_json().items() if name not in new}
    line = {name: value for name, value in record.as_json().items() if name not in ("times", "source")}
    page = Page(run_page(read_run(files(tmp_path / "run", [header, line]))))
    assert page.faults == [] and "row_thread takes 9" in page.text


def test_an_index_without_a_complete_row_is_a_page(tmp_path: Path) -> None:
    values = json.loads((PUBLISHED / "bench.json").read_text())
    for row in values["rows"]:
        row.update(ours={"warm": None, "cold": None, "errors": {}, "note": None}, config=None, reason="<i>no time</i>")
    (tmp_path / "bench.json").write_text(json.dumps(values))
    page = Page(index_page(tmp_path))
    assert page.faults == [] and "matrix" not in page.tables and len(page.tables["bench"]) == len(values["rows"])
    assert "<i>no time</i>" in page.text

"""`python -m reports`: one run's page again, comparisons of several, the index, and what it says to bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reports import cli
from reports.index import INDEX, index_page
from reports.run import read_run
from tests.html_page import Page
from tests.report_cases import PUBLISHED, ROOT, SEED, published_records, written
from tuner.bench.sheet import read_results
from tuner.records import Record, RunInfo, Status


def _some(count: int) -> tuple[RunInfo, list[Record]]:
    info, records = published_records()
    return info, records[:count]


def slower(records: list[Record], factor: float) -> list[Record]:
    return [replace(record, time_us=factor * (record.time_us or 0), final_us=record.final_us and factor * record.final_us)
            for record in records]


@pytest.mark.parametrize(("factor", "changes", "options", "status"), [
    (1.06, {}, [], 1), (1.04, {}, [], 0), (0.5, {}, [], 0), (1.06, {}, ["--tolerance", "10"], 0),
    (1.04, {}, ["--tolerance", "3%"], 1), (2.0, {"device": "NVIDIA Other"}, [], 0), (2.0, {"shape": "4,8,8,16"}, [], 0),
    (2.0, {"accuracy": "tf32"}, [], 0), (2.0, {"regime": "cold"}, [], 0), (2.0, {"measures": False}, [], 0)], ids=str)
def test_a_regression_is_a_slower_measured_time_of_the_same_problem_and_device(
        factor: float, changes: dict[str, Any], options: list[str], status: int, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    info, records = published_records()
    fast = sorted(records, key=lambda record: record.best_us)[:3]
    before = written(tmp_path / "before", info, fast)
    after = written(tmp_path / "after", replace(info, **changes), slower(fast, factor))
    monkeypatch.chdir(tmp_path)
    assert cli.main([str(before), str(after), *options]) == status
    said = capsys.readouterr()
    assert ("regression" in said.err) == (status == 1)
    page = Page((tmp_path / "comparison.html").read_text(encoding="utf-8"))
    assert [row[4].value for row in page.tables["runs"]] == [fast[0].best_us, pytest.approx(factor * fast[0].best_us)]
    assert ("Regression" in page.text) == (status == 1) and page.faults == [] and page.loads == []
    assert ("Before and after" in page.text) == (not changes)


def test_a_later_run_without_a_kernel_is_a_regression(tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    info, records = published_records()
    before = written(tmp_path / "before", info, records[:2])
    after = written(tmp_path / "after", info, [replace(records[0], status=Status.WRONG, reason="dx")])
    assert cli.main([str(before), str(after), "--out", str(tmp_path / "page.html")]) == 1
    assert "no valid kernel in" in capsys.readouterr().err


def test_a_page_is_rebuilt_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run", *_some(40))
    assert cli.main([str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    first = (folder / "report.html").read_bytes()
    assert cli.main([str(folder)]) == 0 and (folder / "report.html").read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "trials.jsonl"]


@pytest.mark.parametrize(("extra", "says"), [(["sdfsdf"], "1 line that cannot be read is"),
                                             (["{}", "", '{"a": 1}'], "2 lines that cannot be read are")], ids=["one", "two"])
def test_damaged_lines_are_said_with_their_file(extra: list[str], says: str, tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    folder = written(root / "run", *_some(4))
    with (folder / "trials.jsonl").open("a") as file:
        file.write("\n".join(extra) + "\n")
    whole = written(tmp_path / "whole", *_some(4))
    commands = [["index", "--root", root]] if len(extra) == 1 else [[folder], [whole, folder, "--out", tmp_path / "page.html"]]
    for arguments in commands:
        assert cli.main(list(map(str, arguments))) == 0
        assert capsys.readouterr().err == f"reports: {says} left out of {folder / 'trials.jsonl'}\n"


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trials.jsonl").write_text("")
    assert cli.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (f"reports: {tmp_path / 'trials.jsonl'} is empty; name a folder that python -m tuner has "
                                       "written\n")


def test_without_root_the_results_of_the_current_folder_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LNL_REPORTS", raising=False)
    for command in ("index", "pictures"):
        assert cli.main([command]) == 2 and "there are no results in reports; name" in capsys.readouterr().err
    written(tmp_path / "reports/other/4x4x8x16-float32", *_some(3))
    assert cli.main(["index"]) == 0 and (tmp_path / "reports/other/index.html").exists()
    assert cli.main(["pictures"]) == 2  # which are of a benchmark
    (tmp_path / "reports/test").mkdir()
    shutil.copy(PUBLISHED / "bench.json", tmp_path / "reports/test")
    assert cli.main(["pictures"]) == 0 and (tmp_path / "reports/test/ratios.svg").exists()
    capsys.readouterr()
    assert cli.main(["index"]) == 2
    assert capsys.readouterr().err == ("reports: there are results in reports/other and reports/test; name one of them with "
                                       "--root\n")
    monkeypatch.setenv("LNL_REPORTS", str(tmp_path / "elsewhere"))
    assert cli.main(["index"]) == 2 and str(tmp_path / "elsewhere") in capsys.readouterr().err


def test_the_index_has_every_row_of_the_benchmark_and_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "h200"
    shutil.copytree(PUBLISHED, root)
    (root / SEED / "report.html").write_text("page")
    assert cli.main(["index", "--root", str(root)]) == 0
    page = Page((root / "index.html").read_text(encoding="utf-8"))
    assert page.faults == [] and page.loads == [] and page.scripts == 0
    rows = json.loads((root / "bench.json").read_text(encoding="utf-8"))["rows"]
    for row, values in zip(page.tables["bench"], rows, strict=True):
        assert [cell.text for cell in row[:4]] == [values["name"], values["shape"], values["dtype"], values["accuracy"]]
        assert row[4].value == values["ours"]["warm"]["median"]
        peers = [values["peers"][name]["warm"] for name in ("eager", "compile", "gemms")]
        shown = [[float(value) for value in cell.values] for cell in row[5:8]]
        assert shown == [[peer["median"]] if peer else [] for peer in peers]
        assert row[8].value == pytest.approx(values["ratio"], rel=1e-12)
        assert row[11].value == max(values["ours"]["errors"].values())
    results = read_results(root / "bench.json")
    assert results is not None
    standings = Counter(row.standing for row in results.rows)
    assert f"faster than PyTorch in {standings['faster']} of {len(rows)} cases, level in {standings['level']}" in page.text
    assert page.source.count('<b class="bad">') == standings["slower"]
    cells = {(row[0].text, at): cell for row in page.tables["matrix"] for at, cell in enumerate(row[2:])}
    kinds = list(dict.fromkeys((values["dtype"], values["accuracy"]) for values in rows))
    shown = {(values["name"], kinds.index((values["dtype"], values["accuracy"]))): values for values in rows}
    assert {place for place, cell in cells.items() if cell.values} == set(shown)
    for place, values in shown.items():
        best = values["peers"][values["best_peer"]]["warm"]["median"]
        assert [float(value) for value in cells[place].values] == [
            pytest.approx(values["ratio"], rel=1e-12), values["ours"]["warm"]["median"], best]
    for dtype, accuracy in kinds:
        mine = [values["ratio"] for values in rows if (values["dtype"], values["accuracy"]) == (dtype, accuracy)]
        points = page.points[f"ratios-wide-ratios-{dtype}-{accuracy}"]
        slope = (points[0][0] - points[-1][0]) / (mine[0] - mine[-1])
        assert all(x == pytest.approx(points[0][0] + slope * (ratio - mine[0]), abs=0.1)
                   for (x, _), ratio in zip(points, mine, strict=True))
    finals = {json.loads(path.read_text())["winner"]["time"]["final_us"] for path in root.glob("*/best.json")}
    assert {row[1].value for row in page.tables["runs"]} == finals
    assert f'<a href="{SEED}/report.html">' in page.source
    folders = [path.parent for path in root.glob("*/trials.jsonl")]
    with_page = [folder for folder in folders if (folder / "report.html").exists()]
    assert page.source.count("report.html") == len(with_page) < len(folders)
    assert page.source.count('report.md">') == len(folders) - len(with_page)


def test_the_index_names_what_the_benchmark_did_not_come_to(tmp_path: Path) -> None:
    values = json.loads((PUBLISHED / "bench.json").read_text(encoding="utf-8"))
    for number, part in enumerate(values["parts"]):
        part["asked"] = [f"other{number} float32, class fp32"]
    pages = []
    for asked in (values, {**values, "parts": [{**part, "asked": []} for part in values["parts"]]}):
        (tmp_path / "bench.json").write_text(json.dumps(asked))
        pages.append(Page(index_page(tmp_path)).text)
    assert "Asked for, and not come to: other0 float32, class fp32" in pages[0] and "not come to" not in pages[1]


def test_the_published_index_is_that_of_the_published_results(tmp_path: Path) -> None:
    """But for how Matplotlib draws. Where it is not: python -m reports index. Runs of this machine that are not published do not
    count."""
    listed = subprocess.run("git ls-files reports/h200", shell=True, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    for path in map(ROOT.joinpath, listed) if listed else PUBLISHED.glob("**/*"):
        if path.is_file() and path.suffix != ".html":
            (tmp_path / path.relative_to(PUBLISHED)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / path.relative_to(PUBLISHED))
    built, committed = index_page(tmp_path), (PUBLISHED / INDEX).read_text(encoding="utf-8")
    assert _but_for_drawings(built) == _but_for_drawings(committed)
    assert len(committed.encode()) < 1_000_000
    assert not re.search(r"h200/|/tmp/|lnl-tuner \w", committed.replace("--out reports/h200", ""))


def test_published_pages_of_runs_are_small_and_stand_alone() -> None:
    """Where a run is published with its page, that is of its own records."""
    for path in PUBLISHED.glob("*/report.html"):
        text, run = path.read_text(encoding="utf-8"), read_run(path.parent)
        page = Page(text)
        assert len(text.encode()) < 5_000_000 and page.faults == [] and page.loads == [] and page.scripts == 0
        assert len(page.tables["candidates"]) == len(run.tried)
        assert run.winner is not None and str(run.winner.config) in page.text


def _but_for_drawings(page: str) -> str:
    return re.sub(r"(</desc>).*?(</svg>)", r"\1\2", page, flags=re.DOTALL)


@pytest.mark.parametrize("arguments", [["nowhere"], ["."], ["index", "--root", "."], ["index", "--root", "damaged"], ["damaged"],
                                       ["other"], [], ["--tolerance", "x", "a", "b"], ["--tolerance", "-1", "a", "b"],
                                       [".", "--out", "x.html"], ["--sideways"]], ids=" ".join)
def test_bad_input_is_one_sentence(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("damaged", "{]\n"), ("other", '{"schema": 99}\n')):
        Path(name).mkdir()
        Path(name, "trials.jsonl").write_text(text)
        Path(name, "bench.json").write_text(text)
    try:
        status = cli.main(arguments)
    except SystemExit as left:
        status = int(str(left.code))
    said = capsys.readouterr().err.strip()
    assert status == 2 and said.startswith("reports") and "\n" not in said
    assert not list(tmp_path.glob("**/*.html"))


def test_results_in_the_current_folder_do_not_hide_the_package(tmp_path: Path) -> None:
    """Runs leave a folder `reports` where they are started."""
    written(tmp_path / "reports/test/run", *_some(3))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "reports", "reports/test/run"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "reports/test/run/report.html").exists()

"""Pictures of published results: what is in them, in which colours, and the command that draws them."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from codegen.problem import Shape
from reports import cli
from reports.pictures import over_rows, ratios
from reports.words import us, without_place
from tests.report_cases import PUBLISHED, ROOT
from tuner.bench.results import Case, Entry, Results, Row
from tuner.bench.shapes import NamedShape
from tuner.bench.sheet import read_results

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def rows() -> tuple[Row, ...]:
    results = read_results(PUBLISHED / "bench.json")
    assert results is not None
    return results.rows


def scaled(row: Row, rows: int) -> Row:
    """The row at another number of rows, times in proportion."""
    shape = Shape(1, rows, row.case.shape.hidden, row.case.shape.out)
    factor = rows / row.case.shape.rows

    def times(entry: Entry) -> Entry:
        return entry if entry.warm is None else replace(entry, warm=replace(entry.warm, median=factor * entry.warm.median))

    problem = row.case.problem
    return replace(row, case=Case.of(NamedShape(shape.slug, shape), problem.dtype, problem.accuracy), ours=times(row.ours),
                   peers={name: times(peer) for name, peer in row.peers.items()})


def texts(picture: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def description(picture: str) -> str:
    found = ElementTree.fromstring(picture).find(f"{SVG}desc")
    assert found is not None and found.text
    return found.text


def test_every_ratio_is_a_bar_a_figure_and_in_the_description(rows: tuple[Row, ...]) -> None:
    picture = ratios(rows, "NVIDIA Test")
    shown, said = texts(picture), description(picture)
    for row in rows:
        assert f"{row.ratio:.2f}×" in shown and f"{row.case.title}: {row.ratio:.2f}, {row.standing}" in said
        assert f"{row.case.name}\xa0 {row.case.shape}" in shown
    assert {"float32", "bfloat16"} <= set(shown) and any("one NVIDIA Test" in text for text in shown)
    filled = Counter(re.findall(r'<g id="patch_\d+">\s*<path[^>]*style="fill: (#[0-9a-f]{6})', picture))
    by_type = Counter(row.case.problem.dtype for row in rows)
    assert {count + 1 for count in by_type.values()} <= set(filled.values())  # a bar for each, and one in the legend


def test_what_is_slower_than_pytorch_is_marked(rows: tuple[Row, ...]) -> None:
    assert rows[0].ours.warm is not None
    warm = replace(rows[0].ours.warm, median=2 * (rows[0].ratio or 0.0) * rows[0].ours.warm.median)
    slower, level = (replace(rows[0], ours=replace(rows[0].ours, warm=replace(warm, noise=noise))) for noise in (0.0, 1.0))
    assert (slower.standing, level.standing) == ("slower", "level")
    bad = re.findall(r"--bad: (#[0-9a-f]{6})", (ROOT / "reports/style.css").read_text())[0]
    faster = [row for row in rows if row.standing == "faster"]
    marked = [re.findall(rf'<text style="[^"]*fill: {bad}[^"]*"[^>]*>([^<]+)<', ratios(some, "NVIDIA Test"))
              for some in (faster, [slower, *faster], [level, *faster])]
    assert marked == [[], ["0.50×"], []]


def test_rows_without_a_peer_are_left_out(rows: tuple[Row, ...]) -> None:
    alone = replace(rows[0], peers={})
    assert f"{rows[0].case.title}: " not in description(ratios([alone, *rows[1:]], "NVIDIA Test"))


def test_times_over_rows_have_a_pane_for_each_problem(rows: tuple[Row, ...]) -> None:
    gpt2 = [row for row in rows if row.case.name == "gpt2"]
    points = [scaled(row, count) for row in gpt2 for count in (4096, 1, 64)]
    picture = over_rows(points, "NVIDIA Test")
    shown, said = texts(picture), description(picture)
    for row in points:
        assert row.ours.warm is not None and str(row.case.shape.rows) in shown
        title = f"H = 768, O = 2304, {row.case.problem.dtype}"
        assert title in shown and f"{title}, {row.case.shape.rows} rows: ours {us(row.ours.warm.median)}, eager" in said
    assert {"ours", "eager", "compile", "gemms", "floor"} <= set(shown)


def test_it_stands_alone_and_has_a_dark_side(rows: tuple[Row, ...]) -> None:
    """No script and nothing from elsewhere; each colour has a rule that changes it, and rules for nothing else."""
    picture = ratios(rows, "NVIDIA Test")
    body, rules = re.sub(r"<style>.*?</style>", "", picture), re.findall(r"<style>(.*?)</style>", picture)[0]
    assert rules.startswith("@media (prefers-color-scheme: dark){")
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", body))
    changed = dict(re.findall(r'\[style\*="fill: (#[0-9a-f]{6})"\]\{fill:(#[0-9a-f]{6})!important\}', rules))
    assert used and used <= changed.keys() and all(light != dark for light, dark in changed.items())
    assert not re.search(r"#0[12]0[12]|<script|var\(|url\(http|xlink:href=\"[^#]", body)
    assert ratios(rows, "NVIDIA Test") == picture


def test_the_command_draws_beside_the_results_and_rewrites_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, text = tmp_path / "some/h200", tmp_path / "docs/text.md"
    root.mkdir(parents=True)
    text.parent.mkdir()
    shutil.copy(PUBLISHED / "bench.json", root)
    text.write_text("before\n<!-- published: headline -->\nold\n<!-- end of published -->\nafter\n")
    assert cli.main(["pictures", "--root", str(root), "--into", str(text)]) == 0
    assert str(root / "ratios.svg") in capsys.readouterr().out and (root / "ratios.svg").exists()
    assert not (root / "rows.svg").exists()
    written = text.read_text()
    assert "](../some/h200/ratios.svg)" in written and "old" not in written
    assert written.startswith("before\n<!--") and written.endswith("-->\nafter\n")
    assert cli.main(["pictures", "--root", str(root), "--into", str(text)]) == 0 and text.read_text() == written


def test_row_counts_beside_the_benchmark_are_drawn_too(tmp_path: Path, rows: tuple[Row, ...]) -> None:
    results = read_results(PUBLISHED / "bench.json")
    assert results is not None
    counted = Results(results.parts, tuple(scaled(rows[3], count) for count in (1, 16)))
    (tmp_path / "rows").mkdir()
    shutil.copy(PUBLISHED / "bench.json", tmp_path)
    (tmp_path / "rows/bench.json").write_text(json.dumps(counted.as_json()))
    text = tmp_path / "text.md"
    text.write_text("<!-- published: rows -->\n<!-- end of published -->\n")
    assert cli.main(["pictures", "--root", str(tmp_path), "--into", str(text)]) == 0
    said = text.read_text()
    assert "](./rows.svg)" in said and without_place(results.parts[0].command) in said and "--out" not in said
    assert "PyTorch is faster at none of them." in said
    assert "768" in (tmp_path / "rows.svg").read_text()


@pytest.mark.parametrize(("arguments", "says"), [
    (["--root", "empty"], "there is no bench.json in empty"), (["--root", "damaged"], "bench.json is no benchmark of this"),
    (["--root", "good", "--into", "nowhere.md"], "nowhere.md"), (["--root", "good", "--into", "odd.md"], "no part 'odd'")])
def test_what_cannot_be_done_is_one_sentence_and_changes_nothing(
        arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "damaged", "good"):
        Path(name).mkdir()
    shutil.copy(PUBLISHED / "bench.json", "good")
    Path("damaged/bench.json").write_text("{]")
    odd = "<!-- published: odd -->\n<!-- end of published -->\n"
    Path("odd.md").write_text(odd)
    assert cli.main(["pictures", *arguments]) in (1, 2)
    said = capsys.readouterr().err.strip()
    assert said.startswith("reports: ") and says in said and "\n" not in said
    assert Path("odd.md").read_text() == odd and not list(tmp_path.glob("**/*.svg"))

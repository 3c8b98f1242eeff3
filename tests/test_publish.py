"""When a run's best.* take the place of an earlier run's, and when those stay."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.limits import Limits, target
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.space import parse_config
from tests.test_records import INFO, MEASURED
from tuner import artifact, publish
from tuner.errors import InputError
from tuner.guess import best_predicted
from tuner.known import Known
from tuner.outcome import TuneResult
from tuner.publish import Folder, why_kept
from tuner.records import Record, RunInfo, Status, write_text
from tuner.validate import GradientError

SHAPE = Shape(4, 4, 8, 16)
H200 = target("sm_90")
PREDICTING = replace(INFO, executor="host", device="host (g++ 12)", measures=False)


def winner(us: float, measured: bool = True) -> Record:
    errors = {name: GradientError(1e-7, 0.5) for name in GRADIENTS}
    return Record(parse_config("row_warp:splits=1,reduction=single_block"), Status.OK, None, us, measured, errors=errors)


def result(us: float | None, info: RunInfo = INFO) -> TuneResult:
    best = None if us is None else winner(us, info.measures)
    return TuneResult(info, Problem.of(SHAPE), H200, () if best is None else (best,), best)


def kept(earlier: RunInfo, before: float, now: RunInfo, us: float | None) -> bool:
    return why_kept(Known(earlier, SHAPE, winner(before, earlier.measures)), result(us, now)) is not None


def test_nothing_is_kept_where_there_is_nothing() -> None:
    assert why_kept(None, result(2.0)) is None
    assert why_kept(None, result(None)) is None


@pytest.mark.parametrize(("us", "stays"), [(1.9, False), (2.0, False), (2.039, False), (2.05, True), (None, True)])
@pytest.mark.parametrize("info", [INFO, PREDICTING])
def test_of_the_same_kind_the_faster_stays(info: RunInfo, us: float | None, stays: bool) -> None:
    assert kept(info, 2.0, info, us) == stays


def test_measured_beats_predicted_whatever_the_times() -> None:
    assert not kept(PREDICTING, 1.0, INFO, 9.0)
    assert kept(INFO, 9.0, PREDICTING, 1.0)
    assert kept(PREDICTING, 1.0, INFO, None)


@pytest.mark.parametrize("change", [{"version": "other"}, {"shape": "4,4,8,32"}, {"wants": "dx"}, {"device": "NVIDIA Other"},
                                    {"deterministic": True}, {"regime": "cold"}, {"target": "sm_80"}, {"accuracy": "tf32"},
                                    {"dtype": "bfloat16", "param_dtype": "bfloat16"}], ids=str)
def test_results_that_cannot_be_compared_go(change: dict[str, object]) -> None:
    assert not kept(replace(INFO, **change), 1.0, INFO, 2.0)  # type: ignore[arg-type]
    assert kept(replace(INFO, **change), 1.0, INFO, None)  # type: ignore[arg-type]


def test_parameters_in_float32_are_another_question() -> None:
    short, mixed = (replace(INFO, dtype="bfloat16", accuracy="bf16", param_dtype=name) for name in ("bfloat16", "float32"))
    assert not kept(mixed, 1.0, short, 2.0) and not kept(short, 1.0, mixed, 2.0)
    assert kept(mixed, 1.0, mixed, 2.0)


def test_another_compiler_of_the_cpu_is_no_other_question() -> None:
    assert kept(replace(PREDICTING, device="host (clang 17)"), 1.0, PREDICTING, 2.0)


def test_the_sentence_names_both() -> None:
    said = why_kept(Known(INFO, SHAPE, winner(2.0)), result(3.0))
    assert said is not None
    assert INFO.date in said and "2.00 us measured" in said and "3.00 us measured" in said


@pytest.mark.parametrize("text", ["{", "[]", '{"run": "x"}', "[" * 100_000])
def test_a_broken_best_json_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    with Folder(tmp_path, INFO) as folder:
        pass
    published = folder.finish(result(2.0), interrupted=False, choose=lambda problem: best_predicted(problem, H200))
    assert published.kept is None and tmp_path / "best.json" in published.written
    assert (tmp_path / "best.json").read_text() != text


def test_the_page_is_left_out_where_there_is_no_time_for_it_and_that_is_said(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(folder: Path) -> tuple[Path, None]:
        write_text(folder / "report.html", "page")
        return folder / "report.html", None

    monkeypatch.setattr(publish, "write_page", draw)
    monkeypatch.delenv("LNL_HTML", raising=False)
    stages: list[str] = []
    for time_left in (True, False):
        with Folder(tmp_path, INFO) as folder:
            published = folder.finish(result(2.0), interrupted=False, choose=lambda problem: best_predicted(problem, H200),
                                      on_stage=stages.append, has_time_for_page=partial(bool, time_left))
        report = (tmp_path / "report.md").read_text()
        assert (tmp_path / "report.html").exists() == (tmp_path / "report.html" in published.written) == time_left
        assert (published.no_page is None) == time_left == ("was left out" not in report)
    assert published.no_page is not None and published.no_page in report
    assert f"python -m reports {tmp_path}" in published.no_page
    writing = "choosing the configs of best.cu"
    assert stages == [writing, "drawing report.html", writing]
    monkeypatch.setenv("LNL_HTML", "off")  # nobody misses what nobody wants
    for time_left in (True, False):
        with Folder(tmp_path, INFO) as folder:
            assert folder.finish(result(2.0), False, lambda problem: best_predicted(problem, H200), stages.append,
                                 partial(bool, time_left)).no_page is None
    assert stages[3:] == [writing, writing]


def test_row_counts_without_a_fit_config_are_said_in_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unfit(at: Problem, config: Config, limits: Limits) -> str | None:
        return "its sums are too long" if at.rows >= 1 << 24 else None

    with Folder(tmp_path / "fit", INFO) as folder:
        folder.finish(result(2.0), interrupted=False, choose=lambda problem: best_predicted(problem, H200))
    monkeypatch.setattr(artifact, "why_unfit", unfit)
    with Folder(tmp_path / "unfit", INFO) as folder:
        folder.finish(result(2.0), interrupted=False, choose=lambda problem: best_predicted(problem, H200))
    for name in ("best.cu", "best.json", "report.md"):
        for kind in ("fit", "unfit"):
            text = " ".join((tmp_path / kind / name).read_text().replace("\n//", " ").split())
            assert ("do not call it with 16777216 rows" in text and "its sums are too long" in text) == (kind == "unfit")


def test_a_kill_at_any_moment_leaves_no_best_json_of_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no word that the run is finished before all is written."""
    seen: list[tuple[str, ...]] = []

    def choose(problem: Problem) -> Config:
        if not seen:
            look()
        return best_predicted(problem, H200)

    def look() -> None:
        finished = bool(json.loads((tmp_path / "trials.jsonl").read_text().splitlines()[0])["finished"])
        names = ("best.cu", "best.h", "best.json", "report.md")
        seen.append((*((tmp_path / name).read_text()[:3] if (tmp_path / name).exists() else "" for name in names), str(finished)))

    def written(path: Path, text: str) -> None:
        write_text(path, "new" + text)
        look()

    for module in (artifact, publish):
        monkeypatch.setattr(module, "write_text", written)
    for name in ("best.cu", "best.h", "best.json", "report.md"):
        (tmp_path / name).write_text("old")
    with Folder(tmp_path, INFO) as folder:
        folder.finish(result(2.0), interrupted=False, choose=choose)
    assert seen == [
        ("old", "old", "old", "old", "False"), ("new", "old", "", "old", "False"), ("new", "new", "", "old", "False"),
        ("new", "new", "new", "old", "False"), ("new", "new", "new", "new", "False")]
    look()
    assert seen[-1][-1] == "True"


def test_what_a_killed_run_was_writing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".trials.jsonl.ab12_xyz", ".best.cu.abcdefgh", ".report.md.12345678", ".best.cu.swp", "best.cu.abcdefgh"):
        (tmp_path / name).touch()
    with Folder(tmp_path, INFO):
        with pytest.raises(InputError, match="another run"):
            Folder(tmp_path, INFO)
        (tmp_path / ".best.h.abcdefgh").touch()
        with pytest.raises(InputError, match="another run"):
            Folder(tmp_path, INFO)
        assert (tmp_path / ".best.h.abcdefgh").exists()
        (tmp_path / ".best.h.abcdefgh").unlink()
    assert {path.name for path in tmp_path.iterdir()} == {".best.cu.swp", "best.cu.abcdefgh", "trials.jsonl"}


@pytest.mark.parametrize("name", ["trials.jsonl", "best.cu", "best.h", "best.json", "report.md", "report.html"])
def test_a_folder_in_a_file_s_place_is_seen_before_the_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"{name} is a folder.*--out"):
        Folder(tmp_path, INFO)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_run_that_may_not_be_resumed_gives_no_hint_to(tmp_path: Path) -> None:
    for may_resume in (True, False):
        with Folder(tmp_path, INFO) as folder:
            folder.add(MEASURED)
        with Folder(tmp_path, INFO, may_resume=may_resume) as folder:
            assert "was not finished" in folder.said and ("--resume" in folder.said) == may_resume

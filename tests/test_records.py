"""Records of a run: they round-trip, are on disk at once, and are never half-written."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.space import make_config
from tests.trials import read_trials
from tuner.errors import CannotWrite, InputError
from tuner.executors import Resources
from tuner.known import read_best
from tuner.records import SCHEMA, Journal, Record, RunInfo, Status, write_text
from tuner.timing.stats import Summary
from tuner.validate import GradientError
from tuner.wording import rows_text

REPORTS = Path(__file__).resolve().parent.parent / "reports"

INFO = RunInfo(
    shape="4,4,8,16", dtype="float32", wants="dx,dw", deterministic=False, eps=1e-5, accuracy="fp32", executor="cuda",
    device="NVIDIA Test", target="sm_90a", seed=3, trials=10, timeout_s=None, date="2026-01-02T03:04:05+00:00",
    command="python -m tuner --shape 4,4,8,16", version="abc", combinations=9, valid=4, refused={"too large": 5})

MEASURED = Record(
    make_config("row_warp"), Status.OK, None, 2.5, True, 2.25, {"dx": GradientError(1e-7, 0.5), "dw": GradientError(2e-7, 0.75)},
    (1, 16, 61), {"row_warp": Resources(40, 1024, 8, 16)},
    {"warm": Summary(2.25, 0.03, 2.24, 2.27, 0.96, 180, 9), "cold": Summary(4.5, 0.1, 4.4, 4.7, 0.96, 180, 9)})
PREDICTED = Record(make_config("row_thread"), Status.NOT_RUN, "not among the best predicted", 12.5)
BROKEN = Record(make_config("row_shared"), Status.WRONG, "dx[0,0]: nan", errors={"dx": GradientError(math.inf, math.inf)})


@pytest.mark.parametrize("record", [MEASURED, PREDICTED, BROKEN], ids=["measured", "predicted", "broken"])
def test_a_record_survives_json(record: Record) -> None:
    text = json.dumps(record.as_json(), allow_nan=False)
    assert Record.from_json(json.loads(text)) == record


def test_where_the_gate_validated_is_kept_apart_and_older_files_do_not_say() -> None:
    record = replace(MEASURED, gate_rows=(13, 33))
    values = json.loads(json.dumps(record.as_json()))
    assert Record.from_json(values) == record
    assert rows_text(record) == "at 1, 16 and 61 rows, and by the gate, on other data, at 13 and 33"
    del values["gate_rows"]
    assert Record.from_json(values) == MEASURED and rows_text(MEASURED) == "at 1, 16 and 61 rows"
    with pytest.raises((TypeError, ValueError)):
        Record.from_json({**values, "gate_rows": ["many"]})


def test_a_record_says_whether_its_time_was_measured() -> None:
    assert MEASURED.as_json()["time"] == {"us": 2.5, "kind": "measured", "final_us": 2.25}
    assert PREDICTED.as_json()["time"]["kind"] == "predicted"
    assert BROKEN.as_json()["time"] is None


def test_the_final_time_ranks() -> None:
    assert MEASURED.best_us == 2.25
    assert replace(MEASURED, final_us=None).best_us == 2.5
    assert BROKEN.best_us == math.inf
    assert MEASURED.worst_bound_ratio == 0.75


def test_records_are_on_disk_before_the_next_candidate(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trials.jsonl"
    journal = Journal(path, INFO)
    assert read_trials(path) == (INFO, [])
    for count, record in enumerate((MEASURED, PREDICTED, BROKEN), start=1):
        journal.add(record)
        assert len(read_trials(path)[1]) == count
    assert read_trials(path)[1] == [MEASURED, PREDICTED, BROKEN]
    journal.close()


def test_the_header_is_the_first_line_and_names_the_schema(tmp_path: Path) -> None:
    Journal(tmp_path / "t.jsonl", INFO).close()
    header = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])
    assert header["schema"] == SCHEMA
    assert header["command"] == INFO.command and header["seed"] == 3 and header["date"] == INFO.date


def test_settling_replaces_the_records(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    journal = Journal(path, INFO)
    journal.add(replace(MEASURED, final_us=None))
    journal.close()
    journal.settle([MEASURED])
    assert read_trials(path) == (INFO, [MEASURED])


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    old = Journal(path, INFO)
    old.add(MEASURED)
    old.close()
    Journal(path, replace(INFO, seed=4)).close()
    assert read_trials(path) == (replace(INFO, seed=4), [])


def test_a_line_cut_off_by_a_crash_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    journal = Journal(path, INFO)
    journal.add(MEASURED)
    journal.close()
    path.write_text(path.read_text() + '{"config":"row_w')
    assert read_trials(path)[1] == [MEASURED]


@pytest.mark.parametrize("header", [{}, {"schema": SCHEMA + 1}])
def test_another_schema_is_refused(header: dict[str, int]) -> None:
    with pytest.raises(InputError, match="schema"):
        RunInfo.from_json(header)


def test_a_header_without_what_came_later_is_read() -> None:
    values = INFO.as_json()
    del values["measures"], values["rates"], values["param_dtype"], values["regime"]
    assert RunInfo.from_json(values) == INFO


def test_parameters_have_the_data_type_of_the_data_unless_it_is_said() -> None:
    assert INFO.param_dtype == "float32"
    half = replace(INFO, dtype="bfloat16", param_dtype="")
    assert half.param_dtype == "bfloat16"
    mixed = replace(half, param_dtype="float32", accuracy="bf16")
    assert RunInfo.from_json(json.loads(json.dumps(mixed.as_json()))) == mixed


def test_published_results_of_earlier_versions_are_read() -> None:
    found = [read_best(path) for path in sorted(REPORTS.glob("*/*/best.json"))]
    assert found and all(known is not None for known in found)


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_where_there_is_no_room_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trials.jsonl"
    journal = Journal(path, INFO)
    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: journal.add(MEASURED), lambda: journal.settle([MEASURED]), lambda: write_text(path, "new")):
        with pytest.raises(CannotWrite) as caught:
            write()
        assert str(caught.value).startswith(f"{path} cannot be written (No space left on device); make room")
        assert caught.value.errno == errno.ENOSPC
    journal.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["trials.jsonl"]


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "best.json"
    write_text(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "second, which cannot be encoded: \udc80")
    assert path.read_text() == "first"
    assert [entry.name for entry in path.parent.iterdir()] == ["best.json"]

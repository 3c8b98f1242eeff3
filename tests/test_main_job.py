"""The main job, from a shape to best.cu without a GPU: what it writes and says, and what it costs."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from codegen.problem import GRADIENTS
from codegen.space import parse_config
from codegen.variants import default_names
from tests.processes import FILES, ROOT, tuner_process
from tests.trials import read_trials
from tuner.calls import configs
from tuner.records import Status
from tuner.tuning import SHORTLIST

UNIT = """
from tuner.executors.host_toolchain import build_runtime, find_compiler
from tuner.store import Store
build_runtime(find_compiler(), Store())
"""
"""What a machine's speed is told by: compiling the host runtime, with a store of its own."""


def children_cpu() -> float:
    """The seconds of CPU of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def unit_of_cpu(store: Path) -> float:
    """Seconds of CPU that this machine takes for UNIT at this hour."""
    before = children_cpu()
    subprocess.run([sys.executable, "-c", UNIT], cwd=ROOT, env={**os.environ, "LNL_STORE": str(store)}, check=True)
    return children_cpu() - before


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, float]:
    """The main job on this machine's CPU with a cold store: its folder, its output, and what CPU it took in units of UNIT."""
    folder = tmp_path_factory.mktemp("main-job")
    unit, before = unit_of_cpu(folder / "first"), children_cpu()
    process = tuner_process("--shape", "4,4,8,16", "--executor", "host", "--out", str(folder / "out"), store=folder / "store")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    taken = children_cpu() - before
    return folder / "out", output, 2 * taken / (unit + unit_of_cpu(folder / "last"))


def test_the_main_job_ends_within_a_minute_on_two_cores(main_job: tuple[Path, str, float]) -> None:
    """Told without a clock, as machines differ, and one machine from hour to hour. Where compiling the runtime takes 3 s,
    30 times that is a minute of two cores, a quarter of which may idle."""
    assert main_job[2] < 30


def test_the_main_job_writes_its_files_and_nothing_else(main_job: tuple[Path, str, float]) -> None:
    folder, output, _ = main_job
    assert {path.name for path in folder.iterdir()} == FILES
    assert all(str(folder / name) in output for name in FILES)


def test_the_main_job_records_every_valid_config(main_job: tuple[Path, str, float]) -> None:
    info, records = read_trials(main_job[0] / "trials.jsonl")
    assert info.command == f"python -m tuner --shape 4,4,8,16 --executor host --out {main_job[0]}"
    assert info.executor == "host" and info.target == "sm_90a"
    assert [record.config for record in records] != configs("4,4,8,16")
    assert {record.config for record in records} == set(configs("4,4,8,16"))
    run = [record for record in records if record.status is not Status.NOT_RUN]
    assert all(record.status is Status.OK for record in run)
    assert SHORTLIST <= len(run) <= SHORTLIST + len(default_names())
    assert {record.config.variant for record in run} == {record.config.variant for record in records}
    assert all(record.time_us and not record.measured for record in records)
    assert all(set(record.errors) == set(GRADIENTS) and 16 in record.rows for record in run)


def test_the_winner_is_the_fastest_validated(main_job: tuple[Path, str, float]) -> None:
    best = json.loads((main_job[0] / "best.json").read_text())
    _, records = read_trials(main_job[0] / "trials.jsonl")
    valid = {str(record.config): record.best_us for record in records if record.status is Status.OK}
    assert best["schema"] == 1
    assert valid[best["winner"]["config"]] == min(valid.values())
    assert set(best["best_by_variant"]) == {record.config.variant for record in records}
    assert str(parse_config(best["winner"]["config"])) in (main_job[0] / "best.cu").read_text()


def test_predicted_times_are_called_predicted(main_job: tuple[Path, str, float]) -> None:
    folder, output, _ = main_job
    for text in (output, (folder / "report.md").read_text()):
        assert "predicted" in text and "us measured" not in text
    for name in ("best.cu", "best.json"):
        assert "predicted" in (folder / name).read_text()


def test_the_report_says_what_a_prediction_rests_on(main_job: tuple[Path, str, float]) -> None:
    report = (main_job[0] / "report.md").read_text()
    assert "table of targets for H200" in report
    assert "| step | predicted us | limited by |" in report
    assert ("(estimate)" in report) == ("are estimates" in report) != ("the device compiler's report" in report)


def test_the_console_shows_the_five_errors_and_the_paths(main_job: tuple[Path, str, float]) -> None:
    lines = main_job[1].splitlines()
    for name in GRADIENTS:
        assert any(name in line.split() and "e-" in line for line in lines), name
    for name in {config.variant for config in configs("4,4,8,16")}:
        assert any(name in line for line in lines)
    config = parse_config(next(line for line in lines if line.startswith("winner: ")).removeprefix("winner: "))
    parameters = " ".join(f"{name}={value}" for name, value in config.params)
    assert any(config.variant in line and parameters in line for line in lines)
    assert re.fullmatch(r"took \d+\.\d s", lines[-1])

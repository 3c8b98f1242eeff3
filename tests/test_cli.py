"""The command lines: exit codes, and one sentence for every mistake of a user."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fake_gpu import FakeGpu, failing_launch, lost_at, rugged
from tests.processes import FILES, ROOT, tuner_process
from tests.trials import read_trials
from tuner import cli
from tuner.calls import configs
from tuner.errors import ToolchainError
from tuner.outcome import TuneResult
from tuner.publish import Folder, Published
from tuner.records import Status
from tuner.store import default_root
from tuner.tuning import SHORTLIST

# --- exit codes and sentences ------------------------------------------------------------------------------------------------


def tuned(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and standard error of a call in this process."""
    try:
        status = cli.main(arguments.split())
    except SystemExit as stop:
        status = int(stop.code or 0)
    return status, capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    ("", "--shape"),
    ("--shape 4,4,8", "four whole numbers"),
    ("--shape -1,4,8,16 --dtype float32", "four whole numbers B,S,H,O such as 4,4,8,16, not '-1,4,8,16'"),
    ("--shape 4,4,0,16", "at least 1"),
    ("--shape 0,4,8,16", "no rows"),
    ("--shape 4,4,8,16 --executor abacus", "invalid choice"),
    ("--shape 4,4,8,16 --executor host --target sm_1", "sm_80"),
    ("--shape 4,4,8,16 --dtype float8", "float32"),
    ("--shape 4,4,8,16 --eps none", "invalid float"),
    ("--shape 4,4,8,16 --eps -1", "positive"),
    ("--shape 4,4,8,16 --variants row_wrap --executor host", "row_warp"),
    ("--shape 4,4,8,16 --wants dz", "dgamma"),
    ("--shape 4,4,8,16 --trials 0", "at least 1"),
    ("--shape 4,4,8,16 --trials few", "invalid int"),
    ("--shape 4,4,8,16 --timeout -3", "more than 0"),
    ("--shape 4,4,8,16 --timeout inf", "finite"),
    ("--shape 4,4,8,16 --timeout nan", "more than 0"),
    ("--shape 4,4,8,16 --seed -1", "from 0"),
    ("--shape 1,1,1000000,1000000", "TiB"),
    ("--shape 4,4,8,16 --turbo", "unrecognized"),
    ("--shape 4,4,8,16 --executor host --out /proc/nowhere", "--out"),
])
def test_usage_errors_are_one_sentence_and_exit_2(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, errors = tuned(arguments, capsys)
    assert status == 2
    assert errors.startswith("tuner: ") and errors.count("\n") == 1
    assert said in errors


def test_p1_a_missing_tool_is_one_sentence_and_exits_1(capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, target: str) -> FakeGpu:
        raise ToolchainError("no nvcc that compiles for sm_90a was found (tried PATH); install a CUDA toolkit")

    monkeypatch.setattr(cli, "open_isolated", missing)
    status, errors = tuned("--shape 4,4,8,16", capsys)
    assert (status, errors.count("\n")) == (1, 1)
    assert "no nvcc" in errors
    with pytest.raises(ToolchainError):
        cli.main(["--shape", "4,4,8,16", "--debug"])


def test_without_pycuda_the_gpu_is_refused_with_what_to_install(capsys: pytest.CaptureFixture[str],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    status, errors = tuned("--shape 4,4,8,16 --executor cuda", capsys)
    assert (status, errors.count("\n")) == (1, 1)
    assert "PyCUDA" in errors and "cuda" in errors and "install" in errors


def test_too_little_memory_is_one_sentence_and_exits_1(capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(name: str, target: str) -> FakeGpu:
        raise MemoryError("Unable to allocate 1.00 TiB for an array with shape (500000, 500000)")

    monkeypatch.setattr(cli, "open_isolated", allocate)
    status, errors = tuned("--shape 4,4,8,16", capsys)
    assert (status, errors.count("\n")) == (1, 1)
    assert errors.startswith("tuner: ") and "1.00 TiB" in errors


def test_a_target_beside_a_gpu_is_said_to_be_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: FakeGpu())
    command = f"--shape 4,4,8,16 --variants row_thread --out {tmp_path}"
    status, errors = tuned(f"{command} --target sm_80", capsys)
    assert status == 0 and "--target is ignored" in errors and "NVIDIA Test" in errors
    assert "--target" not in tuned(command, capsys)[1]


def test_the_executor_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: gpu)
    cli.main(["--shape", "4,4,8,16", "--variants", "row_thread", "--out", str(tmp_path)])
    assert gpu.closed == 1


def test_no_valid_kernel_exits_1_and_leaves_no_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(kernels=dict.fromkeys(configs("4,4,8,16", variants=["row_thread"]), failing_launch))
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: gpu)
    status, errors = tuned(f"--shape 4,4,8,16 --variants row_thread --out {tmp_path}", capsys)
    assert status == 1
    assert errors.splitlines()[-1].startswith("tuner: no valid kernel")
    assert {path.name for path in tmp_path.iterdir()} == {"trials.jsonl", "report.md"}
    assert "launch error" in (tmp_path / "report.md").read_text()


def test_a_disk_that_fills_up_is_one_sentence_that_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    room = iter(range(3))  # the header and two records

    def fsync(descriptor: int) -> None:
        if next(room, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cli, "open_isolated", lambda name, target: FakeGpu())
    monkeypatch.setattr(os, "fsync", fsync)
    status, errors = tuned(f"--shape 4,4,8,16 --variants row_thread --out {tmp_path}", capsys)
    assert status == 1
    assert errors.splitlines()[-1].startswith(f"tuner: {tmp_path / 'trials.jsonl'} cannot be written (No space left on device);")


def test_results_of_an_earlier_run_stay_unless_this_one_is_as_good(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """What is better and what is kept: tests/test_publish.py. Here, that the console and the report say so."""
    gpu = FakeGpu()
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: gpu)
    command = ["--shape", "4,4,8,16", "--variants", "row_thread", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "stay" not in capsys.readouterr().out
    gpu.times = lambda config: 1.5 * rugged(config)
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in FILES if before[name] == after[name]} == {"best.cu", "best.h", "best.json"}
    sentence = next(line for line in said.splitlines() if "stay" in line)
    assert sentence in (tmp_path / "report.md").read_text()
    written = next(line for line in said.splitlines() if line.startswith("written: "))
    assert "trials.jsonl" in written and "best.cu" not in written


def test_a_lost_gpu_is_said_and_the_best_so_far_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs for other row counts are then validated on the CPU."""
    lost = lost_at(lambda gpu, config: len(gpu.timed) == 10)
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: lost)
    status, errors = tuned(f"--shape 4,4,8,16 --variants row_warp --out {tmp_path}", capsys)
    assert status == 0
    assert "the GPU was lost after row_warp:" in errors.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == FILES
    report = (tmp_path / "report.md").read_text()
    assert "The GPU was lost after row_warp:" in report


def test_a_shape_no_variant_can_run_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, errors = tuned(f"--shape 1,4,4096,4096 --variants row_shared --executor host --out {tmp_path}", capsys)
    assert status == 1
    assert "shared memory" in errors.splitlines()[-1]


def test_the_report_counts_what_was_tried_and_says_what_its_figures_rest_on(tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: FakeGpu())
    assert cli.main(["--shape", "4,4,8,16", "--variants", "row_warp", "--trials", "30", "--out", str(tmp_path)]) == 0
    info, records = read_trials(tmp_path / "trials.jsonl")
    report = (tmp_path / "report.md").read_text()
    assert not any(record.status is Status.REFUSED for record in records)
    assert f"30 of those passed every test, {info.valid - 30} were not run" in report
    assert "| refused |" not in report
    assert "measured on this GPU" in report


def test_measured_times_are_called_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: FakeGpu())
    assert cli.main(["--shape", "4,4,8,16", "--variants", "row_thread", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "measured" in output and "predicted" not in output
    assert "predicted" not in (tmp_path / "report.md").read_text()


def test_the_default_folder_names_device_shape_and_type(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LNL_REPORTS", raising=False)
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: FakeGpu())
    for extra, name in (("", ""), (" --deterministic", "-deterministic"), (" --wants dx,db", "-dx-db")):
        assert tuned(f"--shape 4,4,8,16 --variants row_thread{extra}", capsys)[0] == 0
        assert (tmp_path / "reports" / "test" / f"4x4x8x16-float32{name}" / "best.cu").exists()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=lambda ending: ending.name)
def test_p2_an_interrupt_exits_130_and_keeps_what_was_finished(ending: signal.Signals, tmp_path: Path) -> None:
    """SIGINT goes to the compilers too, as it does from a terminal; SIGTERM to the run alone, as `timeout` sends it."""
    process = tuner_process("--shape", "32,16,64,64", "--executor", "host", "--variants", "row_warp,row_thread", "--out",
                            str(tmp_path / "out"), store=tmp_path / "store")
    trials = tmp_path / "out" / "trials.jsonl"
    deadline = time.monotonic() + 120
    while not (trials.exists() and trials.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if ending == signal.SIGINT:
        os.killpg(process.pid, ending)
    else:
        process.send_signal(ending)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors and "interrupted; what was finished is being written" in errors
    _, records = read_trials(trials)
    assert 2 <= len(records) < SHORTLIST
    assert all(record.status is Status.OK for record in records)
    assert {path.name for path in trials.parent.iterdir()} == FILES
    assert "interrupted" in (trials.parent / "report.md").read_text()


def test_an_interrupt_while_results_are_written_lets_them_become_whole(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "open_isolated", lambda name, target: FakeGpu())
    finish = Folder.finish

    def interrupted_finish(self: Folder, result: TuneResult, *others: Any) -> Published:
        signal.raise_signal(signal.SIGINT)
        return finish(self, result, *others)

    monkeypatch.setattr(Folder, "finish", interrupted_finish)
    status, errors = tuned("--shape 4,4,8,16 --variants row_thread --out out", capsys)
    assert status == 130 and "what was finished is written" in errors
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES


@pytest.mark.parametrize("module", ["tuner", "codegen"])
def test_help_is_quick_and_loads_nothing_heavy(module: str) -> None:
    code = (f"import runpy, sys; sys.argv = ['{module}', '--help']\n"
            f"try: runpy.run_module('{module}', run_name='__main__', alter_sys=True)\n"
            "except SystemExit: print(sorted({'optuna', 'pycuda', 'cuda', 'torch'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")
    assert "usage" in done.stdout


@pytest.mark.parametrize(("words", "status"), [(["-m", "tuner"], 130), (["-c", "import tuner"], -signal.SIGINT)])
def test_an_interrupt_while_libraries_are_imported(words: list[str], status: int, tmp_path: Path) -> None:
    """As a program it ends without a word; whoever imports the package has the exception."""
    # Programs that a shell has started in the background ignore interrupts, unless they say otherwise.
    (tmp_path / "numpy.py").write_text("import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
                                       "signal.raise_signal(signal.SIGINT)\n")
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True)
    assert done.returncode == status and (status == 130) == (done.stderr == "")


def test_an_empty_folder_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--shape", "4,4,8,16", "--out", ""])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and "names no folder" in said


def test_no_variant_at_all_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = tuned("--shape 4,4,8,16 --executor host --variants ,", capsys)
    assert status == 2 and "at least one" in said


def test_a_store_named_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LNL_STORE", "store")
    assert default_root() == tmp_path / "store"

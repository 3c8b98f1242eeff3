"""The benchmark from its command line to its two files, on a GPU and against peers that are made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.problem import GRADIENTS, Shape
from codegen.space import parse_config
from tests.fake_bench import FakeArena, FakePeer, RatedGpu
from tests.fake_gpu import failing_launch
from tuner import cli
from tuner.bench import cli as bench_cli
from tuner.bench.ours import Tuning
from tuner.bench.torch_gpu import PeerFailed
from tuner.errors import DeviceLost, ToolchainError
from tuner.executors import Executor
from tuner.inputs import Inputs
from tuner.tuning import Request, TuningRun
from tuner.wisdom.recall import remember

SEED = Shape(4, 4, 8, 16)
SMALL = "seed 4,4,8,16\nother 1,9,8,4\n"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs the command line on a made-up GPU, two small shapes and few trials, and writes below tmp_path/out."""
    shapes = tmp_path / "shapes"
    shapes.write_text(SMALL)
    monkeypatch.setenv("LNL_REPORTS", str(tmp_path / "reports"))
    monkeypatch.setenv("LNL_WISDOM", str(tmp_path / "wisdom"))
    request = Tuning.request  # the space of one variant is looked through fast
    monkeypatch.setattr(Tuning, "request", lambda tuning, case: replace(request(tuning, case), variants=("row_thread",)))

    def run(*arguments: str, gpu: Executor | None = None, arena: FakeArena | None = None) -> int:
        monkeypatch.setattr(bench_cli, "open_gpu", lambda: gpu or RatedGpu())
        if arena is None:
            monkeypatch.setattr(bench_cli, "open_torch", without_torch)
        else:
            monkeypatch.setattr(bench_cli, "open_torch", lambda: SimpleNamespace(versions={}, matrix_tflops=lambda: 800.0))
            monkeypatch.setattr(bench_cli, "TorchArena", lambda torch, l2_bytes: arena)
        return cli.main(["bench", "--shapes", str(shapes), "--trials", "2", "--samples", "5", "--out", str(tmp_path / "out"),
                         *arguments])

    return run


def without_torch() -> Any:
    raise ToolchainError("PyTorch cannot be used (there is none)")


def found(tmp_path: Path) -> tuple[dict[str, Any], str]:
    """bench.json and bench.md."""
    folder = tmp_path / "out"
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.md"]
    return json.loads((folder / "bench.json").read_text()), (folder / "bench.md").read_text()


def test_every_shape_is_tuned_timed_and_compared(bench: Callable[..., int], tmp_path: Path) -> None:
    # Among equal times the kernel of fewest launches wins; here one that needs several is faster.
    gpu, arena = RatedGpu(times=lambda config: 20.0 if config["reduction"] == "single_block" else 10.0), FakeArena()
    assert bench(gpu=gpu, arena=arena) == 0
    values, page = found(tmp_path)
    assert values["schema"] == 2
    assert values["parts"][0]["device"] == "NVIDIA Test" and "bench --shapes" in values["parts"][0]["command"]
    assert values["parts"][0]["rates"] == {"copy_tbps": 4.0, "launch_us": 0.5, "matrix_tflops": 800.0}
    first, second = values["rows"]
    assert (first["name"], second["name"], second["shape"]) == ("seed", "other", "1,9,8,4")
    assert first["origin"] == "tuned" and parse_config(first["config"]) in gpu.timed
    assert first["ours"]["warm"]["median"] == 10.0 and first["ours"]["cold"]["median"] == 100.0
    assert first["ours"]["errors"] == dict.fromkeys(GRADIENTS, 3e-7) and first["judge"] == "timed"
    assert list(first["peers"]) == ["eager", "compile", "gemms"]
    assert first["best_peer"] == "compile" and first["ratio"] == 2.0  # the two products alone do not count as a peer
    assert first["share"] == 0.05
    assert " more launch" in first["gap"] and first["gap"].endswith(" of 9.50 us") and f"* seed: {first['gap']}" in page
    assert first["peers"]["gemms"]["errors"] == {}
    assert "| seed | 4,4,8,16 | 10.00 (0.00) | compile | 2.00 | 30.00 | 20.00 | 5.00 |" in page
    assert arena.released == 2 and gpu.closed >= 2


def test_data_of_the_timing_is_of_the_asked_type_and_the_seed(bench: Callable[..., int], tmp_path: Path) -> None:
    arena = FakeArena()
    assert bench("--seed", "4", arena=arena) == 0
    again = FakeArena()
    assert bench("--seed", "4", arena=again) == 0
    other = FakeArena()
    assert bench("--seed", "5", arena=other) == 0
    first, repeated, different = (seen.seen[0][1] for seen in (arena, again, other))
    assert first.x.shape == (16, 8) and first.dtype == "float32"
    assert (first.x == repeated.x).all() and not (first.x == different.x).all()


def test_without_pytorch_the_word_stands_in_the_page(bench: Callable[..., int], tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert bench() == 0
    values, page = found(tmp_path)
    assert values["parts"][0]["absent"] == "PyTorch cannot be used (there is none)"
    assert "**No peers: PyTorch cannot be used (there is none).**" in page
    assert "no peers: PyTorch" in capsys.readouterr().err
    row = values["rows"][0]
    assert row["peers"] == {} and row["ratio"] is None and row["floor"]["matrix_us"] is None
    assert row["judge"] == "validation" and set(row["ours"]["errors"]) == set(GRADIENTS)
    assert "e-0" in page.split("†")[1].splitlines()[-1]


def test_peers_none_asks_for_none(bench: Callable[..., int], tmp_path: Path) -> None:
    assert bench("--peers", "none") == 0
    values, page = found(tmp_path)
    assert values["parts"][0]["absent"] is None and "No peers" not in page


def test_a_second_measurement_gives_the_noise(bench: Callable[..., int], tmp_path: Path) -> None:
    arena = FakeArena(lambda name, inputs: FakePeer(name, inputs, 20.0, later=1.1))
    assert bench(arena=arena, gpu=RatedGpu()) == 0
    spread = found(tmp_path)[0]["rows"][0]["peers"]["eager"]["warm"]
    assert spread["noise"] == pytest.approx(0.1) and spread["samples"] == 10 and spread["iqr"] == pytest.approx(2.0)


def test_a_peer_that_fails_is_a_note_and_the_others_are_measured(bench: Callable[..., int], tmp_path: Path) -> None:
    def make(name: str, inputs: Inputs) -> FakePeer:
        return FakePeer(name, inputs, 7.0, failure=PeerFailed("eager: CUDA out of memory") if name == "eager" else None)

    assert bench(arena=FakeArena(make, failed={"compile": "compile: no C compiler"})) == 0
    values, page = found(tmp_path)
    peers = values["rows"][0]["peers"]
    assert peers["eager"] == {"warm": None, "cold": None, "errors": {}, "note": "eager: CUDA out of memory"}
    assert peers["compile"]["note"] == "compile: no C compiler"
    assert peers["gemms"]["warm"]["median"] == 7.0
    assert "* seed, eager: eager: CUDA out of memory" in page


def test_a_shape_without_a_valid_kernel_is_a_row_with_its_reason(bench: Callable[..., int], tmp_path: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    class Half(RatedGpu):
        def compile(self, source: Any) -> Any:
            program = super().compile(source)
            if source.problem.out == 16:
                program.run = lambda inputs, wants, **_: failing_launch(inputs, wants)  # type: ignore[method-assign]
            return program

    assert bench(gpu=Half(), arena=FakeArena()) == 1
    first, second = found(tmp_path)[0]["rows"]
    assert "too many resources requested" in first["reason"] and first["ours"]["warm"] is None and first["config"] is None
    assert first["peers"]["compile"]["warm"]["median"] == 20.0  # measured all the same
    assert second["reason"] is None and second["ours"]["warm"] is not None
    assert "1 of 2 rows have no time of ours, the first seed float32" in capsys.readouterr().err


def test_a_lost_gpu_ends_the_run_and_keeps_what_is_finished(bench: Callable[..., int], tmp_path: Path) -> None:
    def lose(inputs: Inputs, wants: frozenset[str], **_: float) -> Any:
        raise DeviceLost("the kernel failed and took the process's GPU context with it")

    class Dying(RatedGpu):
        def compile(self, source: Any) -> Any:
            program = super().compile(source)
            if source.problem.out == 4:
                program.run = lose  # type: ignore[method-assign]
            return program

    assert bench("--dtypes", "float32,bfloat16", gpu=Dying(), arena=FakeArena()) == 1
    values, page = found(tmp_path)
    first, second = values["rows"]  # and not those of bfloat16
    assert first["reason"] is None and first["ours"]["warm"] is not None
    assert "GPU context" in second["reason"] and second["peers"] == {}
    assert "**2 of 4 rows are finished.**" in page


def test_an_interrupted_run_keeps_its_rows(bench: Callable[..., int], tmp_path: Path) -> None:
    def make(name: str, inputs: Inputs) -> FakePeer:
        if inputs.out == 4:
            raise KeyboardInterrupt
        return FakePeer(name, inputs, 7.0)

    assert bench(arena=FakeArena(make)) == 130
    values, page = found(tmp_path)
    assert [row["name"] for row in values["rows"]] == ["seed"]
    assert "**1 of 2 rows are finished.**" in page


def publish(gpu: Executor, shape: Shape = SEED) -> str:
    """What a tuning run leaves for a shape; the winner's config."""
    run = TuningRun(Request(shape, variants=("row_thread",), trials=2), gpu)
    run.execute()
    result = run.result()
    remember(result)
    assert result.winner is not None
    return str(result.winner.config)


def test_a_known_kernel_is_validated_and_used(bench: Callable[..., int], tmp_path: Path) -> None:
    config = publish(RatedGpu(times=lambda config: 10.0))
    gpu = RatedGpu(times=lambda config: 10.0)
    assert bench(gpu=gpu) == 0
    first, second = found(tmp_path)[0]["rows"]
    assert (first["origin"], first["config"]) == ("known", config) and set(gpu.compiled[:1]) == {parse_config(config)}
    assert second["origin"] == "tuned"  # nobody knows one for this shape
    assert bench("--tune", gpu=gpu) == 0
    assert found(tmp_path)[0]["rows"][0]["origin"] == "tuned"


def test_a_kernel_tuned_for_other_row_counts_is_not_taken_for_the_best(bench: Callable[..., int], tmp_path: Path) -> None:
    publish(RatedGpu(), Shape(4, 5, 8, 16))
    assert bench() == 0
    assert found(tmp_path)[0]["rows"][0]["origin"] == "tuned"


def test_a_known_kernel_that_is_wrong_by_now_is_not_used(bench: Callable[..., int], tmp_path: Path) -> None:
    config = parse_config(publish(RatedGpu()))
    gpu = RatedGpu(kernels={config: failing_launch})
    assert bench(gpu=gpu) == 0
    row = found(tmp_path)[0]["rows"][0]
    assert row["origin"] == "tuned" and row["config"] != str(config)


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--shapes", "huge"], "'huge' is no shape, no name of one, and there is no file 'huge'"),
    (["--shapes", "0,4,8,16"], "the shape 0,4,8,16 has no rows"),
    (["--shapes", "4,4,0,16"], "hidden and out must be at least 1, not 0 and 16"),
    (["--accuracy", ""], "no accuracy class is left"),
    (["--peers", ""], "no peer is left"),
    (["--peers", "none,eager"], "none stands alone, not beside other peers as in 'none,eager'"),
    (["--tune-seconds", "0"], "--tune-seconds must be more than 0 and finite, not 0"),
    (["--tune-seconds", "nan"], "--tune-seconds must be more than 0 and finite, not nan"),
    (["--seed", "-1"], "the seed must be a whole number from 0, not -1"),
    (["--dtypes", "float64"], "dtype 'float64' is not supported"),
    (["--dtypes", ""], "no data type is left"),
    (["--accuracy", "fp8"], "there is no accuracy class 'fp8'"),
    (["--accuracy", "tf32", "--dtypes", "bfloat16"], "--accuracy is for float32 data"),
    (["--peers", "eager,jax"], "there is no peer 'jax'; choose from eager, compile, gemms, or none"),
    (["--samples", "0"], "the number of samples must be at least 1, not 0"),
    (["--trials", "0"], "the number of trials must be at least 1"),
    (["--tune-seconds", "-1"], "--tune-seconds must be more than 0 and finite, not -1"),
])
def test_mistakes_are_one_sentence(bench: Callable[..., int], arguments: Sequence[str], sentence: str, tmp_path: Path,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: ") and sentence in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_unknown_option_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--fast"])
    assert ended.value.code == 2 and capsys.readouterr().err == "bench: unrecognized arguments: --fast\n"


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    assert cli.main(["bench", "--shapes", "seed"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bench: ") and "without a GPU there is nothing to measure" in error and error.count("\n") == 1


def test_classes_are_for_float32_and_sections_of_their_own(bench: Callable[..., int], tmp_path: Path) -> None:
    assert bench("--dtypes", "float32,bfloat16", "--accuracy", "fp32,tf32", arena=FakeArena()) in (0, 1)
    values, page = found(tmp_path)
    settings = [(row["name"], row["dtype"], row["accuracy"]) for row in values["rows"]]
    assert settings == [(name, *setting) for setting in (("float32", "fp32"), ("float32", "tf32"), ("bfloat16", "bf16"))
                        for name in ("seed", "other")]
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        "## float32, class fp32", "## float32, class tf32", "## bfloat16, class bf16"]

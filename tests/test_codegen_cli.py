"""`python -m codegen`: what it prints, and mistakes are one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import codegen.__main__ as codegen_cli
from codegen.limits import target
from codegen.problem import Problem, Shape
from codegen.variants import VARIANTS
from tests.configs import config_with, first_dtype

ROOT = Path(__file__).resolve().parent.parent


def generated(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        status = codegen_cli.main(arguments.split())
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_codegen_lists_every_variant_and_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    status, output, errors = generated("--list", capsys)
    assert (status, errors) == (0, "")
    for variant in VARIANTS.values():
        assert f"{variant.name}:" in output
        assert all(f"    {name}: " in output for name in variant.choices)


@pytest.mark.parametrize("name", VARIANTS)
def test_codegen_prints_cuda(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    dtype = first_dtype(name)
    some = ((shape, config_with(Problem.of(Shape.parse(shape), dtype=dtype), target("sm_90"), name, str(reduction)))
            for shape in ("4,4,8,16", "1,8,256,256", "1,256,256,256") for reduction in VARIANTS[name].choices["reduction"])
    shape, config = next((shape, config) for shape, config in some if config is not None)
    settings = " ".join(f"{parameter}={value}" for parameter, value in config.params)
    status, output, errors = generated(f"--variant {name} --shape {shape} --dtype {dtype} --set {settings}", capsys)
    assert (status, errors) == (0, "")
    assert "__global__" in output and output.endswith("}\n")


def test_codegen_sets_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = generated("--variant row_warp --shape 4,4,64,16 --set warps=8 vector=2 --set rows=4", capsys)
    assert "row_warp:warps=8,rows=4,vector=2," in output


def test_codegen_takes_gradients_with_spaces_between_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert codegen_cli.main(["--variant", "row_warp", "--shape", "4,4,8,16", "--wants", "dx, dw"]) == 0
    assert "WANT_DW = true" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [
    ("", "--list"),
    ("--variant row_warp", "--shape"),
    ("--variant row_wrap --shape 4,4,8,16", "row_warp"),
    ("--variant row_warp --shape 4,4,8", "four whole numbers"),
    ("--shape -1,4,8,16 --variant row_warp", "four whole numbers"),
    ("--variant row_warp --shape 4,4,8,16 --set warps=3", "1, 2, 4, 8"),
    ("--variant row_warp --shape 4,4,8,16 --set warps", "name=value"),
    ("--variant row_warp --shape 4,4,8,16 --set turbo=1", "no parameter"),
    ("--variant row_warp --shape 4,4,7,16 --set vector=2", "does not divide"),
    ("--variant row_warp --shape 4,4,8,16 --wants dz", "dgamma"),
    ("--variant row_warp --shape 4,4,8,16 --dtype int8", "float32"),
    ("--variant row_warp --shape 4,4,8,16 --target sm_1", "sm_90"),
    ("--variants row_warp", "unrecognized"),
])
def test_codegen_mistakes_are_one_sentence_and_exit_2(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, errors = generated(arguments, capsys)
    assert (status, output) == (2, "")
    assert errors.startswith("codegen: ") and errors.count("\n") == 1
    assert said in errors


def test_codegen_that_cannot_write_says_so() -> None:
    command = [sys.executable, "-m", "codegen", "--variant", "row_warp", "--shape", "4,4,8,16"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "cannot write" in done.stderr

"""README says what the published results measured, links what is there, and its commands and programs work as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from codegen.problem import Problem, Shape
from reports.readme import BEGIN, END, PARTS, RATIOS_SVG, ROWS, ROWS_COMMAND, ROWS_SVG, rewritten, write_pictures
from reports.words import LEVEL
from tests.artifact_cases import SINGLE_BLOCK, one
from tests.host_artifact import CUDART, FLAGS
from tests.test_artifact_on_gpu import Gpu
from tuner.bench import cli as bench
from tuner.bench.shapes import parse_shapes
from tuner.errors import InputError
from tuner.executors.host_toolchain import build_runtime, find_compiler
from tuner.store import Store
from tuner.toolchain import find_nvcc

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "reports/h200"
README = ROOT / "README.md"
TEXTS = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")), *sorted(ROOT.glob("docs/*.md"))]
WHAT_TO_DO = "python -m reports pictures --into README.md"


def own_words(text: str) -> str:
    """What is typed by hand."""
    return re.sub(f"{BEGIN.pattern}.*?{re.escape(END)}", "", text, flags=re.DOTALL)


def test_every_part_is_that_of_the_published_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert {begin[1] for begin in BEGIN.finditer(text)} == set(PARTS)
    assert rewritten(text, PUBLISHED, "reports/h200") == text, f"run {WHAT_TO_DO}"


def test_no_time_and_no_ratio_is_typed_by_hand() -> None:
    assert not re.findall(r"[0-9.]+ (?:us|times|%)", own_words(README.read_text(encoding="utf-8")))


def test_the_pictures_are_those_of_the_published_results(tmp_path: Path) -> None:
    """By all the words in them; how Matplotlib draws changes from one version to the next."""
    (tmp_path / ROWS).mkdir()
    for name in ("bench.json", f"{ROWS}/bench.json"):
        if (PUBLISHED / name).exists():
            (tmp_path / name).write_bytes((PUBLISHED / name).read_bytes())
    written = write_pictures(tmp_path)
    assert {path.name for path in written} == {path.name for path in PUBLISHED.glob("*.svg")} <= {RATIOS_SVG, ROWS_SVG}
    for path in written:
        drawn, published = (re.findall(r">([^<>]+)<", one.read_text(encoding="utf-8")) for one in (path, PUBLISHED / path.name))
        assert drawn == published, f"run {WHAT_TO_DO}"


@pytest.mark.parametrize(("text", "says"), [
    ("<!-- published: table -->\n<!-- end of published -->\n", "no part 'table'; choose from headline"),
    ("<!-- published: tables -->\n", "no line '<!-- end of published -->' follows"),
    ("<!-- published: banner nowhere -->\n<!-- end of published -->\n", "nowhere/best.cu cannot be read")])
def test_a_part_that_cannot_be_written_is_a_sentence(text: str, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        rewritten(text, PUBLISHED, "reports/h200")


def test_what_is_slower_and_what_is_missing_is_said(tmp_path: Path) -> None:
    values = json.loads((PUBLISHED / "bench.json").read_text(encoding="utf-8"))
    fast, slow = ([row for row in values["rows"] if row["dtype"] == dtype][:3] for dtype in ("float32", "bfloat16"))
    for row in (*fast, *slow):
        row["ours"]["warm"]["median"] = row["peers"][row["best_peer"]]["warm"]["median"] * (0.5 if row in fast else 1.25)
    slow[2]["ours"]["warm"]["noise"] = 0.3
    fast[1]["ours"]["warm"] = None
    values["rows"] = [*fast, *slow]
    for part in values["parts"]:
        part["asked"] = []
    values["parts"][0]["asked"] = ["other float32, class fp32", "other float32, class tf32"]
    (tmp_path / "bench.json").write_text(json.dumps(values))
    text = "".join(f"<!-- published: {name} -->\n{END}" for name in ("headline", "honest"))
    said = rewritten(text, tmp_path, "folder")
    assert "in float32 on 2 of 2 shapes (2.00 to 2.00 times as fast)" in said
    assert "in bfloat16 on 0 of 3 shapes, level on 1 and slower on 2 (0.80 to 0.80 times as fast)" in said
    first, second, third = (f"`{row['name']}` (0.80)" for row in slow)
    assert f"PyTorch is faster in bfloat16 at {first} and {second}." in said
    assert f"Level with PyTorch in bfloat16 at {third}: {LEVEL}." in said
    missing = f"in float32 at `{fast[1]['name']}` and `other`, and in float32, class tf32 at `other`"
    assert f"Nothing is known {missing}: the run did not come to it, or found no kernel." in said


def anchors(path: Path) -> set[str]:
    """What links to headings of a text are called, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), f"{path.name} links {target}"
        assert not anchor or anchor in anchors(linked), f"{path.name} links {target}"


def test_the_command_that_measures_row_counts_is_one() -> None:
    options = bench._parser().parse_args(ROWS_COMMAND.removeprefix("python -m tuner bench ").split())
    assert [named.shape.rows for named in parse_shapes(options.shapes)] == [4**power for power in range(9)]


@pytest.fixture
def two_kernels(tmp_path: Path) -> Path:
    """The program with two kernels, and what it includes."""
    (program,) = re.findall(r"```cpp\n(#include.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "main.cu").write_text(program)
    for name, sizes in (("qkv", "1,9,8,16"), ("mlp", "1,9,16,8")):
        made = one(SINGLE_BLOCK, Problem.of(Shape.parse(sizes)))
        (folder := tmp_path / name).mkdir()
        (folder / "best.cu").write_text(made.cu)
        (folder / "best.h").write_text(made.header)
    return tmp_path


def build(folder: Path, arch: str) -> Path:
    """Builds the program by the commands that stand below it, for that architecture."""
    commands = re.findall(r"^    nvcc (.*)$", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        words = command.replace("sm_90a", arch).replace("compute_90a", arch.replace("sm_", "compute_")).split()
        done = subprocess.run([str(find_nvcc(arch).path), *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "main"


def test_nvcc_builds_the_program_with_two_kernels_by_the_commands_below_it(two_kernels: Path) -> None:
    assert build(two_kernels, "sm_90a").exists()


@pytest.mark.cuda
def test_the_program_with_two_kernels_runs_on_a_gpu(two_kernels: Path) -> None:
    with closing(Gpu()) as gpu:
        program = build(two_kernels, gpu.arch)
        done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_the_program_with_two_kernels_runs(store: Store, two_kernels: Path) -> None:
    """On the CPU, with the host's part of the CUDA runtime."""
    compiler = find_compiler()
    runtime = build_runtime(compiler, store)
    (two_kernels / "cuda_runtime.h").write_text(CUDART.read_text(encoding="utf-8"))
    flags = (*FLAGS, "-I", str(runtime.folder))
    for name in ("qkv", "mlp"):
        compiler.run([*flags, f"-DLNL_NAME={name}", "-c", f"{name}/best.cu", "-o", f"{name}.o"], two_kernels, name)
    functions_for_tests = "-Wl,--allow-multiple-definition"  # of the host's cuda_runtime.h, in each of the three
    compiler.run([*flags, functions_for_tests, "main.cu", "-x", "none", "qkv.o", "mlp.o", str(runtime.library), "-o", "main"],
                 two_kernels, "main")
    environment = {**os.environ, "LD_PRELOAD": str(runtime.library)}
    done = subprocess.run([str(two_kernels / "main")], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr

"""What promotion is worth: how errors of products grow with the depth after which sums leave the tensor cores, by mma or wgmma.

    python -m tuner.bench.promotion [--depth 12288] [--hidden 512] [--out DIR]

measures, on the GPU, both products at that depth: dx, whose dn = dy @ w sums over O, and dw, whose G = dy^T @ xhat sums over the
rows; rows and O are both the depth. Errors are relative Frobenius errors against float64 on the very data. PyTorch's float32, the
last row, shows what users are used to. Writes promotion.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from pathlib import Path

from codegen.arithmetic import FINEST_CLASS
from codegen.config import Config, Value
from codegen.limits import Limits
from codegen.problem import Problem, Shape
from codegen.render import render
from codegen.space import make_config, nearest_runnable
from codegen.variants import VARIANTS
from tuner.arguments import OK, Parser, exit_status
from tuner.bench.arena import Judging
from tuner.bench.cli import open_gpu
from tuner.bench.errors import Judge
from tuner.bench.peers import Tensors, eager
from tuner.bench.torch_gpu import Torch, open_torch
from tuner.executors import Executor
from tuner.inputs import Inputs, random_inputs
from tuner.known import reports_folder
from tuner.pipeline import workers
from tuner.provenance import now, version
from tuner.records import write_text

SHOWN = ("dx", "dw")
MEASURED = ("gemm_mma", "gemm_wgmma")
"""The variants with a depth of promotion. The second runs on Hopper alone."""
PEER = "PyTorch float32"

Errors = Mapping[str, float]
"""By gradient."""

Way = tuple[str, str]
"""A variant and its arithmetic."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line, given its arguments, and returns the exit status: 0, or 1 without a GPU or PyTorch, 2 for usage."""
    parser = Parser(prog="promotion", allow_abbrev=False, description="Errors of products by arithmetic and depth of promotion.")
    parser.add_argument("--depth", type=int, default=12288, metavar="N", help="rows and O (default 12288)")
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="H (default 512)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default reports/<device>)")
    options = parser.parse_args(arguments)
    return exit_status("promotion", lambda: _run(options))


def configs(problem: Problem, limits: Limits) -> dict[tuple[Way, int], Config]:
    """A config that can run for each variant, arithmetic of class fp32 and depth between promotions, 0 for never; those that
    cannot be are left out."""
    found: dict[tuple[Way, int], Config] = {}
    for name in MEASURED:
        choices, defaults = VARIANTS[name].choices, VARIANTS[name].defaults
        arithmetics = [str(value) for value in choices["arithmetic"] if FINEST_CLASS[str(value)] == "fp32"]
        for arithmetic, promote in product(arithmetics, sorted(map(int, choices["promote"]), key=_depth)):
            values: dict[str, Value] = {"arithmetic": arithmetic, "promote": promote, "reduction": "direct", "parts": 1}
            config = nearest_runnable(problem, make_config(name, {**defaults, **values}), limits, tuple(values))
            if config is not None:
                found[(name, arithmetic), promote] = config
    return found


def measure(executor: Executor, judge: Judging, inputs: Inputs) -> dict[tuple[Way, int], Errors]:
    """The errors of each config.

    Raises:
        CompileError, LaunchError: one of them does not compile or run.
    """
    problem = Problem(inputs.rows, inputs.hidden, inputs.out, wants=frozenset(SHOWN))
    chosen = configs(problem, executor.limits)
    with ThreadPoolExecutor(workers()) as pool:
        programs = pool.map(lambda config: executor.compile(render(problem, config)), chosen.values())
        return {key: judge.errors(program.run(inputs, problem.wants).present())
                for key, program in zip(chosen, programs, strict=True)}


def table(errors: Mapping[tuple[Way, int], Errors], peer: Errors) -> list[str]:
    """Markdown: a row a variant and arithmetic, a column a depth, in each the errors of dx and dw."""
    depths = sorted({promote for _, promote in errors}, key=_depth)
    lines = ["| promote every | " + " | ".join(str(depth) if depth else "never" for depth in depths) + " |",
             "|---" * (len(depths) + 1) + "|"]
    for way in dict.fromkeys(way for way, _ in errors):
        cells = [_cell(errors[way, depth]) if (way, depth) in errors else "" for depth in depths]
        lines.append(f"| {' '.join(way)} | " + " | ".join(cells) + " |")
    return [*lines, f"| {PEER} | " + " | ".join([_cell(peer)] + [""] * (len(depths) - 1)) + " |"]


def _depth(promote: int) -> int:
    """How deep the longest sum on the tensor cores is."""
    return promote or sys.maxsize


def _cell(errors: Errors) -> str:
    return " / ".join(f"{errors[name]:.1e}" for name in SHOWN)


def _run(options: argparse.Namespace) -> int:
    shape = Shape(1, options.depth, options.hidden, options.depth)
    torch: Torch = open_torch()
    executor = open_gpu()
    with closing(executor):
        inputs = random_inputs(shape.rows, shape.hidden, shape.out)
        tensors = Tensors.upload(torch, inputs)
        torch.set_accuracy("fp32")
        judge = Judge(torch, tensors)
        dx, _, _, dw, _ = eager(torch, tensors)()
        lines = table(measure(executor, judge, inputs), judge.errors({"dx": dx, "dw": dw}))
        folder = options.out or reports_folder() / executor.slug
        head = [f"# Errors by depth of promotion, {shape}", "",
                f"{executor.device}, {now()}, revision {version()}; `python -m tuner.bench.promotion --depth {options.depth} "
                f"--hidden {options.hidden}`. Relative Frobenius errors of dx / dw against float64.", ""]
        write_text(folder / "promotion.md", "\n".join([*head, *lines]) + "\n")
    print("\n".join(lines))
    print(f"written: {folder / 'promotion.md'}")
    return OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

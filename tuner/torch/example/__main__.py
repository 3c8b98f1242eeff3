"""The command line of the example."""

from __future__ import annotations

import argparse
import copy
import math
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tuner.arguments import FAILED, OK, Parser, exit_status
from tuner.errors import InputError
from tuner.outcome import TuneResult
from tuner.provenance import now, version
from tuner.torch import autotune, convert
from tuner.torch.example.model import Transformer
from tuner.torch.example.sheet import JSON, MARKDOWN, OURS, OURS_COMPILED, THEIRS, THEIRS_COMPILED, Sheet
from tuner.torch.example.training import WARM_UP, Curve, Setting, read_text, train
from tuner.torch.module import FusedLinear
from tuner.versions import versions

AGREEMENT = 0.01
"""How far the losses may lie apart in the mean over all steps, relative. Roundings differ, and training amplifies them."""

SETTING = ("steps", "batch", "length", "width", "heads", "layers", "seed", "rate", "autocast", "compile")
"""The options that tell runs apart."""

SHOWN = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example and returns the exit status.

    0: the loss curves agree. 1: they do not, or something failed. 2: the arguments make no sense. 130: interrupted.
    """
    options = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "tuner.torch.example", *(sys.argv[1:] if arguments is None else arguments)])
    return exit_status("example", lambda: _run(options, command))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="example", allow_abbrev=False, description=(
        "Trains a small transformer on a small text, with PyTorch's modules and with the tuned ones, from the same seed, and "
        "shows both loss curves and the time of a step."))
    for name, value, what in (
            ("steps", 200, "training steps"), ("batch", 16, "texts in a step"), ("length", 128, "characters of each"),
            ("width", 128, "of the vectors between layers"), ("heads", 4, "of an attention"), ("layers", 2, "of the model"),
            ("seed", 0, "of parameters and data")):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{what} (default {value})")
    parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate (default 0.001)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: the GPU if there is one")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="multiply in this data type")
    parser.add_argument("--autotune", type=float, metavar="SECONDS", help="first tune for so long, all backward passes together")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile of both")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"also write {MARKDOWN} and {JSON} there, beside earlier runs")
    return parser


def _run(options: argparse.Namespace, command: str) -> int:
    text, characters = read_text()
    device = _device(options.device)
    setting = _setting(options, device, len(text))
    sheet = None if options.out is None else Sheet(options.out)
    torch.manual_seed(options.seed)
    theirs = Transformer(characters, options.length, options.width, options.heads, options.layers).to(device)
    ours = convert(copy.deepcopy(theirs))
    state = copy.deepcopy(theirs.state_dict())
    tuned = [] if options.autotune is None else _tune(
        ours, lambda: _curve(ours, ours, state, text, replace(setting, steps=1)), options.autotune)
    runs: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {THEIRS: (theirs, theirs), OURS: (ours, ours)}
    if options.compile:
        runs[THEIRS_COMPILED] = theirs, torch.compile(theirs)
        runs[OURS_COMPILED] = ours, torch.compile(ours)
    for model, call in runs.values():  # so that none finds a colder machine than the others
        _curve(model, call, state, text, replace(setting, steps=WARM_UP))
    curves = {name: _curve(model, call, state, text, setting) for name, (model, call) in runs.items()}
    console = Console()
    console.print(_table(curves))
    apart = _apart(curves[THEIRS], curves[OURS])
    where = "" if device == "cuda" else "; without a GPU both run PyTorch's own kernels"
    console.print(f"the losses lie {apart:.2e} apart in the mean, relative{where}", highlight=False, soft_wrap=True)
    for name in list(curves)[1:] if device == "cuda" else ():
        ratio = curves[THEIRS].step_ms / curves[name].step_ms
        console.print(f"{name}: a step is {ratio:.2f} times as fast as PyTorch's", highlight=False, soft_wrap=True)
    if sheet is not None and math.isfinite(apart):
        paths = sheet.add(_as_json(command, options, curves, apart, tuned))
        console.print("written: " + ", ".join(map(str, paths)), markup=False, highlight=False, soft_wrap=True)
    return OK if apart <= AGREEMENT else FAILED


def _tune(model: nn.Module, step: Callable[[], object], seconds: float) -> list[TuneResult]:
    """Shares the seconds among the backward passes of the model, each of which has sizes of its own."""
    sizes = {(module.in_features, module.out_features) for module in model.modules() if type(module) is FusedLinear}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        results = autotune(step, timeout=seconds / len(sizes))
    for warning in said:
        print(f"example: {warning.message}", file=sys.stderr)
    return results


def _as_json(command: str, options: argparse.Namespace, curves: dict[str, Curve], apart: float,
             tuned: Sequence[TuneResult]) -> dict[str, Any]:
    """As Sheet.add takes it."""
    on_gpu = _device(options.device) == "cuda"
    major, minor = torch.cuda.get_device_capability() if on_gpu else (0, 0)
    return {
        "command": command, "date": now(), "version": version(),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": versions(f"sm_{major}{minor}", {"PyTorch": torch.__version__}),
        "setting": {name: getattr(options, name) for name in SETTING}, "apart": apart,
        "step_ms": {name: curve.step_ms for name, curve in curves.items()},
        "losses": {name: list(curve.losses) for name, curve in curves.items()},
        "tuned": [{"problem": f"{result.problem.rows} rows, H = {result.problem.hidden}, O = {result.problem.out}",
                   "config": str(result.winner.config), "us": result.winner.best_us}
                  for result in tuned if result.winner is not None]}


def _device(name: str) -> str:
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise InputError("this PyTorch finds no GPU; use --device cpu")
    return ("cuda" if present else "cpu") if name == "auto" else name


def _setting(options: argparse.Namespace, device: str, characters: int) -> Setting:
    for name in ("steps", "batch", "length", "width", "heads", "layers"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} must be at least 1, not {getattr(options, name)}")
    if options.width % options.heads:
        raise InputError(f"--width must be a multiple of --heads, which {options.width} is not of {options.heads}")
    if options.length + 1 >= characters:
        raise InputError(f"--length must be less than {characters - 1}, as the text has {characters} characters")
    autocast = None if options.autocast is None else getattr(torch, options.autocast)
    return Setting(device, options.steps, options.batch, options.length, options.rate, options.seed, autocast)


def _curve(model: nn.Module, call: Callable[[Tensor], Tensor], state: dict[str, Any], text: Tensor, setting: Setting) -> Curve:
    """Trains from the same parameters each time."""
    model.load_state_dict(state)
    return train(call, list(model.parameters()), text, setting)


def _apart(first: Curve, second: Curve) -> float:
    pairs = list(zip(first.losses, second.losses, strict=True))
    return sum(abs(a - b) / abs(a) for a, b in pairs) / len(pairs)


def _table(curves: dict[str, Curve]) -> Table:
    table = Table()
    table.add_column("step", justify="right")
    for name in curves:
        table.add_column(name, justify="right")
    steps = len(next(iter(curves.values())).losses)
    for step in sorted({*range(0, steps, max(1, steps // SHOWN)), steps - 1}):
        table.add_row(str(step + 1), *(f"{curve.losses[step]:.4f}" for curve in curves.values()))
    table.add_row("ms a step", *(f"{curve.step_ms:.2f}" for curve in curves.values()))
    return table


if __name__ == "__main__":
    sys.exit(main())

"""`python -m codegen`: lists the variants, or prints the CUDA of one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from codegen.arguments import USAGE, Parser, abandon_output
from codegen.dtypes import ACCURACIES, DTYPES
from codegen.errors import CodegenError, InvalidConfig
from codegen.limits import TARGETS, target
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.render import render
from codegen.space import make_config, nearest_runnable, why_refused
from codegen.variants import VARIANTS

OK, FAILED = 0, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Exit status 0, 1 where the text cannot be written, 2 where the arguments make no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.list and (options.variant is None or options.shape is None):
        parser.error("give --list, or --variant and --shape")
    try:
        print("\n".join(_listing()) if options.list else _cuda(options).rstrip("\n"), flush=True)
    except CodegenError as error:
        print(f"codegen: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:
        abandon_output()
        if not isinstance(error, BrokenPipeError):
            print(f"codegen: cannot write the text ({error.strerror}); write it to a place with room", file=sys.stderr)
        return FAILED
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="codegen", description="Lists the kernel variants, or prints the CUDA of one.", allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="list the variants and their parameters")
    parser.add_argument("--variant", metavar="NAME", help=f"one of {', '.join(VARIANTS)}")
    parser.add_argument("--shape", metavar="B,S,H,O", help="batch, sequence, hidden and output sizes: 4,4,8,16")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="NAME=VALUE",
                        help="parameters; the others have their defaults, or the nearest values that can run the shape")
    parser.add_argument("--wants", metavar="A,B", help=f"only these gradients, of {', '.join(GRADIENTS)}")
    parser.add_argument("--dtype", default="float32", help=f"data type of x, dy and dx: {', '.join(DTYPES)}")
    parser.add_argument("--param-dtype", default="", metavar="DTYPE",
                        help="data type of gamma, beta, w and their gradients: that of x, or float32 (default that of x)")
    parser.add_argument("--accuracy", default="", metavar="CLASS",
                        help=f"what the results must keep: {', '.join(ACCURACIES)} (default that of the data type)")
    parser.add_argument("--target", default="sm_90", metavar="ARCH",
                        help=f"the GPU whose limits the config must keep: {', '.join(TARGETS)} (default sm_90)")
    return parser


def _listing() -> list[str]:
    lines = []
    for variant in VARIANTS.values():
        lines.append(variant.summary)
        for name, choices in variant.choices.items():
            options = " ".join(str(choice) for choice in choices)
            lines.append(f"    {name}: {options} (default {variant.defaults[name]})")
    return lines


def _cuda(options: argparse.Namespace) -> str:
    wants = None if options.wants is None else [name.strip() for name in options.wants.split(",")]
    problem = Problem.of(Shape.parse(options.shape), dtype=options.dtype, wants=wants, param_dtype=options.param_dtype,
                         accuracy=options.accuracy)
    values = _values(options.set)
    asked, limits = make_config(options.variant, values), target(options.target)
    config = nearest_runnable(problem, asked, limits, values)
    if config is None:
        raise InvalidConfig(f"{asked} cannot run {options.shape}: {why_refused(problem, asked, limits)}")
    if config != asked:
        print(f"codegen: the defaults cannot run {options.shape}, so this is {config}", file=sys.stderr)
    return render(problem, config).text


def _values(settings: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InvalidConfig(f"--set takes name=value such as warps=4, not {setting!r}")
        values[name] = value
    return values


if __name__ == "__main__":
    sys.exit(main())

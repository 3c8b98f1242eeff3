"""The options of commands that are about a problem, and of those about its whole space: which variants too."""

from __future__ import annotations

import argparse

from codegen.dtypes import ACCURACIES, DTYPES
from codegen.problem import GRADIENTS, Shape
from codegen.variants import VARIANTS
from tuner.arguments import parse_names
from tuner.request import Request


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Those that say which problem."""
    parser.add_argument("--shape", required=True, metavar="B,S,H,O", help="batch, sequence, hidden and output sizes: 4,4,8,16")
    parser.add_argument("--dtype", default="float32", help=f"data type of dy, x and dx: {', '.join(DTYPES)} (default float32)")
    parser.add_argument("--param-dtype", default="", metavar="DTYPE",
                        help="data type of gamma, beta, w and their gradients (default: that of --dtype)")
    parser.add_argument("--accuracy", default="", metavar="CLASS",
                        help=f"the accuracy class: {', '.join(ACCURACIES)} (default: the class of --dtype)")
    parser.add_argument("--deterministic", action="store_true", help="only kernels whose results are bitwise reproducible")
    parser.add_argument("--wants", type=parse_names, metavar="A,B", help=f"only these gradients, of {', '.join(GRADIENTS)}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(variants=None, timeout=None)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that say which problem and which part of its space."""
    add_problem(parser)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="stop after so long; the same command then goes on")
    parser.add_argument("--variants", type=parse_names, metavar="A,B", help=f"only these variants, of {', '.join(VARIANTS)}")


def request(options: argparse.Namespace, command: str, eps: float = 1e-5, seed: int = 0) -> Request:
    """What was asked for, by options of either function.

    Raises:
        InvalidProblem, UnsupportedDtype, InputError, InputTypeError: it makes no sense.
    """
    asked = Request(
        Shape.parse(options.shape), options.dtype, eps, options.deterministic, options.variants, None, options.timeout, seed,
        None if options.wants is None else frozenset(options.wants), command, param_dtype=options.param_dtype,
        accuracy=options.accuracy)
    asked.problem()
    return asked

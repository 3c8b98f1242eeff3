"""How well the cost model orders recorded spaces, and weights fitted to them: `python -m tuner.replay.fit FILE... --out DIR`.

Spearman's rank correlation of predicted and measured times, for the model as it is, and for weights that were fitted to one half
of the spaces, on the other half; and the other way round. A fit makes the mean absolute deviation of the logarithms small, an
offset for each space left free and the fast configs counting most. Every weight is pulled towards where it was: a handful of
spaces tells little of kernels that are slow in them.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tuner.arguments import OK, Parser, exit_status
from tuner.costmodel import TERMS, WEIGHTS, Weights, predict
from tuner.errors import InputError
from tuner.provenance import now, version
from tuner.records import write_text
from tuner.replay.recorded import Recorded, load

Floats = NDArray[np.float64]

FACTORS = (0.5, 0.7, 0.85, 1.2, 1.4, 2.0)
"""By what a weight is multiplied to see whether it fits better."""

SWEEPS = 12
"""Sweeps over all weights at most; it ends with the first that changes nothing."""

PULL = 0.004
"""What a kernel's weight of e or 1/e costs, in mean deviation of the logarithm. The weight of a term, or of the overlap, bears on
all kernels, those too that the spaces fitted to do not have, and costs as much for each of them."""

WIDTH = 0.7
"""A config e^WIDTH times slower than the fastest counts 1/e as much."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One space in numbers: steps of all configs in a row.

    Attributes:
        name: for people.
        measured: microseconds of each config.
        constant: of each config, the launches and fills.
        terms: of each step, unweighted, [steps, TERMS].
        kernels: the number of each step's kernel.
        owners: the number of each step's config.
    """

    name: str
    measured: Floats
    constant: Floats
    terms: Floats
    kernels: NDArray[np.int64]
    owners: NDArray[np.int64]


def sample(recorded: Recorded, kernels: dict[str, int]) -> Sample:
    """The configs that have a time. `kernels` numbers the kernels by name and grows."""
    problem, limits = recorded.origin.problem(), recorded.origin.limits
    constant, terms, numbers, owners = [], [], [], []
    for owner, config in enumerate(recorded.times):
        steps = predict(problem, config, limits).steps
        launches = [step for step in steps if step.terms]
        constant.append(sum(step.time_us for step in steps if not step.terms) + limits.launch_us * len(launches))
        terms += [step.terms for step in launches]
        numbers += [kernels.setdefault(step.name, len(kernels)) for step in launches]
        owners += [owner] * len(launches)
    return Sample(
        f"{recorded.origin.shape} {recorded.origin.dtype}", np.array(list(recorded.times.values())), np.array(constant),
        np.array(terms), np.array(numbers), np.array(owners))


def predicted(one: Sample, logs: Floats) -> Floats:
    """Microseconds of each config, for the logarithms of the weights: of TERMS, of the overlap, of the kernels."""
    count = len(TERMS)
    weighted = one.terms * np.exp(logs[:count]) * np.exp(logs[count + 1:])[one.kernels, None]
    longest = weighted.max(axis=1)
    steps = longest + math.exp(logs[count]) * (weighted.sum(axis=1) - longest)
    return np.asarray(one.constant + np.bincount(one.owners, steps, minlength=len(one.constant)), np.float64)


def fit(samples: Sequence[Sample], kernels: Iterable[str]) -> Floats:
    """The logarithms of the weights that fit best: those in force, set one after another to a better value while there is one."""
    logs = start(kernels)
    origin = logs.copy()
    general = len(TERMS) + 1
    pulls = np.full(len(logs), PULL)
    pulls[:general] *= len(logs) - general

    def loss(trial: Floats) -> float:
        deviations = []
        for one in samples:
            ratio = np.log(predicted(one, trial) / one.measured)
            weight = np.exp(-np.log(one.measured / one.measured.min()) / WIDTH)
            order = np.argsort(ratio)
            middle = ratio[order][np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)]
            deviations.append(float(weight @ np.abs(ratio - middle) / weight.sum()))
        return float(np.mean(deviations)) + float(pulls @ np.abs(trial - origin))

    best = loss(logs)
    for _ in range(SWEEPS):
        before = best
        for place in range(len(logs)):
            for factor in FACTORS:
                trial = logs.copy()
                trial[place] += math.log(factor)
                if (found := loss(trial)) < best:
                    best, logs = found, trial
        if best == before:
            break
    return logs


def start(kernels: Iterable[str]) -> Floats:
    """The logarithms of the weights in force: of TERMS, of the overlap, of these kernels."""
    of_kernels = [WEIGHTS.kernels.get(name, 1.0) for name in kernels]
    return np.asarray(np.log([*WEIGHTS.terms, WEIGHTS.overlap, *of_kernels]), np.float64)


def spearman(first: Floats, second: Floats) -> float:
    """Spearman's rank correlation; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse], np.float64)


def as_weights(logs: Floats, kernels: Sequence[str]) -> Weights:
    """Weights for the cost model, to three digits."""
    values = [float(f"{value:.3g}") for value in np.exp(logs)]
    count = len(TERMS)
    return Weights(tuple(values[:count]), values[count],
                   {name: value for name, value in zip(kernels, values[count + 1:], strict=True) if value != 1.0})


def report(samples: Sequence[Sample], kernels: Sequence[str], command: str, devices: Iterable[str]) -> str:
    """The correlations and the fitted weights for a reader, in Markdown; `devices` gave the times."""
    halves = [[one for number, one in enumerate(samples) if number % 2 == half] for half in (0, 1)]
    now_in_force = start(kernels)
    fits = [fit(half, kernels) if half else now_in_force for half in halves]
    of_all = fit(samples, kernels)
    lines = ["# The cost model on recorded spaces", "",
             f"{now()}, revision {version()}, times of {', '.join(devices)}:", "", f"    {command}", "",
             "Spearman's rank correlation of predicted and measured times: of the model in "
             "force, of one fitted to the other half of these spaces (every second one), and of one fitted to all of them.", "",
             "| space | configs | in force | fitted to others | fitted to all |", "|---|---|---|---|---|"]
    for number, one in enumerate(samples):
        values = [spearman(predicted(one, logs), one.measured) for logs in (now_in_force, fits[1 - number % 2], of_all)]
        lines.append(f"| {one.name} | {len(one.measured)} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    lines += ["", f"Fitted to all: `{as_weights(of_all, kernels)!r}`", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    0: the report is written. 1: it cannot be. 2: the arguments make no sense. 130: interrupted.
    """
    parser = Parser(prog="fit", allow_abbrev=False, description="Fits the cost model to recorded spaces; writes costmodel.md.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a space that `python -m tuner record` wrote")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where to write (default: here)")
    options = parser.parse_args(arguments)
    return exit_status("fit", lambda: _fit(options))


def _fit(options: argparse.Namespace) -> int:
    kernels: dict[str, int] = {}
    recorded = [load(path) for path in options.files]
    if empty := [path for path, one in zip(options.files, recorded, strict=True) if len(one.times) < 2]:
        raise InputError(f"{empty[0]} has fewer than two times; record more of it")
    command = shlex.join(["python", "-m", "tuner.replay.fit", *map(str, options.files), "--out", str(options.out)])
    devices = dict.fromkeys(one.origin.device for one in recorded)
    text = report([sample(one, kernels) for one in recorded], list(kernels), command, devices)
    write_text(options.out / "costmodel.md", text)
    print(text)
    return OK


if __name__ == "__main__":
    sys.exit(main())

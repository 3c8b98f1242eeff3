"""What runs of the example gave, kept in a folder: training.json for programs and training.md for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.arguments import check_folder
from tuner.errors import InputError, why
from tuner.records import write_text

SCHEMA = 1
"""Version of training.json. It rises whenever a field changes its meaning or goes."""

JSON, MARKDOWN = "training.json", "training.md"

THEIRS, OURS, THEIRS_COMPILED, OURS_COMPILED = "PyTorch", "tuned", "PyTorch, torch.compile", "tuned, torch.compile"
"""Whose modules a run trains, and how they are called."""


class Sheet:
    """The runs in a folder, one for each setting; a new run takes the place of that with its setting.

    Args:
        folder: it is made if need be.

    Raises:
        InputError: nothing can be written there, or its training.json is none of this program's version.
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        self._folder = folder
        self._runs = _read(folder / JSON)

    def add(self, run: Mapping[str, Any]) -> tuple[Path, Path]:
        """Writes both files.

        Args:
            run: JSON values: `command`, `date`, `version`, `device`, `versions` by name, `setting`; `apart`, how far the losses
                of THEIRS and OURS lie apart in the mean, relative; `step_ms` and `losses` by name of the models; and `tuned`, the
                kernels that this run tuned, each with `problem`, `config` and `us`.

        Returns:
            Their paths.
        """
        self._runs = [*(one for one in self._runs if one["setting"] != run["setting"]), dict(run)]
        content = {"schema": SCHEMA, "runs": self._runs}
        write_text(self._folder / JSON, json.dumps(content, indent=1, allow_nan=False) + "\n")
        write_text(self._folder / MARKDOWN, markdown(self._runs))
        return self._folder / MARKDOWN, self._folder / JSON


def markdown(runs: list[dict[str, Any]]) -> str:
    """The runs as a page."""
    lines = [
        "# Training with the tuned backward pass", "",
        "Whole training steps, forward, backward and update, of a small transformer on a small text: PyTorch's modules, and the "
        "same model converted, from the same parameters and data. Milliseconds a step, the median of several parts of a run. "
        "*Tuned* is how many times as fast the tuned model's step is as PyTorch's, both in eager mode and both under "
        "`torch.compile`; *best* compares the faster of the two ways on either side.", ""]
    for run in runs:
        lines += _section(run)
    return "\n".join(lines)


def _section(run: Mapping[str, Any]) -> list[str]:
    setting, times = run["setting"], run["step_ms"]
    lines = [
        f"## {setting['batch']} texts of {setting['length']}, width {setting['width']}, {setting['layers']} layers, "
        f"{setting['autocast'] or 'float32'}", "",
        f"    {run['command']}", "",
        f"{run['device']}; {run['date']}; sources {run['version']}; "
        + ", ".join(f"{name} {text}" for name, text in run["versions"].items()) + ".", "",
        "| | PyTorch | tuned | times as fast |", "|---|---|---|---|"]
    pairs = [("eager", THEIRS, OURS), ("torch.compile", THEIRS_COMPILED, OURS_COMPILED)]
    rows = [(name, times[theirs], times[ours]) for name, theirs, ours in pairs if theirs in times and ours in times]
    if len(rows) > 1:
        rows.append(("best", min(row[1] for row in rows), min(row[2] for row in rows)))
    lines += [f"| {name} | {theirs:.3f} | {ours:.3f} | {theirs / ours:.2f} |" for name, theirs, ours in rows]
    first, last = ([curve[place] for curve in (run["losses"][THEIRS], run["losses"][OURS])] for place in (0, -1))
    lines += ["", f"The losses begin at {first[0]:.4f} and {first[1]:.4f} and end at {last[0]:.4f} and {last[1]:.4f} after "
                  f"{setting['steps']} steps; they lie {run['apart']:.1e} apart in the mean, relative.", ""]
    lines += [f"* tuned in this run: {one['problem']}, {one['us']:.1f} us, `{one['config']}`" for one in run["tuned"]]
    return [*lines, ""] if run["tuned"] else lines


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, RecursionError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({why(error)}); choose another folder with --out") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise InputError(f"{path} is of another version of this program; choose another folder with --out")
    try:
        runs: list[dict[str, Any]] = [dict(run) for run in content["runs"]]
        markdown(runs)  # what cannot be shown would be lost with the next run's page
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path} has a run with a figure or a text missing; move it away, or choose another folder with "
                         "--out") from error
    return runs

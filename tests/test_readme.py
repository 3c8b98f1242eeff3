"""What README says of the H200 is what the published benchmark measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMPLETE = ("eager", "compile")


def test_the_table_of_results_is_that_of_the_published_benchmark() -> None:
    rows = json.loads((ROOT / "reports/h200/bench.json").read_text(encoding="utf-8"))["rows"]
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Results")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert table == [_line(row) for row in rows]


def test_no_float32_gradient_is_less_exact_than_readme_says() -> None:
    rows = json.loads((ROOT / "reports/h200/bench.json").read_text(encoding="utf-8"))["rows"]
    assert max(max(row["ours"]["errors"].values()) for row in rows if row["dtype"] == "float32") < 4e-7


def _line(row: dict[str, Any]) -> str:
    ours, peers = row["ours"], row["peers"]
    time = ours["warm"]["median"]
    best = min(peers[name]["warm"]["median"] for name in COMPLETE)
    errors = [f"{max(entry['errors'].values()):.1e}" for entry in (ours, peers["eager"])]
    cells = [row["name"], row["shape"], row["dtype"], _us(time), _us(best), f"{best / time:.2f}", *errors,
             f"`{row['config'].partition(':')[0]}`"]
    return "| " + " | ".join(cells) + " |"


def _us(time: float) -> str:
    """Three digits, or all before the point."""
    return f"{time:.{2 if time < 10 else 1 if time < 100 else 0}f}"

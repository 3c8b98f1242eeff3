"""Folders of tuning runs as tests of their pages need them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.trials import read_trials
from tuner.records import Journal, Record, RunInfo, Status

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "reports/h200"
SEED = "4x4x8x16-float32"


def published_records() -> tuple[RunInfo, list[Record]]:
    """Those of a published run. What the rules of its time refused was never tried."""
    info, lines = read_trials(PUBLISHED / SEED / "trials.jsonl")
    return info, [record for record in lines if record.status is not Status.REFUSED]


def written(folder: Path, info: RunInfo, records: list[Record], finished: bool = True,
            end: Mapping[str, Any] | None = None) -> Path:
    """A folder with these records, and with what the run said at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "trials.jsonl", info)
    journal.settle(records, finished, end)
    journal.close()
    return folder

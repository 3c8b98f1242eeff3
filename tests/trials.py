"""trials.jsonl as tests read it."""

from __future__ import annotations

import json
from pathlib import Path

from tuner.records import Record, RunInfo


def read_trials(path: Path) -> tuple[RunInfo, list[Record]]:
    """The header and the records; what stands behind the last line break is not looked at."""
    header, *lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return RunInfo.from_json(json.loads(header)), [Record.from_json(json.loads(line)) for line in lines]

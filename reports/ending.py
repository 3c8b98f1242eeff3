"""What a run has said of itself when it ended. It may be damaged, by another version of this program, or not there at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from codegen.errors import CodegenError
from codegen.limits import Limits
from tuner.changed import Changed


@dataclass(frozen=True, slots=True)
class Ending:
    """The part of it that can be read.

    Attributes:
        winner: the config that won; empty where it is not said.
        interrupted: whether the user ended the run.
        lost: why it ended early, or went on alone, as a sentence; empty where neither is so.
        limits: of the GPU.
        said: what is to be known of its times and its winner, as clauses.
        checks: what the winner passed beyond what all have: name, outcome, and what there is to say.
        ablation: what each parameter of the winner is worth.
    """

    winner: str = ""
    interrupted: bool = False
    lost: str = ""
    limits: Limits | None = None
    said: tuple[str, ...] = ()
    checks: tuple[Mapping[str, str], ...] = ()
    ablation: tuple[Changed, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Ending:
        """From the header of trials.jsonl, or a best.json from before that had it."""
        winner = values.get("winner")
        config = winner.get("config") if isinstance(winner, dict) else winner
        return cls(config if isinstance(config, str) else "", values.get("interrupted") is True, _text(values.get("lost")),
                   _limits(values.get("limits")), tuple(filter(None, map(_text, _list(values.get("said"))))),
                   tuple(filter(None, map(_check, _list(values.get("gate"))))),
                   tuple(filter(None, map(_changed, _list(values.get("ablation"))))))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _check(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    found = {name: _text(value.get(name)) for name in ("name", "outcome", "said")}
    return found if all(found.values()) else {}


def _changed(value: object) -> Changed | None:
    try:
        return Changed.from_json(value) if isinstance(value, dict) else None
    except (CodegenError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _limits(value: object) -> Limits | None:
    if not isinstance(value, dict) or set(value) != {each.name for each in fields(Limits)}:
        return None
    kinds = {"str": str, "int": int, "float": int | float}
    sound = all(isinstance(value[each.name], kinds[str(each.type)]) for each in fields(Limits))
    if not sound or not all(0 < number < math.inf for number in value.values() if not isinstance(number, str)):
        return None
    return Limits(**value)

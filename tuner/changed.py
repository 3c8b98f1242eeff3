"""One kernel of an ablation: the winner with one parameter changed, and how long it takes. See tuner.ablation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from codegen.config import Config, Value
from codegen.space import parse_config
from tuner.records import LONGEST_US, Status


@dataclass(frozen=True, slots=True)
class Changed:
    """The kernel that stands for another value of one parameter.

    Attributes:
        parameter: of the winner.
        config: with another value of it, and what the rules tie to that.
        status: what became of it; REFUSED where no candidate has that value, and NOT_RUN where it was not tried.
        reason: why it has no time, as a clause; None where there is nothing to say.
        us: microseconds of a call, the median of the rounds, or predicted; None where there is no time.
        ratios: its time over the winner's, of each round; where times are predicted the one there is.
    """

    parameter: str
    config: Config
    status: Status
    reason: str | None = None
    us: float | None = None
    ratios: tuple[float, ...] = ()

    @property
    def value(self) -> Value:
        """Of the parameter."""
        return self.config[self.parameter]

    @property
    def times(self) -> float | None:
        """As many times as long as the winner it takes; None where there is no time."""
        return median(self.ratios) if self.ratios else None

    def tied(self, winner: Config) -> str:
        """What else is different, "splits=4, ..."; mostly nothing."""
        return ", ".join(f"{name}={value}" for name, value in self.config.params
                         if name != self.parameter and value != winner[name])

    def as_json(self) -> dict[str, Any]:
        """The kernel as JSON values; `from_json` reads it back."""
        return {"parameter": self.parameter, "config": str(self.config), "status": self.status.value, "reason": self.reason,
                "us": self.us, "ratios": list(self.ratios)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Changed:
        """Raises CodegenError, AttributeError, KeyError, TypeError, ValueError: the values have another form."""
        config, us, reason = parse_config(values["config"]), values["us"], values["reason"]
        numbers = (*values["ratios"], *(() if us is None else (us,)))
        if not all(isinstance(number, int | float) and 0 < number < LONGEST_US for number in numbers):
            raise ValueError(f"{numbers} are no times")
        if values["parameter"] not in config.as_dict() or not isinstance(reason, str | None):
            raise TypeError(f"{values['parameter']!r} is no parameter, or {reason!r} no text")
        return cls(values["parameter"], config, Status(values["status"]), reason, us, tuple(values["ratios"]))

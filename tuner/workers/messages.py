"""What this process, the nursery and the workers say to one another: one JSON object a message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from codegen.limits import Limits
from codegen.problem import Problem
from tuner.executors import Executor
from tuner.timing.regimes import Regime

Message = dict[str, Any]


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """Sends one message.

    Raises:
        OSError: nobody will read it.
    """
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Message:
    """The next message.

    Raises:
        EOFError, OSError: there will be none.
    """
    message: Message = json.loads(connection.recv_bytes())
    return message


@dataclass(frozen=True, slots=True)
class Device:
    """What an executor says of its device; see Executor."""

    name: str
    device: str
    slug: str
    limits: Limits
    measures: bool
    rates: Literal["table", "measured"]
    bus_id: str | None

    @classmethod
    def of(cls, executor: Executor) -> Device:
        """That of an open executor."""
        return cls(executor.name, executor.device, executor.slug, executor.limits, executor.measures, executor.rates,
                   executor.bus_id)

    @classmethod
    def from_json(cls, values: Message) -> Device:
        """Reads `asdict` back."""
        return cls(**{**values, "limits": Limits(**values["limits"])})


@dataclass(frozen=True, slots=True)
class Place:
    """Which executor a worker opens.

    Attributes:
        executor: "auto", "cuda" or "host".
        target: the architecture that the host executor stands for.
        store: root folder of the compiled kernels.
        device_index: which GPU, from 0.
        limits: of the device, where an earlier worker has found them out; nothing is measured again.
    """

    executor: str
    target: str
    store: Path
    device_index: int = 0
    limits: Limits | None = None

    def as_json(self) -> Message:
        """JSON values; `from_json` reads them back."""
        return {**asdict(self), "store": str(self.store)}

    @classmethod
    def from_json(cls, values: Message) -> Place:
        """Reads `as_json` back."""
        limits = values["limits"] and Limits(**values["limits"])
        return cls(**{**values, "store": Path(values["store"]), "limits": limits})


@dataclass(frozen=True, slots=True)
class Job:
    """What candidates are judged for; see Evaluator."""

    problem: Problem
    eps: float
    seed: int
    regime: Regime = "warm"

    def as_json(self) -> Message:
        """JSON values; `from_json` reads them back."""
        return {**asdict(self), "problem": {**asdict(self.problem), "wants": sorted(self.problem.wants)}}

    @classmethod
    def from_json(cls, values: Message) -> Job:
        """Reads `as_json` back."""
        problem = values["problem"]
        return cls(**{**values, "problem": Problem(**{**problem, "wants": frozenset(problem["wants"])})})

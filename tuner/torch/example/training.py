"""Training on the text that is shipped, and the time of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 5
"""Steps that are not timed: kernels are compiled and memory is taken in the first."""

PARTS = 9
"""The timed steps are taken in so many parts, of which the median counts: others at work on the machine disturb some of them."""

TEXT = "constitution.txt"


@dataclass(frozen=True, slots=True)
class Setting:
    """How to train.

    Attributes:
        device: "cpu" or "cuda".
        steps: how many.
        batch, length: texts in a step, and the characters of each.
        rate: the learning rate.
        seed: of the parameters and of the order of texts.
        autocast: the data type of products under autocast; None: float32 throughout.
    """

    device: str
    steps: int
    batch: int
    length: int
    rate: float
    seed: int
    autocast: Any = None


@dataclass(frozen=True, slots=True)
class Curve:
    """What a training run gave.

    Attributes:
        losses: of each step.
        step_ms: the time of a step, forward, backward and update, milliseconds: the median of the parts.
    """

    losses: tuple[float, ...]
    step_ms: float


def read_text() -> tuple[Tensor, int]:
    """The text as numbers of characters, and how many different ones there are."""
    text = files(__package__).joinpath(TEXT).read_text(encoding="utf-8")
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text]), len(alphabet)


def train(model: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], text: Tensor, setting: Setting) -> Curve:
    """Trains the parameters of a model on the text."""
    optimizer = torch.optim.AdamW(parameters, setting.rate)
    generator = torch.Generator().manual_seed(setting.seed)
    text = text.to(setting.device)
    steps: list[Tensor] = []
    first_timed = min(WARM_UP, setting.steps - 1)
    part = max(1, (setting.steps - first_timed) // PARTS)
    marks: list[float] = []

    def mark(step: int) -> None:
        if step >= first_timed and (step - first_timed) % part == 0:
            _wait(setting.device)
            marks.append(time.perf_counter())

    for step in range(setting.steps):
        mark(step)
        first = torch.randint(len(text) - setting.length, (setting.batch, 1), generator=generator).to(setting.device)
        places = first + torch.arange(setting.length + 1, device=setting.device)
        sample = text[places]
        with nullcontext() if setting.autocast is None else torch.autocast(setting.device, setting.autocast):
            logits = model(sample[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), sample[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.append(loss.detach())
    mark(setting.steps)
    return Curve(tuple(torch.stack(steps).tolist()), 1e3 * median(after - before for before, after in pairwise(marks)) / part)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

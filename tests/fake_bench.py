"""Stand-ins for the benchmark's surroundings: a stream whose clock a test sets, a GPU that knows its rates, made-up peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.fake_gpu import FakeGpu
from tests.numpy_kernels import PLAIN
from tuner.bench.arena import Contestant, Opponents
from tuner.bench.results import Case
from tuner.errors import TunerError
from tuner.executors import Timing
from tuner.inputs import Inputs


class FakeStream:
    """Work tells the stream how long it takes, by adding to `now`.

    Attributes:
        now: microseconds since the beginning.
        log: "flush" and "replay" in order.
        repeats: of each captured graph, in order.
        open_graphs: graphs that were not given back.
    """

    def __init__(self, flush_us: float = 80.0) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.repeats: list[int] = []
        self.open_graphs = 0
        self._flush_us = flush_us

    def record(self) -> float:
        return self.now

    def elapsed_us(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self) -> None:
        pass

    def flush(self) -> None:
        self.log.append("flush")
        self.now += self._flush_us

    @contextmanager
    def graph(self, work: Callable[[], None], repeats: int) -> Iterator[Callable[[], None]]:
        self.repeats.append(repeats)
        self.open_graphs += 1

        def replay() -> None:
            self.log.append("replay")
            for _ in range(repeats):
                work()

        yield replay
        self.open_graphs -= 1


class RatedGpu(FakeGpu):
    """A GPU that can measure itself: 4 TB/s, a launch in 0.5 us."""

    def measure_copy_tbps(self) -> float:
        return 4.0

    def measure_launch_us(self) -> float:
        return 0.5


class FakePeer:
    """Takes `us`, then, in the second measurement, `later` times as long; raises `failure` where there is one."""

    def __init__(self, name: str, inputs: Inputs, us: float, later: float = 1.0, failure: TunerError | None = None) -> None:
        self.name = name
        self._inputs = inputs
        self._us = us
        self._later = later
        self._failure = failure

    def warm(self, samples: int) -> Timing:
        if self._failure is not None:
            raise self._failure
        us, self._us = self._us, self._us * self._later
        return Timing((us,) * samples, 1)

    def cold(self, samples: int) -> Timing:
        return Timing((2.0 * self._us,) * samples, 1)

    def gradients(self) -> Mapping[str, Any]:
        return {} if self.name == "gemms" else PLAIN(self._inputs, frozenset(("dx", "dgamma", "dbeta", "dw", "db"))).present()


class FakeJudge:
    """Finds the same error in everything."""

    def errors(self, gradients: Mapping[str, Any]) -> dict[str, float]:
        return dict.fromkeys(gradients, 3e-7)


class FakeArena:
    """Peers by name; `make` may replace how one is made.

    Attributes:
        seen: the inputs of each case.
        released: how often memory was given back.
    """

    def __init__(self, make: Callable[[str, Inputs], Contestant] | None = None, failed: Mapping[str, str] | None = None) -> None:
        self._make = make or (lambda name, inputs: FakePeer(name, inputs, {"eager": 30.0, "compile": 20.0, "gemms": 5.0}[name]))
        self._failed = dict(failed or {})
        self.seen: list[tuple[Case, Inputs]] = []
        self.released = 0

    def prepare(self, case: Case, inputs: Inputs, names: Sequence[str]) -> Opponents:
        self.seen.append((case, inputs))
        ready = tuple(self._make(name, inputs) for name in names if name not in self._failed)
        return Opponents(ready, self._failed, FakeJudge())

    def release(self) -> None:
        self.released += 1

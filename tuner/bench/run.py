"""The benchmark: one case after the other, each a row that is handed out as soon as it is finished.

A case's contestants, our kernel and the peers, are measured in turns, and all of it twice: how far the two measurements lie
apart is the noise. What fails is a note in the row, and the run goes on; only a dead GPU or a missing compiler ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from codegen.errors import CodegenError
from tuner.bench.arena import Arena, Contestant, Judging, Opponents
from tuner.bench.floors import Floor, Rates
from tuner.bench.gap import known_gap
from tuner.bench.measure import Spread
from tuner.bench.ours import Kernel, Ours, Tuning, choose
from tuner.bench.results import Case, Entry, Row
from tuner.errors import DeviceLost, ToolchainError, TunerError
from tuner.executors import Executor
from tuner.inputs import Inputs, random_inputs, read_only
from tuner.outcome import Event


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose.

    Attributes:
        peers: names of the peers.
        samples: of each time, in each of two measurements.
        tuning: how to tune where it is needed.
    """

    peers: tuple[str, ...]
    samples: int
    tuning: Tuning


@dataclass(slots=True)
class _Times:
    """What was measured of one contestant so far; microseconds, a list a round."""

    contestant: Contestant
    warm: list[tuple[float, ...]] = field(default_factory=list)
    cold: list[tuple[float, ...]] = field(default_factory=list)
    note: str | None = None

    def measure(self, samples: int) -> None:
        """One round; after a failure there is no other."""
        if self.note is not None:
            return
        try:
            self.warm.append(self.contestant.warm(samples).samples)
            self.cold.append(self.contestant.cold(samples).samples)
        except DeviceLost:
            raise
        except TunerError as error:
            self.note = str(error)

    def entry(self, judge: Judging | None) -> Entry:
        """The spreads where both rounds were finished, and the errors where there is a judge."""
        errors: dict[str, float] = {}
        note = self.note
        if judge is not None and note is None:
            try:
                errors = judge.errors(self.contestant.gradients())
            except DeviceLost:
                raise
            except TunerError as error:
                note = str(error)
        warm, cold = (Spread.of(*rounds) if len(rounds) == 2 else None for rounds in (self.warm, self.cold))
        return Entry(warm, cold, errors, note)


class Bench:
    """Measures cases.

    Args:
        executor: where kernels run and are timed.
        arena: where peers come from; None: nowhere.
        rates: what the floors are from.
        options: what the user chose.
        on_step: called with what is being done, before it is done.
    """

    def __init__(self, executor: Executor, arena: Arena | None, rates: Rates, options: Options,
                 on_step: Callable[[str], None] = lambda text: None) -> None:
        self._executor = executor
        self._arena = arena
        self._rates = rates
        self._options = options
        self._on_step = on_step

    def run(self, cases: Iterable[Case]) -> Iterator[Row]:
        """A row for each case; the GPU's death is the last row's reason.

        Raises:
            ToolchainError: there is no compiler.
            PeerFailed: PyTorch lost the GPU.
        """
        for case in cases:
            try:
                row = self._row(case)
            except DeviceLost as error:
                yield self._failed(case, str(error))
                return
            except MemoryError as error:
                row = self._failed(case, f"this machine has not enough memory ({error or 'no figure is known'})")
            yield row
            self._executor.close()
            if self._arena is not None:
                self._arena.release()

    def _failed(self, case: Case, reason: str) -> Row:
        return Row(case, Floor.of(case.problem, self._rates), reason=reason)

    def _row(self, case: Case) -> Row:
        problem, tuning = case.problem, self._options.tuning
        kernel, reason = self._kernel(case)
        self._executor.close()  # what validation left on the GPU
        self._on_step(f"{case.title}: measuring")
        data = random_inputs(problem.rows, problem.hidden, problem.out, tuning.seed)
        inputs = read_only(data.rounded_to(problem.dtype, problem.param_dtype))
        opponents = self._opponents(case, inputs)
        times = [_Times(peer) for peer in opponents.ready]
        if kernel is not None:
            times.insert(0, _Times(Ours(kernel, problem, inputs)))
        for _ in range(2):
            for contestant in times:
                contestant.measure(self._options.samples)
        entries = {one.contestant.name: one.entry(opponents.judge) for one in times}
        ours = entries.pop(Ours.name, Entry())
        entries |= {name: Entry(note=note) for name, note in opponents.failed.items()}
        floor, gap = Floor.of(problem, self._rates), ""
        if kernel is not None and ours.warm is not None:
            gap = known_gap(problem, kernel.record.config, self._executor.limits, floor, self._rates, ours.warm.median)
        row = Row(case, floor, peers=_ordered(entries, self._options.peers), reason=reason)
        return _finished(row, kernel, ours, gap)

    def _kernel(self, case: Case) -> tuple[Kernel | None, str | None]:
        """The kernel, or why there is none; the peers are measured all the same."""
        def tell(event: Event) -> None:
            self._on_step(f"{case.title}: {event.stage}, {event.done} of {event.total}")

        self._on_step(f"{case.title}: validating")
        try:
            return choose(case, self._executor, self._options.tuning, tell), None
        except (DeviceLost, ToolchainError):
            raise
        except (CodegenError, TunerError) as error:
            return None, str(error)

    def _opponents(self, case: Case, inputs: Inputs) -> Opponents:
        return Opponents() if self._arena is None else self._arena.prepare(case, inputs, self._options.peers)


def _ordered(entries: dict[str, Entry], names: Sequence[str]) -> dict[str, Entry]:
    return {name: entries[name] for name in names if name in entries}


def _finished(row: Row, kernel: Kernel | None, ours: Entry, gap: str) -> Row:
    if kernel is None:
        return row
    judge = "timed"
    if not ours.errors:
        judge = "validation"
        validated = {name: error.normwise for name, error in kernel.record.errors.items()}
        ours = Entry(ours.warm, ours.cold, validated, ours.note)
    return replace(row, ours=ours, config=str(kernel.record.config), origin=kernel.origin, judge=judge, reason=ours.note, gap=gap)

"""tuner.torch.autotune: what it tunes, what it leaves alone, and that its winners are used."""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing

from codegen.config import Config
from codegen.problem import Problem
from tests.fake_gpu import FakeGpu
from tests.torch_on_host import install, leaves
from tuner.entry import tune
from tuner.errors import NoValidKernel
from tuner.executors import Executor
from tuner.executors.host import HostExecutor
from tuner.launcher import engine as engines
from tuner.store import Store
from tuner.torch import autotune, layer_norm_linear
from tuner.torch import tuning as tuning_module
from tuner.wisdom.recall import choose, remember

ROWS, HIDDEN, OUT = 36, 8, 6


class Gpu(FakeGpu):
    """The GPU that the fake driver stands for."""

    device = "NVIDIA H200"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host_executor: Executor, store: Store) -> list[dict[str, Any]]:
    """The tuning runs there were; they look at row_warp only, which takes a second, and keep its best all the same."""
    monkeypatch.setenv("LNL_WISDOM", str(tmp_path / "wisdom"))
    assert isinstance(host_executor, HostExecutor)
    install(monkeypatch, host_executor, store)
    monkeypatch.setattr(engines, "choose", choose)
    runs: list[dict[str, Any]] = []

    def run(shape: Any, *, executor: str, trials: int | None, **options: Any) -> Any:
        assert executor == "cuda"
        runs.append({"shape": shape, **options})
        result = tune(shape, executor=Gpu(), trials=3, variants="row_warp", **options)
        remember(result)
        return result

    monkeypatch.setattr(tuning_module, "tune", run)
    return runs


def step(dtype: torch.dtype = torch.float32) -> None:
    arguments = leaves((4, 9), HIDDEN, OUT, dtype)
    layer_norm_linear(*arguments).sum().backward()


def test_winners_are_kept_and_used(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    results = autotune(step)
    assert [run["shape"] for run in asked] == [(1, ROWS, HIDDEN, OUT)]
    winner = results[0].winner
    assert winner is not None and winner.config.variant == "row_warp"
    used: list[Config] = []
    real = engines.render
    monkeypatch.setattr(engines, "render", lambda problem, config: used.append(config) or real(problem, config))
    step()
    assert used == [winner.config]


def test_what_is_tuned_is_left_alone_unless_asked(asked: list[dict[str, Any]]) -> None:
    autotune(step)
    assert autotune(step) == [] and len(asked) == 1
    assert len(autotune(step, again=True)) == 1 and len(asked) == 2


def test_each_problem_of_a_step_once(asked: list[dict[str, Any]]) -> None:
    def steps() -> None:
        step()
        step()
        step(torch.bfloat16)

    autotune(steps)
    assert sorted(run["dtype"] for run in asked) == ["bfloat16", "float32"]
    assert all(set(run["wants"]) == {"dx", "dgamma", "dbeta", "dw", "db"} for run in asked)


def test_a_problem_for_which_nothing_is_found_in_time_stays_as_it_was(asked: list[dict[str, Any]],
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    real = tuning_module.tune

    def run(shape: Any, **options: Any) -> Any:
        if options["dtype"] == "bfloat16":
            raise NoValidKernel("no candidate was finished in time; allow more with --timeout")
        return real(shape, **options)

    monkeypatch.setattr(tuning_module, "tune", run)

    def steps() -> None:
        step(torch.bfloat16)
        step()

    with pytest.warns(UserWarning, match=r"H=8, O=6 in bfloat16 stays as it was \(no candidate was finished in time\); it may"):
        results = autotune(steps)
    assert [result.problem.dtype for result in results] == ["float32"]
    steps()


def test_a_step_without_the_operation_tunes_nothing(asked: list[dict[str, Any]]) -> None:
    with pytest.warns(UserWarning, match="autotune saw no backward pass"):
        assert autotune(lambda: None) == []
    assert asked == []


def _share(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    patch, tuned = pytest.MonkeyPatch(), Path(folder) / "tuned"
    patch.setattr(tuning_module, "exact", lambda problem, place, book: None)

    def tune_slowly(*arguments: Any) -> str:
        time.sleep(0.5)
        (tuned / str(rank)).write_text("")
        return "a result"

    @contextmanager
    def watched() -> Any:
        yield {Problem(ROWS, HIDDEN, OUT): SimpleNamespace(place=None)}

    patch.setattr(tuning_module.engine, "watched", watched)
    patch.setattr(tuning_module, "_tune", tune_slowly)
    results = autotune(lambda: torch.distributed.barrier())
    assert results == ([] if rank else ["a result"])
    assert {path.name for path in tuned.iterdir()} == {"0"}
    with pytest.raises(NoValidKernel) if rank == 0 else nullcontext(), tuning_module._one_of_each_machine() as tunes:
        if tunes:
            raise NoValidKernel("nothing was valid")  # which sets the other free as well
    patch.setenv("LOCAL_RANK", "0")  # each on a machine of its own
    assert autotune(lambda: None) == ["a result"]
    torch.distributed.destroy_process_group()
    patch.undo()


def test_one_process_of_each_machine_tunes_and_the_others_wait(tmp_path: Path) -> None:
    (tmp_path / "tuned").mkdir()
    torch.multiprocessing.spawn(_share, (str(tmp_path),), nprocs=2)

"""The cost model ranks sensibly, and the floors are those of the hardware."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest

from codegen.config import Config
from codegen.expr import const
from codegen.limits import TARGETS, target
from codegen.plan import Launch, Plan
from codegen.problem import GRADIENTS, Problem, Shape
from codegen.render import render
from codegen.space import make_config, parse_config, valid_configs
from codegen.variants import VARIANTS, default_names
from tests import big_space
from tuner.candidates import survey
from tuner.costmodel import TERMS, _from_memory, floor_us, plausible_us, predict, resident_blocks, tensor_bytes
from tuner.executors import Resources
from tuner.guess import best_predicted, rank
from tuner.work import KERNELS, Setting, Work, work

H200 = target("sm_90")
ROW_VARIANTS = ("row_thread", "row_warp", "row_shared")


def problem(shape: str) -> Problem:
    return Problem.of(Shape.parse(shape))


def time_us(shape: str, config: str | Config) -> float:
    parsed = parse_config(config) if isinstance(config, str) else config
    return predict(problem(shape), parsed, H200).time_us


@cache
def ranked(shape: str, variants: tuple[str, ...] = ROW_VARIANTS) -> dict[Config, float]:
    """The predicted times of valid configs, fastest first."""
    return rank(survey(problem(shape), H200, variants))


def fastest(shape: str) -> Config:
    return next(iter(ranked(shape)))


def test_one_block_is_best_for_sixteen_rows() -> None:
    assert fastest("4,4,8,16")["reduction"] == "single_block"


@pytest.mark.parametrize("name", ROW_VARIANTS)
def test_one_block_is_hopeless_for_many_rows(name: str) -> None:
    alone = make_config(name, {"splits": 1, "reduction": "single_block"})
    spread = make_config(name, {"splits": 128, "reduction": "two_pass"})
    assert time_us("1,65536,64,64", alone) > 10 * time_us("1,65536,64,64", spread)


def test_two_passes_beat_atomics_where_many_blocks_meet() -> None:
    config = "row_warp:warps=2,rows=1,splits=128,reduction={}"
    crowded = "8,128,256,256"
    assert time_us(crowded, config.format("two_pass")) < time_us(crowded, config.format("atomic"))


def test_one_atomic_thread_per_row_never_wins_on_middling_shapes() -> None:
    times = ranked("32,16,64,64")
    atomic = min(time for config, time in times.items() if config.variant == "row_thread" and config["reduction"] == "atomic")
    assert atomic > 20 * min(times.values())


def test_shared_memory_beats_one_thread_per_row_on_many_rows() -> None:
    assert fastest("1,65536,64,64").variant == "row_shared"


def test_the_origin_kernel_is_predicted_near_its_measured_time() -> None:
    """8.8 us without zeroing, launched one by one on an H200; the model counts the four fills too."""
    fills = 4 * H200.launch_us
    assert time_us("4,4,8,16", "row_thread:reduction=atomic,splits=1,threads=32") - fills == pytest.approx(8.8, rel=0.3)


def test_what_limits_a_kernel() -> None:
    alone = predict(problem("4,4,8,16"), fastest("4,4,8,16"), H200)
    full = predict(problem("1,65536,64,64"), fastest("1,65536,64,64"), H200)
    assert [step.limited_by for step in alone.steps] == ["latency"]
    assert full.steps[0].limited_by in ("issue", "shared")


def test_one_block_more_than_sms_takes_another_round() -> None:
    config = "row_thread:threads=32,splits=1,reduction=atomic"
    rows = 32 * H200.sms
    assert time_us(f"1,{rows + 1},64,64", config) > 1.5 * time_us(f"1,{rows},64,64", config)


@pytest.mark.parametrize("name", VARIANTS)
def test_more_rows_never_take_less(name: str) -> None:
    config = make_config(name)
    times = [time_us(f"1,{rows},64,64", config) for rows in (1, 16, 256, 4096, 65536, 1 << 20)]
    assert times == sorted(times)
    assert times[-1] > 5 * times[0]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_one_gradient_takes_no_more_than_all(name: str, gradient: str) -> None:
    every = problem("32,16,64,64")
    one = replace(every, wants=frozenset({gradient}))
    config = make_config(name)
    assert predict(one, config, H200).time_us <= predict(every, config, H200).time_us


@pytest.mark.parametrize("shape", ["4,4,8,16", "32,16,64,64", "1,262144,128,128"])
@pytest.mark.parametrize("arch", TARGETS)
def test_no_prediction_is_below_what_would_be_believed(shape: str, arch: str) -> None:
    at, limits = problem(shape), target(arch)
    for config in list(ranked(shape))[::29]:
        prediction = predict(at, config, limits)
        assert prediction.time_us >= plausible_us(at, limits)
        hidden = render(at, config).plan.overlapping  # begin while the launch before ends
        assert all(step.time_us >= limits.launch_us for step in prediction.steps if step.name not in hidden)


@pytest.mark.parametrize(("threads", "registers", "shared", "blocks"), [
    (256, 32, 0, 8),  # threads: 2048 an SM
    (32, 16, 0, 32),  # block slots
    (1024, 64, 0, 1),  # registers: 65536 an SM
    (256, 33, 0, 6),  # registers come in units of 256 a warp
    (128, 255, 0, 2),
    (64, 32, 100_000, 2),  # shared memory, with 1 KB of each block kept by the driver
    (1024, 255, 300_000, 1),  # more than there is: the launch fails elsewhere, the model still answers
])
def test_resident_blocks(threads: int, registers: int, shared: int, blocks: int) -> None:
    assert resident_blocks(threads, registers, shared, H200) == blocks


def test_the_compilers_report_replaces_the_estimate() -> None:
    at, config = problem("1,65536,64,64"), parse_config("row_shared:threads=128,tile=8x8,splits=1024,reduction=atomic")
    estimated = predict(at, config, H200)
    few, many = (predict(at, config, H200, {"row_shared": Resources(registers, 0)}) for registers in (64, 255))
    assert estimated.resources["row_shared"].estimated and few.resources == {"row_shared": Resources(64, 0)}
    assert few.steps[-1].blocks_per_sm > many.steps[-1].blocks_per_sm
    assert few.time_us <= many.time_us
    half_reported = predict(at, parse_config("row_shared:reduction=two_pass"), H200, {"row_shared": Resources(64, 0)})
    guessed = {name: entry.estimated for name, entry in half_reported.resources.items()}
    assert guessed == {"row_shared": False, "sum_partials": True}


@pytest.mark.parametrize(("shape", "microseconds"), [
    ("4,4,8,16", 0.51), ("8,1024,768,2304", 32.7), ("1,262144,128,128", 94.1), ("1,1,4096,4096", 31.4)])
def test_the_floor_is_copy_bandwidth_or_one_launch(shape: str, microseconds: float) -> None:
    assert floor_us(problem(shape), H200) == pytest.approx(microseconds, rel=0.01)


def test_what_is_not_believed_lies_below_what_l2_could_serve() -> None:
    """Repeated calls find up to 50 MB in L2: only what goes beyond it must come from memory."""
    resident, streamed = problem("8,128,256,1024"), problem("1,1048576,64,64")
    assert plausible_us(resident, H200) < H200.launch_us
    assert 0.3 * floor_us(streamed, H200) < plausible_us(streamed, H200) < floor_us(streamed, H200)


def test_every_kernel_of_every_plan_has_an_entry_and_no_other() -> None:
    kernels: set[str] = set()
    shapes = ("32,16,64,64", "1,2,64,64", "1,64,512,512")
    for at in (*map(problem, shapes), Problem(512, 64, 64, "bfloat16"), Problem(512, 64, 256, "bfloat16")):
        for name, variant in VARIANTS.items():
            plans = [variant.plan(at, config.as_dict()) for config in valid_configs(at, H200, [name])[::5]]
            kernels |= {launch.kernel for plan in plans for launch in plan.launches}
    assert kernels == KERNELS.keys()


def test_unequal_tiles_are_spread_over_the_sms_of_the_gpu_in_question() -> None:
    """Where every tile has an SM of its own the deepest counts, where an SM has many the average."""
    seen: list[Setting] = []
    cost = KERNELS["gemm_mma"]
    with mock.patch.dict(KERNELS, {"gemm_mma": lambda setting: seen.append(setting) or cost(setting)}):  # type: ignore[arg-type]
        predict(problem("8,256,256,256"), make_config("gemm_mma"), H200)
    few, as_it_is, many = (work("gemm_mma", replace(seen[0], sms=sms)).chain for sms in (8, seen[0].sms, 4096))
    assert seen[0].sms == H200.sms and few < as_it_is <= many


def test_a_kernel_the_model_does_not_know_is_taken_for_a_plain_one() -> None:
    few, many = (work("newcomer", Setting(problem(shape), {}, {"reduction": "atomic"}, 132, 256, 132, 1e5, 132))
                 for shape in ("4,4,8,16", "4,400,80,160"))
    assert 0 < few.chain < many.chain and few.instructions < many.instructions and few.l2_bytes < many.l2_bytes
    assert few.atomics == 132 * (8 * 16 + 2 * 8 + 16) and few.meetings == 132


@pytest.mark.parametrize("shape", ["4,4,8,16", "32,16,64,64", "1,71,229,33", "1,262144,128,128", "1,3,100003,2", "1,1,1,1"])
def test_the_quick_guess_is_near_the_best_of_all(shape: str) -> None:
    times = ranked(shape, default_names())
    assert time_us(shape, best_predicted(problem(shape), H200)) <= 1.1 * min(times.values())


def test_bytes_follow_the_data_types() -> None:
    wide, narrow, mixed = (Problem(1 << 18, 128, 128, dtype, param_dtype=param) for dtype, param in (
        ("float32", ""), ("bfloat16", ""), ("bfloat16", "float32")))
    assert tensor_bytes(narrow) == tensor_bytes(wide) // 2
    assert tensor_bytes(mixed) == tensor_bytes(narrow) + 2 * (2 * 128 * 128 + 4 * 128 + 128)
    assert floor_us(narrow, H200) == pytest.approx(47.0, rel=0.01)
    config = make_config("row_warp", {"splits": 256})
    assert predict(narrow, config, H200).time_us < predict(wide, config, H200).time_us


def test_each_launch_waits_for_the_memory_that_it_goes_through_itself() -> None:
    """Two passes over a million rows: the second reads some partial sums, the first all of x and dy."""
    at = problem("1,1048576,64,64")
    first, second = predict(at, parse_config("row_shared:splits=128,reduction=two_pass"), H200).steps
    assert (first.name, second.name) == ("row_shared", "sum_partials")
    memory = TERMS.index("memory")
    assert first.terms[memory] == pytest.approx(floor_us(at, H200), rel=0.05)
    assert second.terms[memory] < 0.02 * first.terms[memory]


def test_what_l2_keeps_between_calls() -> None:
    """All of what has room; hardly anything of many times as much; and never less is missed where there is more."""
    sizes = [share * H200.l2_bytes // 100 for share in range(90, 1000)]
    missed = [_from_memory(size, H200.l2_bytes) for size in sizes]
    assert all(lost == 0.0 for size, lost in zip(sizes, missed, strict=True) if size <= H200.l2_bytes)
    assert all(0 <= more - less < H200.l2_bytes / 40 for less, more in itertools.pairwise(missed))
    assert missed[-1] > 0.999 * sizes[-1]
    twice = _from_memory(2 * H200.l2_bytes, H200.l2_bytes) / (2 * H200.l2_bytes)
    assert 1 - twice == pytest.approx(math.exp(-2 * twice), rel=1e-6)


def costs(**work: float) -> float:
    """Microseconds of one launch of 132 blocks of 256 threads that does this work."""
    setting = Work(**{"chain": 100.0, "instructions": 0.0, "wavefronts": 0.0, "l2_bytes": 0.0, **work})
    with big_space.registered(), mock.patch.dict(KERNELS, {big_space.NAME: lambda _: setting}):  # type: ignore[arg-type]
        plan = Plan((Launch(big_space.NAME, const(132), 256),))
        variant = replace(VARIANTS[big_space.NAME], plan=lambda problem, params: plan)
        with mock.patch.dict(VARIANTS, {big_space.NAME: variant}):  # type: ignore[arg-type]
            return predict(problem("4,4,8,16"), make_config(big_space.NAME), H200).time_us


def test_matrix_units_work_at_their_own_rate() -> None:
    """mma.sync at 0.63 of 989 TFLOP/s, on all SMs of an H200 at 1.98 GHz (the data sheet's rate is at 1.83)."""
    products = 1e12
    seconds = (costs(matrix=products) - costs()) * 1e-6
    assert 2 * products / seconds == pytest.approx(0.63 * 989e12 * 1.98 / 1.83, rel=0.02)
    assert costs(matrix=2 * products) > 1.9 * costs(matrix=products)

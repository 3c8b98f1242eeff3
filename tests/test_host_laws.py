"""The laws of the host executor. Each has a kernel that breaks it and the sentence that says so, and a sibling that keeps it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.host_laws import ORDERS, PARAMS, Law, Run, best_rate, law_fixtures, law_tests
from tuner.dtypes import POISON
from tuner.errors import LaunchError

SIZE = 61  # elements of x and y: a multiple of nothing

LAWS = [
    # Barriers
    Law("exit_before_barrier",
        "if (threadIdx.x == 5) return;\n__syncthreads();",
        "__syncthreads();\nif (threadIdx.x == 5) return;\np.y[0] = 1.0f;",
        "block 0, thread 5: leaves the kernel while thread 0 waits at __syncthreads (line 2)"),
    Law("barrier_after_exit",
        "if (threadIdx.x < 5) return;\n__syncthreads();",
        "if (threadIdx.x < 5) p.y[0] = 1.0f;\n__syncthreads();",
        "block 0, thread 5: waits at __syncthreads (line 2), but thread 4 has left the kernel"),
    Law("two_barriers",
        "if (threadIdx.x < 32) __syncthreads();\nelse __syncthreads();",
        "__syncthreads();\n__syncthreads();",
        "block 0, thread 32: waits at __syncthreads (line 2) while thread 0 waits at the one of line 1"),
    Law("barrier_in_uneven_loop",
        "for (int i = 0; i < 2 + (threadIdx.x == 9); ++i)\n  __syncthreads();",
        "for (int i = 0; i < 3; ++i)\n  __syncthreads();",
        "block 0, thread 9: waits at __syncthreads (line 2), but thread 8 has left the kernel"),
    Law("barrier_against_shuffle",
        "if (threadIdx.x == 3) __syncthreads();\nelse __syncwarp();",
        "__syncwarp();\n__syncthreads();",
        "block 0, thread 0: waits at __syncwarp (line 2) with mask 0xffffffff for thread 3, which waits at "
        "__syncthreads (line 1)", block=32),
    # Warps
    Law("exit_before_shuffle",
        "if (threadIdx.x == 39) return;\np.y[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);",
        "if (threadIdx.x >= 32) return;\np.y[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);",
        "block 0, thread 39: leaves the kernel while thread 32 waits for it at __shfl_xor_sync (line 2)"),
    Law("shuffle_after_exit",
        "if (threadIdx.x == 32) return;\np.y[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);",
        "if (threadIdx.x % 32 == 0) return;\np.y[0] = __shfl_xor_sync(0xfffffffeu, 1.0f, 0);",
        "block 0, thread 33: calls __shfl_xor_sync (line 2) with mask 0xffffffff, but lane 0 (thread 32) has left the kernel"),
    Law("absent_lane_shuffle",
        "p.y[0] = __shfl_down_sync(0xffffffffu, 1.0f, 1);",
        "p.y[0] = __shfl_down_sync(0x0000ffffu, 1.0f, 1, 16);",
        "block 0, thread 0: calls __shfl_down_sync (line 1) with mask 0xffffffff, but the block of 16 threads has no lane 16 "
        "in this warp", block=16),
    Law("absent_lane_ballot",
        "p.y[0] = __ballot_sync(0xffffffffu, 1);",
        "p.y[0] = __ballot_sync(threadIdx.x < 32 ? 0xffffffffu : 0xffu, 1);",
        "block 0, thread 32: calls __ballot_sync (line 1) with mask 0xffffffff, but the block of 40 threads has no lane 8 in "
        "this warp", block=40),
    Law("absent_lane_any", "p.y[0] = __any_sync(0xfu, 1);", "p.y[0] = __any_sync(7u, 1);",
        "block 0, thread 0: calls __any_sync (line 1) with mask 0x0000000f, but the block of 3 threads has no lane 3 in this "
        "warp", block=3),
    Law("absent_lane_all", "p.y[0] = __all_sync(0xfu, 1);", "p.y[0] = __all_sync(7u, 1);",
        "block 0, thread 0: calls __all_sync (line 1) with mask 0x0000000f, but the block of 3 threads has no lane 3 in this "
        "warp", block=3),
    Law("absent_lane_syncwarp", "__syncwarp();", "__syncwarp(7u);",
        "block 0, thread 0: calls __syncwarp (line 1) with mask 0xffffffff, but the block of 3 threads has no lane 3 in this "
        "warp", block=3),
    Law("mask_without_caller",
        "p.y[0] = __shfl_sync(0x0000ffffu, 1.0f, 0);",
        "p.y[0] = __shfl_sync(threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u, 1.0f, threadIdx.x % 32);",
        "block 0, thread 16: calls __shfl_sync (line 1) with mask 0x0000ffff, which leaves out its own lane 16"),
    Law("source_outside_mask",
        "if (threadIdx.x < 16) p.y[0] = __shfl_down_sync(0x0000ffffu, 1.0f, 8);",
        "if (threadIdx.x < 16) p.y[0] = __shfl_down_sync(0x0000ffffu, 1.0f, 8, 16);",
        "block 0, thread 8: reads from lane 16 in __shfl_down_sync (line 1), which its mask 0x0000ffff leaves out"),
    Law("lane_never_comes",
        "if (threadIdx.x < 20) p.y[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);\n"
        "else p.y[1] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);",
        "p.y[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);",
        "block 0, thread 0: waits at __shfl_xor_sync (line 1) with mask 0xffffffff for thread 20, which waits at "
        "__shfl_xor_sync (line 2) with mask 0xffffffff", block=32),
    Law("two_kinds_of_call",
        "p.y[0] = threadIdx.x == 4 ? __any_sync(0xffffffffu, 1) : __all_sync(0xffffffffu, 1);",
        "p.y[0] = __any_sync(0xffffffffu, threadIdx.x == 4);",
        "block 0, thread 0: waits at __all_sync (line 1) with mask 0xffffffff for thread 4, which waits at __any_sync (line 1) "
        "with mask 0xffffffff", block=32),
    Law("two_masks",
        "__syncwarp(threadIdx.x == 0 ? 3u : 2u + 0xfffffffdu);",
        "__syncwarp(threadIdx.x == 0 ? 1u : 0xfffffffeu);",
        "block 0, thread 0: waits at __syncwarp (line 1) with mask 0x00000003 for thread 1, which waits at __syncwarp (line 1) "
        "with mask 0xffffffff", block=32),
    Law("width_of_shuffle", "p.y[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 1, 12);",
        "p.y[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 1, 8);",
        "block 0, thread 0: calls __shfl_xor_sync (line 1) with width 12; it must be a power of two, at most 32"),
    # Memory
    Law("read_past_end", "p.y[0] = p.x[threadIdx.x];", "if (threadIdx.x < p.n) p.y[0] = p.x[threadIdx.x];",
        f"block 0, thread {SIZE}: reads element {SIZE} of x, which has {SIZE} elements"),
    Law("write_past_end", "p.y[threadIdx.x] = 1.0f;", "if (threadIdx.x < p.n) p.y[threadIdx.x] = 1.0f;",
        f"block 0, thread {SIZE}: writes element {SIZE} of y, which has {SIZE} elements"),
    Law("read_before_begin", "p.y[0] = p.x[(int)threadIdx.x - 1];", "p.y[0] = p.x[threadIdx.x % 8];",
        f"block 0, thread 0: reads element -1 of x, which has {SIZE} elements", layout="begin"),
    Law("write_before_begin", "p.y[(int)threadIdx.x - 2] = 1.0f;", "p.y[threadIdx.x % 8] = 1.0f;",
        f"block 0, thread 0: writes element -2 of y, which has {SIZE} elements", layout="begin"),
    Law("read_far_away", "p.y[0] = p.x[INT64_C(2147483647)];", "p.y[0] = p.x[60];",
        f"block 0, thread 0: reads element 2147483647 of x, which has {SIZE} elements"),
    Law("write_next_to_end", "if (threadIdx.x == 7) p.y[p.n] = 1.0f;", "if (threadIdx.x == 7) p.y[p.n - 1] = 1.0f;",
        "some thread writes just after the last element of y", layout="begin"),
    Law("write_next_to_begin", "if (threadIdx.x == 7) p.y[-1] = 1.0f;", "if (threadIdx.x == 7) p.y[0] = 1.0f;",
        "some thread writes just before the first element of y", layout="end"),
    Law("write_to_input", "const_cast<float*>(p.x)[threadIdx.x + 2] = 1.0f;", "p.y[threadIdx.x % 8] = p.x[2];",
        "block 0, thread 0: writes element 2 of x, which is an input"),
    Law("shared_past_end", "dynamic_shared()[threadIdx.x + 1] = 1.0f;", "dynamic_shared()[threadIdx.x] = 1.0f;",
        "block 0, thread 63: writes element 64 of the dynamic shared memory, which has 64 elements"),
    Law("shared_before_begin", "p.y[0] = dynamic_shared()[(int)threadIdx.x - 9];", "p.y[0] = dynamic_shared()[threadIdx.x];",
        "block 0, thread 0: reads element -9 of the dynamic shared memory, which has 64 elements", layout="begin"),
    Law("shared_next_to_begin", "dynamic_shared()[-1] = 1.0f;", "dynamic_shared()[0] = 1.0f;",
        "some thread writes just before the first element of the dynamic shared memory"),
    Law("no_shared_memory", "dynamic_shared()[threadIdx.x] = 1.0f;", "p.y[0] = 1.0f;",
        "block 0, thread 0: writes element 0 of the dynamic shared memory, which has 0 elements", shared=0),
    Law("null_pointer", "p.y[0] = p.none[3];", "p.y[0] = p.none ? p.none[3] : 0.0f;",
        "block 0, thread 0: reads through a null pointer (offset 12): an output that is not wanted, or an input that is absent"),
    Law("wild_pointer", "p.y[0] = *reinterpret_cast<const float*>(uintptr_t{0x7000000});", "p.y[0] = 1.0f;",
        "block 0, thread 0: reads at address 0x7000000, which belongs to no buffer"),
    Law("impossible_pointer", "p.y[0] = *reinterpret_cast<const float*>(uintptr_t{0x4000000000000000});", "p.y[0] = 1.0f;",
        "block 0, thread 0: reads at an address no pointer can have"),
    Law("misaligned_load", "const float4 v = *reinterpret_cast<const float4*>(p.x + 1);\np.y[0] = v.x + v.w;",
        "const float4 v = *reinterpret_cast<const float4*>(p.x + 4);\np.y[0] = v.x + v.w;",
        "block 0, thread 0: line 1: uses element 1 of x as 'const struct float4', which must be at a multiple of 16 bytes",
        layout="begin"),
    Law("misaligned_store", "*reinterpret_cast<float2*>(p.y + (threadIdx.x + 7) % 8) = make_float2(1.0f, 2.0f);",
        "*reinterpret_cast<float2*>(p.y + (threadIdx.x + 7) / 8 * 2) = make_float2(1.0f, 2.0f);",
        "block 0, thread 0: line 1: uses element 7 of y as 'struct float2', which must be at a multiple of 8 bytes",
        layout="begin"),
    Law("misaligned_streaming_store",
        "const unsigned words[4] = {1, 2, 3, 4};\nstore_streaming(p.y + 6, words);",
        "const unsigned words[4] = {1, 2, 3, 4};\nstore_streaming(p.y + 8, words);",
        "block 0, thread 0: line 2: stores 16 bytes at element 6 of y, which is at no multiple of them", layout="begin"),
    # Asynchronous copies
    Law("copy_left_behind", "copy_async<1>(dynamic_shared() + threadIdx.x, p.x);",
        "copy_async<1>(dynamic_shared() + threadIdx.x, p.x);\nwait_for_copies();",
        "block 0, thread 0: leaves the kernel before its asynchronous copies have ended"),
    Law("copy_past_end", "copy_async<1>(dynamic_shared() + threadIdx.x, p.x + threadIdx.x);\nwait_for_copies();",
        "copy_async<1>(dynamic_shared() + threadIdx.x, p.x + threadIdx.x % p.n);\nwait_for_copies();",
        f"block 0, thread {SIZE}: reads element {SIZE} of x, which has {SIZE} elements"),
    Law("copy_to_global", "copy_async<1>(p.y + 5, p.x);\nwait_for_copies();",
        "copy_async<1>(dynamic_shared() + 5, p.x);\nwait_for_copies();",
        "block 0, thread 0: line 1: copies to element 5 of y, not to shared memory"),
    Law("copy_from_shared", "copy_async<1>(dynamic_shared(), dynamic_shared() + 3);\nwait_for_copies();",
        "copy_async<1>(dynamic_shared(), p.x + 3);\nwait_for_copies();",
        "block 0, thread 0: line 1: copies from element 3 of the dynamic shared memory, not from global memory"),
    Law("misaligned_copy", "copy_async<4>(dynamic_shared() + 6, p.x + 4);\nwait_for_copies();",
        "copy_async<2>(dynamic_shared() + 6, p.x + 4);\nwait_for_copies();",
        "block 0, thread 0: line 1: copies 16 bytes at element 6 of the dynamic shared memory, which is at no multiple of them",
        layout="begin"),
    # Arithmetic a GPU leaves undefined
    Law("local_index", "float a[4] = {};\na[p.n % 7] = 1.0f;\np.y[0] = a[p.n % 4];",
        "float a[4] = {};\na[p.n % 4] = 1.0f;\np.y[0] = a[p.n % 4];",
        "block 0, thread 0: line 2: index 5 is outside of a local array of type 'float [4]'"),
    Law("integer_overflow", "const int n = static_cast<int>(p.n);\np.y[0] = n * 100000000;",
        "const int64_t n = p.n;\np.y[0] = n * 100000000;",
        "block 0, thread 0: line 2: a multiplication overflows 'int'"),
    Law("division_by_zero", "p.y[0] = p.n / (p.n - 61 + threadIdx.x / 64);", "p.y[0] = p.n / (p.n - 60);",
        "block 0, thread 0: line 1: a division by zero, or one that overflows 'long int'"),
    Law("shift", "p.y[0] = 1u << (p.n - 29);", "p.y[0] = 1u << (p.n - 30);",
        "block 0, thread 0: line 1: shifts 'unsigned int' by a negative number or by all its bits"),
    Law("trap", "if (threadIdx.x == 2) __trap();", "if (threadIdx.x == 64) __trap();",
        "block 0, thread 2: line 1: calls __trap"),
    Law("stack", "volatile float a[100000];\na[p.n] = 1.0f;\np.y[0] = a[p.n];",
        "volatile float a[10000];\na[p.n] = 1.0f;\np.y[0] = a[p.n];",
        "block 0, thread 0: overflows its stack: its local variables take more than 256 KiB"),
]

# Behaviour that is no error: bodies of kernels by name.
LAWFUL = {
    "unset_shared": "float* s = dynamic_shared();\nif (threadIdx.x > 0 || blockIdx.x == 0) s[threadIdx.x] = 1.0f;\n"
                    "__syncthreads();\nif (threadIdx.x < 8) p.y[threadIdx.x] = s[threadIdx.x];",
    "early_copy": "float* s = dynamic_shared();\ns[threadIdx.x] = 5.0f;\n"
                  "copy_async<1>(s + threadIdx.x, p.x + threadIdx.x % p.n);\np.y[0] = s[threadIdx.x];\n"
                  "wait_for_copies();\np.y[1] = s[threadIdx.x];",
    "race": "float* s = dynamic_shared();\ns[threadIdx.x] = 1.0f + threadIdx.x;\n"
            "if (threadIdx.x < p.n) p.y[threadIdx.x] = s[threadIdx.x ^ 1];",
    "no_race": "float* s = dynamic_shared();\ns[threadIdx.x] = 1.0f + threadIdx.x;\n__syncthreads();\n"
               "if (threadIdx.x < p.n) p.y[threadIdx.x] = s[threadIdx.x ^ 1];",
    "last_block_wins": "if (threadIdx.x == 0) p.y[0] = blockIdx.x;",
    "switches": "for (int64_t i = 0; i < p.n; ++i) __syncthreads();",
    "multiply_adds": "const float* s = dynamic_shared();\nfloat sum = 0.0f;\n"
                     "for (int64_t r = 0; r < p.n; ++r) {\n  for (int i = 0; i < 61; ++i) sum += p.x[i] * s[i];\n}\n"
                     "p.y[0] = sum;",
}


kernels, run = law_fixtures(PARAMS, LAWS, LAWFUL, SIZE)

TestLaws = law_tests(LAWS)


def test_error_names_the_block(run: Run) -> None:
    with pytest.raises(LaunchError, match=r"^kernel read_past_end_broken, block 4, thread 63:"):
        run("read_past_end_broken", grid=5, order="reverse")


def test_unset_shared_memory_is_nan_in_every_block(run: Run) -> None:
    assert run("unset_shared", grid=1)[0] == 1.0
    y = run("unset_shared", grid=2)
    assert math.isnan(y[0]) and np.array_equal(y[1:8], np.ones(7))


def test_asynchronous_copy_is_nan_until_it_is_waited_for(run: Run) -> None:
    y = run("early_copy", block=1)
    assert math.isnan(y[0]) and y[1] == 1.0


def test_unwritten_output_is_nan(run: Run) -> None:
    bits = run("unset_shared")[8:].view(np.uint32)
    assert (bits == POISON).all()  # a NaN that, taken for an index, lies in the fence behind any buffer


def test_race_shows_as_a_result_that_depends_on_the_order(run: Run) -> None:
    racy = [run("race", order=order) for order in ORDERS]
    sound = [run("no_race", order=order) for order in ORDERS]
    assert not np.array_equal(racy[0], racy[1], equal_nan=True)
    assert all(np.array_equal(y, sound[0]) for y in sound) and not np.isnan(sound[0]).any()


def test_order_of_blocks(run: Run) -> None:
    last = {order: run("last_block_wins", grid=50, order=order)[0] for order in ORDERS}
    assert last["forward"] == 49.0 and last["reverse"] == 0.0
    assert len({last[order] for order in ORDERS if order.startswith("shuffled")}) > 1


def test_shuffled_order_is_repeatable(run: Run) -> None:
    results = [run("race", order="shuffled:5") for _ in range(2)]
    assert np.array_equal(results[0], results[1], equal_nan=True)


@pytest.mark.parametrize("order", ["sideways", "shuffled", "shuffled:x", "forward:1"])
def test_unknown_order(order: str, run: Run) -> None:
    with pytest.raises(ValueError, match=r"order must be forward, reverse or shuffled:<seed>"):
        run("no_race", order=order)


@pytest.mark.parametrize(("sizes", "says"), [
    ({"grid": 0}, "a grid of 0; it must be 1 to 2147483647"),
    ({"grid": 2**31}, "a grid of 2147483648; it must be 1 to 2147483647"),
    ({"block": 0}, "a block of 0; it must be 1 to 1024"),
    ({"block": 1025}, "a block of 1025; it must be 1 to 1024"),
    ({"shared": 227 * 1024 + 4}, "dynamic shared memory of 232452; it must be 0 to 232448"),
])
def test_launch_limits(sizes: dict[str, int], says: str, run: Run) -> None:
    with pytest.raises(LaunchError, match=f"^kernel no_race: {says}$"):
        run("no_race", **sizes)


def test_largest_launch(run: Run) -> None:
    run("last_block_wins", block=1024, shared=227 * 1024)


@pytest.mark.parametrize("block", [32, 256, 1024])
def test_ten_million_switches_a_second(block: int, run: Run) -> None:
    barriers = 500_000 // block
    assert best_rate(block * barriers, lambda: run("switches", block=block, n=barriers)) > 1e7


def test_a_hundred_million_multiply_adds_a_second(run: Run) -> None:
    repeats = 1000
    assert best_rate(64 * repeats * 61, lambda: run("multiply_adds", n=repeats)) > 1e8

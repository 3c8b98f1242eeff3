"""Hopper's own instructions on the host: barriers with phases, bulk copies and products of warpgroups, and their laws."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.host_laws import ORDERS, PARAMS, Law, Run, best_rate, law_fixtures, law_tests
from tuner.executors.host import HostExecutor
from tuner.executors.host_runtime import Kernels

SIZE = 64  # elements of x and y

BARRIER = "auto* b = reinterpret_cast<unsigned long long*>(dynamic_shared());\n"  # line 1; behind it: 240 bytes from byte 16 on
ONE = f"{BARRIER}if (threadIdx.x == 0) init_barrier(b, 1);\n__syncthreads();\nfloat* s = dynamic_shared() + 4;\n"  # lines 1 to 4
BULK = "if (threadIdx.x == 0) {\n  arrive_expecting(b, 64);\n"

# Descriptors of 64 rows of 128 bytes from where shared memory is a multiple of 1024.
PRODUCT = """char* s = reinterpret_cast<char*>(dynamic_shared());
s += (1024 - shared_address(s) % 1024) % 1024;
const auto at = [&](int place) { return shared_address(s + place) >> 4 | 64ull << 32 | 1ull << 62; };
float d[1][4] = {};
"""  # lines 1 to 4
ZEROS = "for (int i = threadIdx.x; i < 16384; i += blockDim.x) s[i] = 0;\n__syncthreads();\n"  # lines 5 and 6
FENCED = f"{PRODUCT}{ZEROS}fence_products();\n"
MULTIPLY = "multiply_group_f16<false>(d, at(0), at(0), true);\n"
END = "commit_products();\nwait_for_products<0>();\n"
REGISTERS = f"{PRODUCT}{ZEROS}unsigned a[4] = {{}};\nfence_products();\n"  # lines 1 to 8
FROM_REGISTERS = "multiply_group_registers_f16(d, a, at(0), true);\n"
SHARED = 16384 + 1024


def bulk(*copies: str) -> str:
    """A kernel that expects 64 bytes, starts these copies in lines 7 and on, and waits for them."""
    return f"{ONE}{BULK}" + "".join(f"  {copy}\n" for copy in copies) + "}\nwait_phase(b, 0);"


def of_groups(name: str, broken: str, kept: str, says: str, block: int = 128) -> Law:
    """A law of products."""
    return Law(name, broken, kept, f"block 0, {says}", block=block, shared=SHARED)


S = "of the dynamic shared memory"

LAWS = [
    Law("barrier_in_global_memory",
        f"{BARRIER}init_barrier(reinterpret_cast<unsigned long long*>(p.y), 1);", f"{BARRIER}init_barrier(b, 1);",
        "block 0, thread 0: line 2: makes a barrier of element 0 of y, not of shared memory"),
    Law("barrier_at_four_bytes",
        f"{BARRIER}init_barrier(reinterpret_cast<unsigned long long*>(dynamic_shared() + 1), 1);",
        f"{BARRIER}init_barrier(b, 1);",
        f"block 0, thread 0: line 2: makes a barrier at element 1 {S}, which is at no multiple of 8 bytes"),
    Law("barrier_of_nobody", f"{BARRIER}init_barrier(b, 0);", f"{BARRIER}init_barrier(b, 2047);",
        "block 0, thread 0: line 2: makes a barrier of 0 arrivals; it must be 1 to 2047"),
    Law("no_barrier_yet",
        f"{BARRIER}arrive(b + 1 + threadIdx.x % 2);",
        f"{BARRIER}init_barrier(b + threadIdx.x % 2, 64);\narrive(b + threadIdx.x % 2);",
        f"block 0, thread 0: line 2: uses element 2 {S} as a barrier, which is none, or none any more",
        block=1),
    Law("no_barrier_any_more",
        f"{ONE}dynamic_shared()[1] = 1.0f;\n__syncthreads();\nwait_phase(b, 1);",
        f"{ONE}dynamic_shared()[2] = 1.0f;\nwait_phase(b, 1);",
        f"block 0, thread 0: line 7: uses element 0 {S} as a barrier, which is none, or none any more",
        block=1),
    Law("one_arrival_too_many",
        f"{ONE}if (threadIdx.x == 0) arrive_expecting(b, 64);\nif (threadIdx.x == 0) arrive(b);",
        f"{ONE}if (threadIdx.x == 0) arrive(b);\nif (threadIdx.x == 0) arrive(b);",
        f"block 0, thread 0: line 6: arrives at the barrier at element 0 {S}, to which all have come in "
        "this phase"),
    Law("nobody_arrives",
        f"{ONE}wait_phase(b, 0);", f"{ONE}if (threadIdx.x == 5) arrive(b);\nwait_phase(b, 0);",
        "block 0, thread 0: waits at wait_phase (line 5) for threads that never come"),
    Law("bytes_never_come",
        bulk(), bulk("copy_bulk(s, p.x, 64, b);"),
        "block 0, thread 0: waits at wait_phase (line 8) for threads that never come"),
    Law("copy_of_some_bytes",
        bulk("copy_bulk(s, p.x, 60, b);"), bulk("copy_bulk(s, p.x, 64, b);"),
        "block 0, thread 0: line 7: copies 60 bytes in bulk; it must be a multiple of 16"),
    Law("copy_to_eight_bytes",
        bulk("copy_bulk(s + 2, p.x, 64, b);"),
        bulk("copy_bulk(s + 4, p.x, 64, b);"),
        f"block 0, thread 0: line 7: copies in bulk at element 6 {S}, which is at no multiple of 16 bytes"),
    Law("copy_from_four_bytes",
        bulk("copy_bulk(s, p.x + 1, 64, b);"),
        bulk("copy_bulk(s, p.x + 4, 64, b);"),
        "block 0, thread 0: line 7: copies in bulk at element 1 of x, which is at no multiple of 16 bytes"),
    Law("copy_past_the_end",
        bulk("copy_bulk(s, p.x + 52, 64, b);"),
        bulk("copy_bulk(s, p.x + 48, 64, b);"),
        "block 0, thread 0: line 7: copies 64 bytes in bulk from element 52 of x, past the end"),
    Law("copy_past_the_end_of_shared_memory",
        bulk("copy_bulk(s + 48, p.x, 64, b);"),
        bulk("copy_bulk(s + 44, p.x, 64, b);"),
        f"block 0, thread 0: line 7: copies 64 bytes in bulk to element 52 {S}, past the end"),
    Law("copy_upon_a_copy",
        bulk("copy_bulk(s, p.x, 32, b);", "copy_bulk(s + 4, p.x, 32, b);"),
        bulk("copy_bulk(s, p.x, 32, b);", "copy_bulk(s + 8, p.x, 32, b);"),
        f"block 0, thread 0: line 8: copies in bulk to element 8 {S}, where another copy has not ended"),
    Law("copy_left_behind",
        f"{ONE}{BULK}  copy_bulk(s, p.x, 64, b);\n}}",
        f"{ONE}{BULK}  copy_bulk(s, p.x, 64, b);\n  wait_phase(b, 0);\n}}",
        f"block 0, thread 63: leaves the kernel, as all others have, before a bulk copy to element 4 {S} "
        "has ended"),
    Law("too_few_threads_come",
        "if (threadIdx.x < 32) sync_threads(3, 64);", "if (threadIdx.x < 32) sync_threads(3, 64);\nelse arrive_threads(3, 64);",
        "block 0, thread 0: waits at sync_threads (line 1) for threads that never come"),
    Law("part_of_a_warp_elects",
        "if (threadIdx.x > 7 && is_elected()) p.y[0] = 1.0f;", "if (is_elected() && threadIdx.x < 32) p.y[0] = 1.0f;",
        "block 0, thread 8: calls is_elected (line 1), but lane 0 (thread 0) has left the kernel"),
    Law("part_of_a_warp", "sync_threads(1, 48);", "sync_threads(1, 64);",
        "block 0, thread 0: line 1: waits for 48 threads of 64; it must be whole warps of the block"),
    Law("number_of_syncthreads", "sync_threads(0, 64);", "sync_threads(15, 64);",
        "block 0, thread 0: line 1: uses barrier 0; it must be 1 to 15"),
    Law("two_counts",
        "if (threadIdx.x < 32) sync_threads(1, 64);\nelse sync_threads(1, 32);", "sync_threads(1 + threadIdx.x / 32, 32);",
        "block 0, thread 32: line 2: waits for 32 threads at barrier 1, where others wait for 64"),
    of_groups("product_without_a_fence", f"{PRODUCT}{ZEROS}{MULTIPLY}{END}", f"{FENCED}{MULTIPLY}{END}",
              "thread 0: calls multiply_group (line 7) without fence_products before it"),
    of_groups("product_after_the_sums_were_free",
              f"{FENCED}for (int i = 0; i < 2; ++i) {{\n  {MULTIPLY}{END}}}",
              f"{FENCED}for (int i = 0; i < 2; ++i) {{\n  {MULTIPLY}commit_products();\n}}\nwait_for_products<0>();",
              "thread 0: calls multiply_group (line 9) without fence_products before it"),
    of_groups("product_left_behind",
              f"{FENCED}{MULTIPLY}commit_products();\nwait_for_products<1>();",
              f"{FENCED}{MULTIPLY}commit_products();\ncommit_products();\nwait_for_products<1>();",
              "thread 0: leaves the kernel before products of its warpgroup were waited for"),
    of_groups("product_in_no_group", f"{FENCED}{MULTIPLY}wait_for_products<0>();", f"{FENCED}{MULTIPLY}{END}",
              "thread 0: leaves the kernel before products of its warpgroup were waited for"),
    of_groups("three_warps_multiply", f"{FENCED}if (threadIdx.x >= 32) {MULTIPLY}{END}", f"{FENCED}{MULTIPLY}{END}",
              "thread 32: calls multiply_group (line 8), but threads of its warpgroup have left the kernel"),
    of_groups("part_of_a_warpgroup", f"{FENCED}{MULTIPLY}{END}", f"{FENCED}if (threadIdx.x < 128) {MULTIPLY}{END}",
              "thread 128: calls multiply_group (line 8), but the block of 160 threads has only a part of this warpgroup",
              block=160),
    of_groups("registers_changed_too_early", f"{REGISTERS}{FROM_REGISTERS}commit_products();\na[2] = 1;\nwait_for_products<0>();",
              f"{REGISTERS}{FROM_REGISTERS}{END}a[2] = 1;",
              "thread 31: has changed registers of a before the product that reads them (line 9) was waited for"),
    of_groups("registers_changed_without_a_fence",
              f"{REGISTERS}{FROM_REGISTERS}commit_products();\nunsigned b[4] = {{}};\n"
              f"multiply_group_registers_f16(d, b, at(0), true);\n{END}",
              f"{REGISTERS}{FROM_REGISTERS}commit_products();\nunsigned b[4] = {{}};\nfence_products();\n"
              f"multiply_group_registers_f16(d, b, at(0), true);\n{END}",
              "thread 0: calls multiply_group (line 12) without fence_products before it"),
    of_groups("registers_in_one_thread", f"{REGISTERS}if (threadIdx.x < 5) {FROM_REGISTERS}else {MULTIPLY}{END}",
              f"{REGISTERS}{FROM_REGISTERS}{END}",
              "thread 127: calls multiply_group (line 10) with other operands than thread 0 (line 9)"),
    of_groups("two_descriptors",
              f"{FENCED}multiply_group_f16<false>(d, at(0), at(threadIdx.x / 32 * 1024), true);\n{END}",
              f"{FENCED}multiply_group_f16<false>(d, at(0), at(1024), true);\n{END}",
              "thread 127: calls multiply_group (line 8) with other operands than thread 0 (line 8)"),
    of_groups("operand_past_the_end",
              f"{FENCED}multiply_group_f16<false>(d, at(10 * 1024), at(0), true);\n{END}",
              f"{FENCED}multiply_group_f16<false>(d, at(9 * 1024), at(0), true);\n{END}",
              f"thread 0: line 8: the descriptor of a reaches element 4591 {S}"),
    of_groups("swizzle_that_is_not_known",
              f"{FENCED}multiply_group_f16<false>(d, at(0), at(0) ^ 3ull << 62, true);\n{END}",
              f"{FENCED}multiply_group_f16<false>(d, at(0) ^ 3ull << 62, at(0), true);\n{END}",
              "thread 0: line 8: the descriptor of b has a swizzle or base offset that is not known here"),
]

# Bodies of kernels by name.
LAWFUL = {
    "elected": "for (int i = 0; i < 5; ++i) if (is_elected()) p.y[threadIdx.x / 32] = (i == 0 ? 0 : p.y[threadIdx.x / 32]) + 1;",
    # What is there before the wait, and after it.
    "landing": f"{ONE}if (threadIdx.x == 0) {{\n  for (int i = 0; i < 60; ++i) s[i] = -1.0f;\n  arrive_expecting(b, 64);\n"
               "  copy_bulk(s, p.x, 64, b);\n  p.y[0] = s[0];\n  p.y[1] = s[16];\n}\n__syncthreads();\nwait_phase(b, 0);\n"
               "if (threadIdx.x >= 2 && threadIdx.x < 20) p.y[threadIdx.x] = s[threadIdx.x - 2];",
    # Numbers go round in a ring of two places from one thread to the others.
    "ring": f"{BARRIER}if (threadIdx.x < 2) init_barrier(b + threadIdx.x, 1), init_barrier(b + 2 + threadIdx.x, 63);\n"
            "__syncthreads();\nfloat* s = dynamic_shared() + 8;\nfloat sum = 0.0f;\n"
            "for (int i = 0; i < 9; ++i) {\n  const int place = i % 2, turn = i / 2;\n  if (threadIdx.x == 40) {\n"
            "    wait_phase(b + 2 + place, (turn + 1) % 2);\n    s[place] = p.x[i];\n    arrive(b + place);\n  } else {\n"
            "    wait_phase(b + place, turn % 2);\n    sum += s[place];\n    arrive(b + 2 + place);\n  }\n}\n"
            "p.y[threadIdx.x] = sum;",
    # Sums are NaN until they are waited for; the products of another group may still run then.
    "unwaited": f"{PRODUCT}{ZEROS}float e[1][4] = {{}};\nfence_products();\n{MULTIPLY}"
                "commit_products();\nmultiply_group_f16<false>(e, at(0), at(0), true);\ncommit_products();\n"
                "p.y[0] = d[0][0];\nwait_for_products<1>();\np.y[1] = d[0][0];\np.y[2] = e[0][0];\nwait_for_products<0>();\n"
                "p.y[3] = e[0][0];",
    # The operand may be read at any time before the wait.
    "overwritten": f"{FENCED}{MULTIPLY}commit_products();\n"
                   "__syncthreads();\nif (threadIdx.x == 0) *reinterpret_cast<float*>(s) = NAN;\n__syncthreads();\n"
                   "wait_for_products<0>();\nif (threadIdx.x == 0) p.y[0] = d[0][0];",
}


kernels, run = law_fixtures(PARAMS, LAWS, LAWFUL, SIZE)

TestLaws = law_tests(LAWS)


@pytest.mark.parametrize("order", ORDERS)
def test_a_bulk_copy_lands_when_it_is_waited_for(order: str, run: Run) -> None:
    got = run("landing", order=order)
    assert np.isnan(got[0]) and got[1] == -1
    assert got[2:20].tolist() == [*range(1, 17), -1, -1]


@pytest.mark.parametrize("order", ORDERS)
def test_one_lane_of_each_warp_is_elected(order: str, run: Run) -> None:
    assert run("elected", order=order)[:2].tolist() == [5, 5]


@pytest.mark.parametrize("order", ORDERS)
def test_phases_keep_a_ring_in_step(order: str, run: Run) -> None:
    got = run("ring", order=order)
    assert np.delete(got, 40).tolist() == [45] * 63 and got[40] == 0


def test_sums_are_nan_until_they_are_waited_for(run: Run) -> None:
    got = run("unwaited", block=128, shared=SHARED)
    assert np.isnan(got[[0, 2]]).all() and got[[1, 3]].tolist() == [0, 0]


def test_operands_must_stay_until_the_wait(run: Run) -> None:
    assert np.isnan(run("overwritten", block=128, shared=SHARED)[0])


# --- Products ---------------------------------------------------------------------------------------------------

COLUMNS = 192

# d [64, COLUMNS] = c + a @ b in two products, the second a step of depth behind the first. The operands come as bytes that lie in
# shared memory as they are given, those of b behind those of a.
PRODUCT_OF = """extern "C" __global__ void product_{name}(const __grid_constant__ Params p) {{
  char* s = reinterpret_cast<char*>(dynamic_shared());
  s += (1024 - shared_address(s) % 1024) % 1024;
  for (int i = threadIdx.x; i < p.bytes; i += blockDim.x) s[i] = p.operands[i];
  __syncthreads();
  const unsigned long long first = shared_address(s) >> 4;
  float d[{columns} / 8][4];
  const auto place = [&](int j, int e) {{
    return (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + e / 2 * 8) * {columns} + j * 8 + threadIdx.x % 4 * 2 + e % 2;
  }};
  for (int j = 0; j < {columns} / 8; ++j) for (int e = 0; e < 4; ++e) d[j][e] = p.c[place(j, e)];
{multiply}  commit_products();
  wait_for_products<0>();
  for (int j = 0; j < {columns} / 8; ++j) for (int e = 0; e < 4; ++e) p.d[place(j, e)] = d[j][e];
}}
"""
MULTIPLY_SHARED = """  fence_products();
  multiply_group_{type}<{by_depth}>(d, p.a + first, p.b + first, true);
  multiply_group_{type}<{by_depth}>(d, p.a + first + p.a_step, p.b + first + p.b_step, true);
"""
# a comes in rows of 32 values, without a swizzle.
MULTIPLY_REGISTERS = """  unsigned a[2][4];
  const unsigned* row = reinterpret_cast<unsigned*>(s) + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * 16 + threadIdx.x % 4;
  for (int n = 0; n < 8; ++n) a[n / 4][n % 4] = row[n % 2 * 8 * 16 + n / 4 * 8 + n / 2 % 2 * 4];
  fence_products();
  multiply_group_registers_{type}(d, a[0], p.b + first, true);
  multiply_group_registers_{type}(d, a[1], p.b + first + p.b_step, true);
"""
WAYS = {"rows": MULTIPLY_SHARED.replace("{by_depth}", "false"), "depth": MULTIPLY_SHARED.replace("{by_depth}", "true"),
        "registers": MULTIPLY_REGISTERS}
PRODUCT_PARAMS = ("struct Params { const char* operands; const float* c; float* d; unsigned long long a, b, a_step, b_step; "
                  "int64_t bytes; };\n")


@pytest.fixture(scope="module")
def products(host_executor: HostExecutor) -> Kernels:
    texts = {f"{kind}_{way}": PRODUCT_OF.format(name=f"{kind}_{way}", columns=COLUMNS, multiply=multiply.format(type=kind))
             for kind in ("f16", "bf16") for way, multiply in WAYS.items()}
    return host_executor.load(PRODUCT_PARAMS + "".join(texts.values()), tuple(f"product_{name}" for name in texts))


def swizzled(rows: NDArray[np.uint16]) -> bytes:
    """Rows of 64 or 32 words: their 16-byte chunks where the tensor cores look for them, by the address they have without it."""
    length = rows.shape[1] * 2
    found = bytearray(rows.size * 2)
    for number, chunk in enumerate(rows.reshape(-1, 8)):
        address = number * 16
        address ^= (address >> 7) % (length // 16) << 4
        found[address:address + 16] = chunk.tobytes()
    return bytes(found)


def descriptor(place: int, *, leading: int, stride: int, swizzle: int) -> int:
    return place >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | swizzle << 62


@pytest.mark.parametrize(("way", "row_words"), [("rows", 64), ("rows", 32), ("depth", 64), ("registers", 32)])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_products_read_operands_as_the_descriptors_say(kind: str, way: str, row_words: int, products: Kernels) -> None:
    """Against integers: a by rows of 128 or 64 bytes along the depth, by depth, or in registers; b by depth, in pieces of 64
    columns."""
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    rng = np.random.default_rng(7)
    a, b, c = rng.integers(-8, 9, (64, 32)), rng.integers(-8, 9, (32, COLUMNS)), rng.integers(-99, 99, (64, COLUMNS))

    def words(values: NDArray[Any]) -> NDArray[np.uint16]:
        return values.astype(np.float32).astype(dtype).view(np.uint16)

    about_a, a_step = 0, 0
    if way == "registers":
        of_a = words(a).tobytes()
    elif way == "depth":  # 32 rows of 64 values each, one k after the other
        of_a = swizzled(words(a.T.copy()))
        about_a, a_step = descriptor(0, leading=0, stride=1024, swizzle=1), 2 * 1024
    else:  # 64 rows of values along k, of which the product takes 32
        of_a = swizzled(words(np.pad(a, ((0, 0), (0, row_words - 32)))))
        about_a, a_step = descriptor(0, leading=16, stride=16 * row_words, swizzle=1 if row_words == 64 else 2), 32
    at_b = len(of_a)
    of_b = b"".join(swizzled(words(b[:, first:first + 64].copy())) for first in range(0, COLUMNS, 64))
    about_b, b_step = descriptor(at_b, leading=32 * 128, stride=1024, swizzle=1), 2 * 1024
    operands = np.frombuffer(of_a + of_b, np.float32)
    with products.memory() as memory:
        places = [memory.add_input("operands", operands), memory.add_input("c", c.astype(np.float32)),
                  memory.add_output("d", c.shape)]
        params = struct.pack("<QQQQQQQq", *places, about_a, about_b, a_step >> 4, b_step >> 4, operands.nbytes)
        products.launch(f"product_{kind}_{way}", grid=1, block=128, params=params, memory=memory,
                        shared_bytes=operands.nbytes + 1024, order="shuffled:1")
        got = memory.read("d")
    assert np.array_equal(got, c + a @ b)


def test_a_hundred_million_multiply_adds_a_second(products: Kernels) -> None:
    operands, c = np.zeros(10240, np.float32), np.zeros((64, COLUMNS), np.float32)
    about = descriptor(0, leading=4096, stride=1024, swizzle=1)

    def once() -> None:
        with products.memory() as memory:
            places = [memory.add_input("operands", operands), memory.add_input("c", c), memory.add_output("d", c.shape)]
            products.launch("product_f16_rows", grid=20, block=128, memory=memory, shared_bytes=operands.nbytes + 1024,
                            params=struct.pack("<QQQQQQQq", *places, about, about, 2, 128, 0))

    assert best_rate(20 * 2 * 64 * COLUMNS * 16, once) > 5e7

"""Asynchronous copies on the host: sizes, zeros in place of what does not exist, and groups that are waited for in turn."""

from __future__ import annotations

import numpy as np

from tests.host_laws import PARAMS, Law, Run, law_fixtures, law_tests

SIZE = 64  # elements of x and y

START = "float* s = dynamic_shared() + 4 * (threadIdx.x % 16);\n"  # line 1

LAWS = [
    Law("group_left_behind",
        f"{START}copy_async_bytes<4>(s, p.x);\ncommit_copies();",
        f"{START}copy_async_bytes<4>(s, p.x);\ncommit_copies();\nwait_for_copy_groups<0>();\ncommit_copies();",
        "block 0, thread 0: leaves the kernel before its asynchronous copies have ended"),
    Law("latest_group_left_behind",
        f"{START}for (int i = 0; i < 3; ++i) {{\n  copy_async_bytes<4>(s + i, p.x);\n  commit_copies();\n}}\n"
        "wait_for_copy_groups<1>();",
        f"{START}for (int i = 0; i < 3; ++i) {{\n  copy_async_bytes<4>(s + i, p.x);\n  commit_copies();\n}}\n"
        "commit_copies();\nwait_for_copy_groups<1>();",
        "block 0, thread 0: leaves the kernel before its asynchronous copies have ended"),
    Law("copy_without_a_group",
        f"{START}copy_async_bytes<4>(s, p.x);\nwait_for_copy_groups<0>();",
        f"{START}copy_async_bytes<4>(s, p.x);\nwait_for_copies();",
        "block 0, thread 0: leaves the kernel before its asynchronous copies have ended"),
    Law("misaligned_to",
        f"{START}copy_async_bytes<16>(s + 2, p.x);\nwait_for_copies();",
        f"{START}copy_async_bytes<8>(s + 2, p.x);\nwait_for_copies();",
        "block 0, thread 0: line 2: copies 16 bytes at element 2 of the dynamic shared memory, which is at no multiple of them"),
    Law("misaligned_from",
        f"{START}copy_async_bytes<16>(s, p.x + 3);\nwait_for_copies();",
        f"{START}copy_async_bytes<4>(s, p.x + 3);\nwait_for_copies();",
        "block 0, thread 0: line 2: copies 16 bytes at element 3 of x, which is at no multiple of them"),
    Law("misaligned_from_that_does_not_exist",
        f"{START}copy_async_or_zero<8>(s, p.x + 1, false);\nwait_for_copies();",
        f"{START}copy_async_or_zero<8>(s, p.x, false);\nwait_for_copies();",
        "block 0, thread 0: line 2: copies 8 bytes at element 1 of x, which is at no multiple of them"),
    Law("source_past_the_end",
        f"{START}copy_async_or_zero<16>(s, p.x + 4 * threadIdx.x, threadIdx.x <= 16);\nwait_for_copies();",
        f"{START}copy_async_or_zero<16>(s, p.x + 4 * threadIdx.x, threadIdx.x < 16);\nwait_for_copies();",
        f"block 0, thread 16: reads element {SIZE} of x, which has {SIZE} elements"),
    Law("destination_past_the_end",
        f"{START}copy_async_or_zero<16>(s + 4 * (threadIdx.x / 60), p.x, false);\nwait_for_copies();",
        f"{START}copy_async_or_zero<16>(s - 4 * (threadIdx.x / 60), p.x, false);\nwait_for_copies();",
        "block 0, thread 63: writes element 64 of the dynamic shared memory, which has 64 elements"),
]

# Bodies of kernels by name, for one thread.
LAWFUL = {
    "sizes": "float* s = dynamic_shared();\nfor (int i = 0; i < 12; ++i) s[i] = -1.0f;\n"
             "copy_async_bytes<4>(s, p.x);\ncopy_async_bytes<8>(s + 2, p.x + 2);\ncopy_async_bytes<16>(s + 4, p.x + 4);\n"
             "wait_for_copies();\nfor (int i = 0; i < 12; ++i) p.y[i] = s[i];",
    "zeros": "float* s = dynamic_shared();\nfor (int i = 0; i < 12; ++i) s[i] = -1.0f;\n"
             "for (int i = 0; i < 3; ++i) copy_async_or_zero<16>(s + 4 * i, p.x + 4 * i + 64 * (i / 2), i < 2);\n"
             "wait_for_copies();\nfor (int i = 0; i < 12; ++i) p.y[i] = s[i];",
    # Two groups of two copies, one empty group, and a copy in none. What is there after each wait goes to a row of y.
    "groups": "float* s = dynamic_shared();\n"
              "const auto look = [&](int row) { for (int i = 0; i < 5; ++i) p.y[5 * row + i] = s[i]; };\n"
              "for (int i = 0; i < 4; ++i) {\n  copy_async_bytes<4>(s + i, p.x + i);\n  if (i % 2 == 1) commit_copies();\n}\n"
              "commit_copies();\ncopy_async_bytes<4>(s + 4, p.x + 4);\n"
              "look(0);\nwait_for_copy_groups<3>();\nlook(1);\nwait_for_copy_groups<2>();\nlook(2);\n"
              "wait_for_copy_groups<1>();\nlook(3);\nwait_for_copy_groups<0>();\nlook(4);\nwait_for_copies();\nlook(5);",
    "halves": "float* s = dynamic_shared();\ncopy_async_bytes<4>(s, p.x);\np.y[0] = s[0];\nwait_for_copies();",
    # The source may be read at any time before the wait: what is written there meanwhile arrives.
    "late": "float* s = dynamic_shared();\np.y[1] = 1.0f;\ncopy_async_bytes<4>(s, p.y + 1);\np.y[1] = 2.0f;\nwait_for_copies();\n"
            "p.y[0] = s[0];",
}


kernels, run = law_fixtures(PARAMS, LAWS, LAWFUL, SIZE, block=1)

TestLaws = law_tests(LAWS)


def test_sizes(run: Run) -> None:
    assert run("sizes")[:12].tolist() == [1, -1, 3, 4, 5, 6, 7, 8, -1, -1, -1, -1]


def test_what_does_not_exist_is_zero_and_never_read(run: Run) -> None:
    assert run("zeros")[:12].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]


def test_groups_end_in_their_order(run: Run) -> None:
    seen = run("groups")[:30].reshape(6, 5)
    there = np.array([[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], bool)
    assert np.array_equal(~np.isnan(seen), there)
    assert np.array_equal(seen[there], np.broadcast_to(np.arange(1.0, 6.0), (6, 5))[there])


def test_an_unwaited_copy_is_nan_in_halves_too(run: Run) -> None:
    bits = run("halves")[:1].view(np.uint32)[0]
    halves = np.array([bits & 0xFFFF, bits >> 16], np.uint16)
    assert np.isnan(halves.view(np.float16)).all()
    assert np.isnan((halves.astype(np.uint32) << 16).view(np.float32)).all()  # bfloat16


def test_the_source_is_read_at_the_end(run: Run) -> None:
    assert run("late")[0] == 2.0

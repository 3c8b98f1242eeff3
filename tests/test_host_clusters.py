"""Clusters on the host: blocks that run at once and reach the shared memory of one another, and their laws."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.host_laws import ORDERS, PARAMS
from tuner.errors import LaunchError
from tuner.executors.host import HostExecutor
from tuner.executors.host_runtime import Kernels

SIZE = 64  # elements of x and y
BLOCK = 64
SHARED = 512

HEAD = """auto* b = reinterpret_cast<unsigned long long*>(dynamic_shared());
float* s = dynamic_shared() + 4;
const int own = blockIdx.x % 2, other = 1 - own;
const float four[4] = {1.0f, 2.0f, 3.0f, 4.0f};
if (threadIdx.x == 0) init_barrier(b, 1);
"""  # lines 1 to 5
MET = f"{HEAD}sync_cluster();\n"  # line 6

BROKEN = {
    # What a law says, its kernel, and the sentence.
    "arrives_before_the_cluster_met": (
        f"{HEAD}__syncthreads();\nif (threadIdx.x == 0) arrive_at(address_in_block(b, other));\nsync_cluster();",
        "line 7: reaches into block 1 before the cluster has met in sync_cluster: it may not have begun"),
    "stores_before_the_cluster_met": (
        f"{HEAD}__syncthreads();\n"
        "if (threadIdx.x == 0) store_async(address_in_block(s, other), four, address_in_block(b, other));\nsync_cluster();",
        "line 7: reaches into block 1 before the cluster has met in sync_cluster: it may not have begun"),
    "a_block_outside_of_the_cluster": (
        f"{MET}arrive_at(address_in_block(b, 2));", "line 7: looks in block 2 of a cluster of 2"),
    "another_block_has_no_barrier": (
        f"{MET}if (threadIdx.x == 0) arrive_at(address_in_block(b + 1, other));\nsync_cluster();",
        "line 7: uses element 2 of the dynamic shared memory as a barrier, which is none, or none any more"),
    "an_address_of_the_own_block": (
        f"{MET}arrive_at(shared_address(b));", "which address_in_block did not give"),
    "global_memory_in_another_block": (
        f"{MET}address_in_block(p.x, other);",
        "line 7: looks in another block for what stands at element 0 of x, not in shared memory"),
    "stores_at_four_bytes": (
        f"{MET}store_async(address_in_block(s + 1, other), four, address_in_block(b, other));\nsync_cluster();",
        "line 7: stores 16 bytes at element 5 of the dynamic shared memory, which is at no multiple of them"),
    "stores_past_the_end": (
        f"{MET}const unsigned last = address_in_block(dynamic_shared() + {SHARED // 4 - 4}, other);\n"
        "store_async(last + 16, four, address_in_block(b, other));",
        "outside of it"),
    "stores_to_one_and_tells_another": (
        f"{MET}store_async(address_in_block(s, other), four, address_in_block(b, own));",
        "line 7: stores to one block and tells another of it"),
    "copies_before_the_cluster_met": (
        f"{HEAD}__syncthreads();\nif (threadIdx.x == 0) copy_bulk_to_blocks(s, p.x, 16, b, 2 >> own);\nsync_cluster();",
        "line 7: reaches into block 1 before the cluster has met in sync_cluster: it may not have begun"),
    "copies_to_a_block_outside_of_the_cluster": (
        f"{MET}if (threadIdx.x == 0) copy_bulk_to_blocks(s, p.x, 16, b, 4);\nsync_cluster();",
        "line 7: looks in block 2 of a cluster of 2"),
    "copies_to_no_block": (
        f"{MET}if (threadIdx.x == 0) copy_bulk_to_blocks(s, p.x, 16, b, 0);\nsync_cluster();",
        "line 7: copies in bulk to no block"),
    "both_copy_to_the_same_place": (
        f"{MET}if (threadIdx.x == 0) copy_bulk_to_blocks(s, p.x, 16, b, 3);\nsync_cluster();",
        "line 7: copies in bulk to element 4 of the dynamic shared memory, where another copy has not ended"),
    "nobody_waits_for_what_is_copied_to_another_block": (
        f"{MET}if (threadIdx.x == 0) copy_bulk_to_blocks(s + 4 * own, p.x, 16, b, 2 >> own);\nsync_cluster();",
        "leaves the kernel, as all others have, before a bulk copy"),
    "leaves_while_others_meet": (
        f"{MET}if (own == 0) return;\nsync_cluster();", "has left the kernel"),
    "nobody_waits_for_what_is_stored": (
        f"{MET}if (threadIdx.x == 0) store_async(address_in_block(s, other), four, address_in_block(b, other));\nsync_cluster();",
        "leaves the kernel, as all others have, before a bulk copy"),
    "waits_for_bytes_that_never_come": (
        f"{MET}if (threadIdx.x == 0) {{\n  arrive_expecting(b, 16);\n  wait_phase(b, 0);\n}}",
        "waits at wait_phase (line 9) for threads that never come"),
}
"""Kernels that break a law, and a part of the sentence that says so."""

KEPT = {
    # Each thread's four values go to the other block, round after round.
    "exchange": f"{MET}float sum = 0.0f;\nfor (int i = 0; i < 6; ++i) {{\n"
                "  if (threadIdx.x == 0) arrive_expecting(b, 16 * 16);\n"
                "  const float values[4] = {i + 1.0f, own * 100.0f, threadIdx.x + 0.0f, 0.0f};\n"
                "  const unsigned there = address_in_block(b, other);\n"
                "  if (threadIdx.x < 16) store_async(address_in_block(s + 4 * threadIdx.x, other), values, there);\n"
                "  wait_phase(b, i % 2);\n  for (int j = 0; j < 3; ++j) sum += s[4 * (threadIdx.x % 16) + j];\n"
                "  sync_cluster();\n}\nif (blockIdx.x == 0) p.y[threadIdx.x] = sum;",
    # Blocks wait for one another by arrivals alone; what the first has written to global memory is there.
    "told": f"{MET}if (own == 0) {{\n  p.y[threadIdx.x] = 7.0f;\n  __syncthreads();\n"
              "  if (threadIdx.x == 0) arrive_at(address_in_block(b, 1));\n} else {\n  wait_phase(b, 0);\n"
              "  p.y[threadIdx.x] += 1.0f;\n}\nsync_cluster();",
    # Each block brings half of the values to both, round after round, and goes on when both have read them.
    "shared_copies": f"{HEAD}if (threadIdx.x == 0) init_barrier(b + 1, 2);\nsync_cluster();\n"
                     "float sum = 0.0f;\nfor (int i = 0; i < 6; ++i) {\n  if (threadIdx.x == 0) {\n"
                     "    if (i > 0) wait_phase(b + 1, 1 - i % 2);\n    arrive_expecting(b, 128);\n"
                     "    copy_bulk_to_blocks(s + 16 * own, p.x + 16 * own, 64, b, 3);\n  }\n"
                     "  wait_phase(b, i % 2);\n  sum += s[threadIdx.x % 32];\n  __syncthreads();\n"
                     "  if (threadIdx.x < 2) arrive_at(address_in_block(b + 1, threadIdx.x));\n}\n"
                     "if (threadIdx.x < 32) p.y[own * 32 + threadIdx.x] = sum;\nsync_cluster();",
    # What is copied to another block is not there before it is waited for.
    "late_copy": f"{MET}if (own == 0 && threadIdx.x == 0) copy_bulk_to_blocks(s, p.x, 16, b, 2);\nsync_cluster();\n"
                 "if (own == 1 && threadIdx.x == 0) {\n  p.y[0] = s[0];\n  arrive_expecting(b, 16);\n  wait_phase(b, 0);\n"
                 "  for (int i = 0; i < 4; ++i) p.y[1 + i] = s[i];\n}\nsync_cluster();",
    # Each block has shared memory of its own, and a place among the blocks.
    "apart": f"{MET}s[threadIdx.x % 8] = own;\nsync_cluster();\n"
             "if (threadIdx.x < 8) p.y[blockIdx.x * 8 + threadIdx.x] = s[threadIdx.x] * 10 + blockIdx.x;\nsync_cluster();",
    # A race: the other block may have left.
    "after_the_end": f"{MET}if (own == 0 && threadIdx.x == 0) arrive_at(address_in_block(b, 1));",
    # What has been stored is not there before it is waited for.
    "late": f"{MET}if (own == 0 && threadIdx.x == 0) store_async(address_in_block(s, 1), four, address_in_block(b, 1));\n"
            "sync_cluster();\nif (own == 1 && threadIdx.x == 0) {\n  p.y[0] = s[0];\n"
            "  arrive_expecting(b, 16);\n  wait_phase(b, 0);\n"
            "  for (int i = 0; i < 4; ++i) p.y[1 + i] = s[i];\n}\nsync_cluster();",
}


def text_of(name: str, body: str) -> str:
    head = 'extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(1024)'
    return f"{head} {name}(const __grid_constant__ Params p) {{\n#line 1\n{body}\n}}\n"


@pytest.fixture(scope="module")
def kernels(host_executor: HostExecutor) -> Kernels:
    bodies = {name: body for name, (body, _) in BROKEN.items()} | KEPT
    return host_executor.load(PARAMS + "".join(text_of(*item) for item in bodies.items()), tuple(bodies))


def launch(kernels: Kernels, name: str, order: str = "forward", grid: int = 2) -> NDArray[Any]:
    with kernels.memory() as memory:
        x = memory.add_input("x", np.arange(1, SIZE + 1, dtype=np.float32))
        y = memory.add_output("y", (SIZE,))
        kernels.launch(name, grid=grid, block=BLOCK, params=struct.pack("<QQQq", x, y, 0, SIZE), memory=memory,
                       shared_bytes=SHARED, order=order)
        return memory.read("y")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_law_is_named(name: str, kernels: Kernels) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(kernels, name)
    assert BROKEN[name][1] in str(caught.value)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BROKEN)
def test_it_is_broken_in_every_order(name: str, order: str, kernels: Kernels) -> None:
    with pytest.raises(LaunchError, match=f"^kernel {name}"):
        launch(kernels, name, order)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_signal_one_another(order: str, kernels: Kernels) -> None:
    assert launch(kernels, "told", order).tolist() == [8.0] * SIZE


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_exchange_values_round_after_round(order: str, kernels: Kernels) -> None:
    assert launch(kernels, "exchange", order).tolist() == [21 + 600 + 6 * (thread % 16) for thread in range(BLOCK)]


@pytest.mark.parametrize("order", ORDERS)
def test_each_block_has_its_own_memory(order: str, kernels: Kernels) -> None:
    got = launch(kernels, "apart", order, grid=6)
    assert got[:48].tolist() == [block % 2 * 10 + block for block in range(6) for _ in range(8)]


@pytest.mark.parametrize("order", ORDERS)
def test_each_block_copies_half_of_what_both_read(order: str, kernels: Kernels) -> None:
    assert launch(kernels, "shared_copies", order).tolist() == [6 * (value % 32 + 1) for value in range(64)]


@pytest.mark.parametrize("name", ["late", "late_copy"])
@pytest.mark.parametrize("order", ORDERS)
def test_what_another_block_sends_lands_when_it_is_waited_for(order: str, name: str, kernels: Kernels) -> None:
    got = launch(kernels, name, order)
    assert np.isnan(got[0]) and got[1:5].tolist() == [1, 2, 3, 4]


def test_a_block_that_may_have_left_is_seen_in_some_order(kernels: Kernels) -> None:
    said = []
    for order in ORDERS:
        try:
            launch(kernels, "after_the_end", order)
        except LaunchError as error:
            said.append(str(error))
    assert said and all("reaches into block 1, which has left the kernel" in sentence for sentence in said)


def test_a_grid_is_whole_clusters(kernels: Kernels) -> None:
    with pytest.raises(LaunchError, match="a grid of 3 blocks, which are no whole clusters of 2"):
        launch(kernels, "told", grid=3)

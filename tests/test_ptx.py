"""Every function of templates/_ptx.cu.j2 has one meaning twice: nvcc compiles it for each architecture, the host by its twin."""

from __future__ import annotations

import re

import pytest

from codegen.limits import TARGETS, target
from codegen.render import render_template
from tuner.executors.host import HostExecutor
from tuner.store import Store
from tuner.toolchain import REPORT, find_nvcc

PTX = render_template("_ptx.cu.j2", overlapping=[], async_copies=True, streaming=True, matrix_products=True,
                      short_types=["bfloat16", "float16"])
GROUPS = {arithmetic: render_template("_ptx.cu.j2", overlapping=["calls"], short_types=[], warpgroups=True, a_in_registers=True,
                                      elects=True, clusters=True, columns=[24, 16], arithmetic=arithmetic)
          for arithmetic in ("fp16x3", "bf16")}
"""What a Hopper GPU alone compiles, for products of either type."""

CALLS = """
struct Params { const float* x; float* y; };
extern "C" __global__ void calls(const __grid_constant__ Params p) {
  const float* x = p.x;
  float* y = p.y;
  char* s = reinterpret_cast<char*>(dynamic_shared());
  prefetch_l2(x);
  copy_async<1>(dynamic_shared(), x);
  copy_async<2>(dynamic_shared(), x);
  copy_async<4>(dynamic_shared(), x);
  wait_for_copies();
  copy_async_bytes<4>(s, x);
  copy_async_bytes<8>(s, x);
  copy_async_bytes<16>(s, x);
  commit_copies();
  copy_async_or_zero<4>(s, x, threadIdx.x < 5);
  copy_async_or_zero<8>(s, x, threadIdx.x < 5);
  copy_async_or_zero<16>(s, x, threadIdx.x < 5);
  commit_copies();
  wait_for_copy_groups<1>();
  wait_for_copy_groups<0>();
  unsigned a[4], r[4];
  load_matrices(a, s);
  load_matrices_transposed(r, s);
  const unsigned b[2] = {r[0] + r[1], r[2] + r[3]};
  float d[4] = {};
  mma_f16(d, a, b);
  mma_bf16(d, a, b);
  mma_tf32(d, a, b);
  y[0] = d[0] + d[1] + d[2] + d[3];
  store_streaming(y, r);
  const unsigned pair = pack_f16(x[0], x[1]) + pack_bf16(x[2], x[3]);
  y[1] = low_f16(pair) + high_f16(pair) + low_bf16(pair) + high_bf16(pair);
  y[2] = f16_to_float(float_to_f16(x[4])) + bf16_to_float(float_to_bf16(x[5])) + __uint_as_float(round_tf32(x[6]));
}
"""

CALLS_OF_GROUPS = """
struct Params { const float* x; float* y; };
extern "C" __global__ void calls(const __grid_constant__ Params p) {
  let_next_launch_begin();
  wait_for_launch_before();
  unsigned long long* barrier = reinterpret_cast<unsigned long long*>(dynamic_shared());
  init_barrier(barrier, 1);
  fence_barriers();
  sync_cluster();
  if (threadIdx.x >= 128) {
    const float values[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    const unsigned other = address_in_block(barrier, anew(threadIdx.x) % 2);
    store_async(other + 256, values, other);
    arrive_at(other);
    if (threadIdx.x == 128) copy_bulk_to_blocks(dynamic_shared() + 4, p.x, 64, barrier, 3);
    give_up_registers<40>();
    arrive_expecting(barrier, 64);
    arrive(barrier);
    if (is_elected()) copy_bulk(dynamic_shared() + 4, p.x, 64, barrier);
    arrive_threads(1, 256);
  } else {
    take_registers<232>();
    wait_phase(barrier, 0);
    sync_threads(1, 256);
    float d[3][4] = {}, e[2][4] = {};
    unsigned a[4] = {threadIdx.x, 1, 2, 3};
    settle(a);
    fence_operands();
    fence_products();
    multiply_group_registers_TYPE(d, a, 0, true);
    multiply_group_TYPE<true>(d, shared_address(barrier), 0, true);
    multiply_group_TYPE<false>(d, 0, 0, false);
    multiply_group_registers_TYPE(e, a, 0, false);
    multiply_group_TYPE<true>(e, 0, 0, true);
    commit_products();
    wait_for_products<0>();
    settle(d);
    settle(e);
    for (int j = 0; j < 3; ++j) p.y[j] = d[j][0] + d[j][1] + d[j][2] + d[j][3] + e[j / 2][j % 2];
  }
}
"""


def calls_of(arithmetic: str) -> str:
    return CALLS_OF_GROUPS.replace("TYPE", "f16" if arithmetic == "fp16x3" else "bf16")


def functions(text: str) -> set[str]:
    return set(re.findall(r"__forceinline__ [\w ]+?\W*(\w+)\(", text))


def test_every_function_is_called() -> None:
    names = functions(PTX)
    assert len(names) > 20 and names == {name for name in names if re.search(rf"\b{name}[(<]", CALLS)}
    for arithmetic, text in GROUPS.items():
        names = functions(text) - functions(PTX)
        assert len(names) > 14 and names == {name for name in names if re.search(rf"\b{name}[(<]", calls_of(arithmetic))}


@pytest.mark.parametrize("arithmetic", GROUPS)
def test_nvcc_and_the_host_compile_those_of_warpgroups(arithmetic: str, store: Store, host_executor: HostExecutor) -> None:
    bounds = "__cluster_dims__(2, 1, 1) __launch_bounds__(256, 1)"
    text = GROUPS[arithmetic] + calls_of(arithmetic).replace("calls(", f"{bounds} calls(")
    binary = find_nvcc("sm_90a").compile(text, "sm_90a", store)
    assert "warning" not in (binary.cubin.parent / REPORT).read_text()
    host_executor.load(text, ("calls",))


@pytest.mark.parametrize("arch", [target(name).arch for name in TARGETS])
def test_nvcc_compiles_them(arch: str, store: Store) -> None:
    binary = find_nvcc(arch).compile(PTX + CALLS, arch, store)
    assert "warning" not in (binary.cubin.parent / REPORT).read_text()


def test_the_host_compiles_them(host_executor: HostExecutor) -> None:
    host_executor.load(PTX + CALLS, ("calls",))

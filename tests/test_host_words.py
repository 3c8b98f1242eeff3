"""The words of CUDA mean on the host what they mean on a GPU."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from tuner.executors.host import HostExecutor
from tuner.executors.host_runtime import Kernels

WORDS = """
struct Params { const float* x; float* y; };

extern "C" __global__ void __launch_bounds__(64) shuffles(const __grid_constant__ Params p) {
  const int t = threadIdx.x;
  const float v = p.x[t];
  float* y = p.y + t;
  y[0 * 64] = __shfl_sync(0xffffffffu, v, 5);
  y[1 * 64] = __shfl_sync(0xffffffffu, v, t * 7, 8);
  y[2 * 64] = __shfl_up_sync(0xffffffffu, v, 3);
  y[3 * 64] = __shfl_up_sync(0xffffffffu, v, 3, 8);
  y[4 * 64] = __shfl_down_sync(0xffffffffu, v, 3);
  y[5 * 64] = __shfl_down_sync(0xffffffffu, v, 3, 8);
  y[6 * 64] = __shfl_xor_sync(0xffffffffu, v, 17);
  y[7 * 64] = __shfl_xor_sync(0xffffffffu, v, 9, 8);
  y[8 * 64] = static_cast<float>(__shfl_xor_sync(0xffffffffu, -t, 1));
  y[9 * 64] = static_cast<float>(__shfl_xor_sync(0xffffffffu, t + 0.5, 1));
  y[10 * 64] = static_cast<float>(__shfl_xor_sync(0xffffffffu, (int64_t{1} << 40) * t, 1));
  y[11 * 64] = 0.0f;
  if (t % 2 == 0) y[11 * 64] = __shfl_sync(0x55555555u, v, 4);
}

extern "C" __global__ void __launch_bounds__(40) votes(const __grid_constant__ Params p) {
  const int t = threadIdx.x;
  const unsigned mask = t < 32 ? 0xffffffffu : 0xffu;
  p.y[t] = static_cast<float>(__ballot_sync(mask, t % 8 == 3));
  p.y[40 + t] = __any_sync(mask, t == 35);
  p.y[80 + t] = __all_sync(mask, t != 35);
  __syncwarp(mask);
}

extern "C" __global__ void __launch_bounds__(8) atomics(const __grid_constant__ Params p) {
  int* count = reinterpret_cast<int*>(p.y + 1);
  unsigned* ticket = reinterpret_cast<unsigned*>(p.y + 2);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    p.y[0] = 0.0f;
    *count = 0;
    *ticket = 0;
  }
  __syncthreads();
  atomicAdd(p.y, 0.5f);
  atomicAdd(count, -2);
  __threadfence();
  p.y[3 + atomicAdd(ticket, 1u)] = static_cast<float>(blockIdx.x * blockDim.x + threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(3) places(const __grid_constant__ Params p) {
  float* y = p.y + 8 * (blockIdx.x * blockDim.x + threadIdx.x);
  y[0] = threadIdx.x, y[1] = threadIdx.y + threadIdx.z;
  y[2] = blockIdx.x, y[3] = blockIdx.y + blockIdx.z;
  y[4] = blockDim.x, y[5] = blockDim.y + blockDim.z;
  y[6] = gridDim.x, y[7] = gridDim.y + gridDim.z;
}

__host__ __device__ __forceinline__ float twice(float x) { return 2.0f * x; }

extern "C" __global__ void __launch_bounds__(1) arithmetic(const __grid_constant__ Params p) {
  const float* __restrict__ x = p.x;
  float* y = p.y;
  const float a = __ldg(x + 2), b = __ldg(x + 4);  // 3 and 5
  *y++ = rsqrtf(a), *y++ = sqrtf(a), *y++ = __fsqrt_rn(a), *y++ = __frsqrt_rn(a), *y++ = __frcp_rn(a);
  *y++ = __fdividef(a, b), *y++ = __fdiv_rn(a, b), *y++ = fmaf(a, b, 1.0f), *y++ = __fmaf_rn(a, b, -1.0f);
  *y++ = fmaxf(a, b), *y++ = fminf(a, NAN), *y++ = max(3, 5), *y++ = min(3u, 5u), *y++ = max(a, NAN);
  *y++ = INFINITY > a ? 1.0f : 0.0f, *y++ = isfinite(INFINITY) ? 1.0f : 0.0f, *y++ = isnan(NAN) ? 1.0f : 0.0f;
  *y++ = fabsf(-a), *y++ = twice(a), *y++ = __int_as_float(__float_as_int(a)), *y++ = __popc(0xf0u), *y++ = __clz(1);
  const float4 four = make_float4(1.0f, 2.0f, 3.0f, 4.0f);
  const int2 two = make_int2(5, 6);
  *y++ = four.x + four.y + four.z + four.w, *y++ = two.x * two.y;
  // A product rounded by itself: fused with the sum, it would keep the digits that rounding drops.
  const float c = 1.0f + 0x1p-12f * (a - 2.0f);
  *y++ = __fadd_rn(__fmul_rn(c, c), -c * c), *y++ = fmaf(c, c, -__fmul_rn(c, c));
}
"""


@pytest.fixture(scope="module")
def words(host_executor: HostExecutor) -> Kernels:
    return host_executor.load(WORDS, ("shuffles", "votes", "atomics", "places", "arithmetic"))


def run_words(words: Kernels, name: str, *, block: int, size: int, grid: int = 1, order: str = "forward") -> NDArray[np.float32]:
    """y of a kernel of WORDS, where x = 1..64."""
    with words.memory() as memory:
        x = memory.add_input("x", np.arange(1, 65, dtype=np.float32))
        y = memory.add_output("y", (size,))
        words.launch(name, grid=grid, block=block, params=struct.pack("<QQ", x, y), memory=memory, order=order)
        return memory.read("y")


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled:4"])
def test_shuffles(order: str, words: Kernels) -> None:
    got = run_words(words, "shuffles", block=64, size=12 * 64, order=order).reshape(12, 64)
    t = np.arange(64)
    v = np.arange(1, 65)
    in8, in32 = t % 8, t % 32
    assert np.array_equal(got[0], v[t // 32 * 32 + 5])
    assert np.array_equal(got[1], v[t // 8 * 8 + t * 7 % 8])
    assert np.array_equal(got[2], v[np.where(in32 >= 3, t - 3, t)])
    assert np.array_equal(got[3], v[np.where(in8 >= 3, t - 3, t)])
    assert np.array_equal(got[4], v[np.where(in32 < 29, t + 3, t)])
    assert np.array_equal(got[5], v[np.where(in8 < 5, t + 3, t)])
    assert np.array_equal(got[6], v[t ^ 17])
    assert np.array_equal(got[7], v[np.where((t ^ 9) // 8 <= t // 8, t ^ 9, t)])
    assert np.array_equal(got[8], -(t ^ 1))
    assert np.array_equal(got[9], (t ^ 1) + 0.5)
    assert np.array_equal(got[10], 2.0**40 * (t ^ 1))
    assert np.array_equal(got[11], np.where(t % 2 == 0, v[t // 32 * 32 + 4], 0))


def test_votes(words: Kernels) -> None:
    ballot, some, every = run_words(words, "votes", block=40, size=120).reshape(3, 40)
    first, second = np.arange(40) < 32, np.arange(40) >= 32
    assert (ballot[first] == 0x08080808).all() and (ballot[second] == 0x08).all()
    assert not some[first].any() and some[second].all()
    assert every[first].all() and not every[second].any()


def test_atomics(words: Kernels) -> None:
    y = run_words(words, "atomics", block=8, size=3 + 24, grid=3)
    assert y[0] == 12.0 and y.view(np.int32)[1] == -48 and y.view(np.uint32)[2] == 24
    assert sorted(y[3:]) == list(range(24))


def test_places(words: Kernels) -> None:
    y = run_words(words, "places", block=3, size=8 * 6, grid=2).reshape(2, 3, 8)
    for block in range(2):
        for thread in range(3):
            assert list(y[block, thread]) == [thread, 0, block, 0, 3, 2, 2, 2]


def test_arithmetic(words: Kernels) -> None:
    y = run_words(words, "arithmetic", block=1, size=26)
    root = np.sqrt(np.float32(3))
    expected = [1 / root, root, root, 3**-0.5, 1 / 3, 0.6, 0.6, 16, 14, 5, 3, 5, 3, 3, 1, 0, 1, 3, 6, 3, 4, 31, 10, 30]
    assert np.array_equal(y[:24], np.array(expected, np.float32))
    assert y[24] == 0.0 and y[25] == 2.0**-24

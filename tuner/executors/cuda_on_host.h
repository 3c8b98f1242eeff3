// Gives the words of CUDA their meaning on a CPU.
//
// A translation unit includes this header, then a kernel source as it is, then a function that calls each kernel on one thread
// (see host_toolchain.py). Threads of a block are fibers; cuda_on_host/ holds the scheduler that runs them, compiled once.
// What the source keeps for nvcc alone, in `#ifdef __CUDACC__`, stands in cuda_on_host/ptx.h under the same names.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cuda_on_host/runtime.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __restrict__ __restrict

#define threadIdx (::cuda_on_host::here.thread)
#define blockIdx (::cuda_on_host::here.block)
#define blockDim (::cuda_on_host::here.block_size)
#define gridDim (::cuda_on_host::here.grid_size)
#define warpSize 32

#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

// Vector types. Their alignment is the device's, so that a misaligned access is found. They are copied by functions of their own,
// because compilers check the alignment of what a reference is bound to, but not all of them that of a plain copy.
#define CUDA_ON_HOST_VECTOR2(vector, scalar)                                            \
  struct alignas(2 * sizeof(scalar)) vector {                                           \
    scalar x, y;                                                                        \
    vector() = default;                                                                 \
    vector(scalar x, scalar y) : x(x), y(y) {}                                          \
    vector(const vector& from) : x(from.x), y(from.y) {}                                \
    vector& operator=(const vector& from) { x = from.x; y = from.y; return *this; }     \
  };                                                                                    \
  inline vector make_##vector(scalar x, scalar y) { return {x, y}; }
#define CUDA_ON_HOST_VECTOR4(vector, scalar)                                            \
  struct alignas(4 * sizeof(scalar)) vector {                                           \
    scalar x, y, z, w;                                                                  \
    vector() = default;                                                                 \
    vector(scalar x, scalar y, scalar z, scalar w) : x(x), y(y), z(z), w(w) {}          \
    vector(const vector& from) : x(from.x), y(from.y), z(from.z), w(from.w) {}          \
    vector& operator=(const vector& from) {                                             \
      x = from.x; y = from.y; z = from.z; w = from.w;                                   \
      return *this;                                                                     \
    }                                                                                   \
  };                                                                                    \
  inline vector make_##vector(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
CUDA_ON_HOST_VECTOR2(float2, float)
CUDA_ON_HOST_VECTOR4(float4, float)
CUDA_ON_HOST_VECTOR2(int2, int)
CUDA_ON_HOST_VECTOR4(int4, int)
CUDA_ON_HOST_VECTOR2(uint2, unsigned)
CUDA_ON_HOST_VECTOR4(uint4, unsigned)

// Synchronisation. `line` is the caller's: two threads meet in a call only if it stands on the same line of the source.
inline void __syncthreads(int line = __builtin_LINE()) { ::cuda_on_host::barrier(line); }
inline void __threadfence() { __asm__ volatile("" ::: "memory"); }
inline void __threadfence_block() { __asm__ volatile("" ::: "memory"); }
[[noreturn]] inline void __trap(int line = __builtin_LINE()) { ::cuda_on_host::trap(line); }

namespace cuda_on_host {

template <class T>
inline T shuffle(Call call, unsigned mask, T value, int operand, int width, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = collective({call, line, mask, operand, width, bits});
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

inline unsigned vote(Call call, unsigned mask, bool value, int line) {
  return static_cast<unsigned>(collective({call, line, mask, 0, 32, value}));
}

template <class T>
struct Exactly { using type = T; };

// Keeps the compiler from fusing an operation with the next one; `value` stays in a floating-point register.
inline float rounded(float value) {
#if defined(__x86_64__)
  __asm__("" : "+x"(value));
#elif defined(__aarch64__)
  __asm__("" : "+w"(value));
#else
  __asm__("" : "+m"(value));
#endif
  return value;
}

}  // namespace cuda_on_host

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, int line = __builtin_LINE()) {
  return ::cuda_on_host::shuffle(::cuda_on_host::Call::shfl, mask, value, lane, width, line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  return ::cuda_on_host::shuffle(::cuda_on_host::Call::shfl_up, mask, value, static_cast<int>(delta), width, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  return ::cuda_on_host::shuffle(::cuda_on_host::Call::shfl_down, mask, value, static_cast<int>(delta), width, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE()) {
  return ::cuda_on_host::shuffle(::cuda_on_host::Call::shfl_xor, mask, value, lanes, width, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  ::cuda_on_host::vote(::cuda_on_host::Call::syncwarp, mask, false, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return ::cuda_on_host::vote(::cuda_on_host::Call::ballot, mask, predicate != 0, line);
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return ::cuda_on_host::vote(::cuda_on_host::Call::any, mask, predicate != 0, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return ::cuda_on_host::vote(::cuda_on_host::Call::all, mask, predicate != 0, line) == mask;
}

// Atomics. Fibers change only in the calls above, so a plain addition is atomic.
template <class T>
inline T atomicAdd(T* address, typename ::cuda_on_host::Exactly<T>::type value) {
  const T before = *address;
  *address = before + value;
  return before;
}

template <class T>
inline T __ldg(const T* address) { return *address; }

// Arithmetic. The C library's functions are declared, not included: its C++ headers would double the time to compile.
extern "C" {
float sqrtf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float fabsf(float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float scalbnf(float, int) noexcept;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x))); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return ::cuda_on_host::rounded(a + b); }
inline float __fsub_rn(float a, float b) { return ::cuda_on_host::rounded(a - b); }
inline float __fmul_rn(float a, float b) { return ::cuda_on_host::rounded(a * b); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }

inline int __float_as_int(float x) { int bits; __builtin_memcpy(&bits, &x, 4); return bits; }
inline unsigned __float_as_uint(float x) { unsigned bits; __builtin_memcpy(&bits, &x, 4); return bits; }
inline float __int_as_float(int bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
inline float __uint_as_float(unsigned bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

template <class A, class B>
constexpr auto min(A a, B b) { return a < b ? a : b; }
template <class A, class B>
constexpr auto max(A a, B b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

#include "cuda_on_host/ptx.h"

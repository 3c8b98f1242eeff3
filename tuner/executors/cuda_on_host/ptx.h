// The functions of templates/_ptx.cu.j2, which on the device are inline assembly: same names, same contracts, on a CPU.
#pragma once

#include "cuda_on_host/runtime.h"

inline float* dynamic_shared() { return ::cuda_on_host::here.shared; }

// Asynchronous copies. Until they are waited for the destination holds NaN: what reads it too early is seen.
template <int BYTES>
inline void copy_async_or_zero(void* to, const void* from, bool exists, int line = __builtin_LINE()) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "an asynchronous copy moves 4, 8 or 16 bytes");
  ::cuda_on_host::start_copy(to, from, BYTES, exists, line);
}
template <int BYTES>
inline void copy_async_bytes(void* to, const void* from, int line = __builtin_LINE()) {
  copy_async_or_zero<BYTES>(to, from, true, line);
}
template <int N>
inline void copy_async(float* to, const float* from, int line = __builtin_LINE()) {
  copy_async_or_zero<4 * N>(to, from, true, line);
}
inline void wait_for_copies() { ::cuda_on_host::end_copies(); }
inline void commit_copies() { ::cuda_on_host::commit_copies(); }
template <int N>
inline void wait_for_copy_groups() { ::cuda_on_host::end_copy_groups(N); }

// Changes nothing a kernel could see.
inline void prefetch_l2(const void*) {}

// Launches that overlap on the device run one after the other here; but until a block has waited, nothing that the call writes can
// be touched.
inline void let_next_launch_begin() {}
inline void wait_for_launch_before() { ::cuda_on_host::wait_for_launch_before(); }

// A store of 16 bytes in one access.
inline void store_streaming(void* to, const unsigned (&words)[4], int line = __builtin_LINE()) {
  ::cuda_on_host::check_store(to, sizeof(words), line);
  __builtin_memcpy(to, words, sizeof(words));
}

// 16-bit floats. Both are the float formats of IEEE 754 with other widths; a NaN becomes the one NaN of the device.
inline float f16_to_float(unsigned short bits) {
  const unsigned magnitude = (bits & 0x7fffu) << 13;
  const float scaled = __uint_as_float(magnitude) * 0x1p112f;  // exact, and subnormal values become normal ones
  const unsigned value = magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000u : __float_as_uint(scaled);
  return __uint_as_float(value | (bits & 0x8000u) << 16);
}
inline unsigned short float_to_f16(float value) {
  const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);  // 65520, half-way to 2^16
  unsigned rounded;
  if (magnitude < 0x38800000u) {  // subnormal: in units of 2^-24, the last bit of a float in [0.5, 1)
    rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
  } else {
    rounded = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return static_cast<unsigned short>(sign | rounded);
}
inline float bf16_to_float(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
inline unsigned short float_to_bf16(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline unsigned pack_f16(float low, float high) { return float_to_f16(low) | static_cast<unsigned>(float_to_f16(high)) << 16; }
inline unsigned pack_bf16(float low, float high) { return float_to_bf16(low) | static_cast<unsigned>(float_to_bf16(high)) << 16; }
inline float low_f16(unsigned pair) { return f16_to_float(static_cast<unsigned short>(pair)); }
inline float high_f16(unsigned pair) { return f16_to_float(static_cast<unsigned short>(pair >> 16)); }
inline float low_bf16(unsigned pair) { return bf16_to_float(static_cast<unsigned short>(pair)); }
inline float high_bf16(unsigned pair) { return bf16_to_float(static_cast<unsigned short>(pair >> 16)); }

inline unsigned round_tf32(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu;
  return (bits + 0x1000u) & ~0x1fffu;  // a finite value too large becomes infinite, infinity stays
}

// Matrix instructions, in which all 32 lanes of a warp meet.
inline void mma_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE()) {
  ::cuda_on_host::multiply_matrices(::cuda_on_host::Call::mma_f16, {d, a, b}, line);
}
inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE()) {
  ::cuda_on_host::multiply_matrices(::cuda_on_host::Call::mma_bf16, {d, a, b}, line);
}
inline void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE()) {
  ::cuda_on_host::multiply_matrices(::cuda_on_host::Call::mma_tf32, {d, a, b}, line);
}
inline void load_matrices(unsigned (&r)[4], const void* row, int line = __builtin_LINE()) {
  ::cuda_on_host::load_matrices(::cuda_on_host::Call::load_matrices, {r, row}, line);
}
inline void load_matrices_transposed(unsigned (&r)[4], const void* row, int line = __builtin_LINE()) {
  ::cuda_on_host::load_matrices(::cuda_on_host::Call::load_matrices_transposed, {r, row}, line);
}

// Barriers in shared memory and bulk copies.
inline unsigned shared_address(const void* pointer) { return ::cuda_on_host::shared_address(pointer); }
inline void init_barrier(unsigned long long* barrier, int arrivals, int line = __builtin_LINE()) {
  ::cuda_on_host::init_barrier(reinterpret_cast<uint64_t*>(barrier), static_cast<unsigned>(arrivals), line);
}
inline void fence_barriers() {}
inline void arrive(unsigned long long* barrier, int line = __builtin_LINE()) { ::cuda_on_host::arrive(reinterpret_cast<uint64_t*>(barrier), 0, line); }
inline void arrive_expecting(unsigned long long* barrier, int bytes, int line = __builtin_LINE()) {
  ::cuda_on_host::arrive(reinterpret_cast<uint64_t*>(barrier), static_cast<unsigned>(bytes), line);
}
inline void wait_phase(unsigned long long* barrier, int phase, int line = __builtin_LINE()) {
  ::cuda_on_host::wait_phase(reinterpret_cast<uint64_t*>(barrier), static_cast<unsigned>(phase), line);
}
inline void copy_bulk(void* to, const void* from, int bytes, unsigned long long* barrier, int line = __builtin_LINE()) {
  ::cuda_on_host::start_bulk_copy(to, from, static_cast<unsigned>(bytes), reinterpret_cast<uint64_t*>(barrier), line);
}

inline bool is_elected(int line = __builtin_LINE()) { return ::cuda_on_host::is_elected(line); }
// Changes nothing here: memory is one.
inline void fence_operands() {}

// Clusters.
inline void sync_cluster(int line = __builtin_LINE()) { ::cuda_on_host::sync_cluster(line); }
inline unsigned address_in_block(const void* here, int block, int line = __builtin_LINE()) {
  return ::cuda_on_host::address_in_block(here, block, line);
}
inline void arrive_at(unsigned barrier, int line = __builtin_LINE()) { ::cuda_on_host::arrive_at(barrier, line); }
inline void store_async(unsigned to, const float (&from)[4], unsigned barrier, int line = __builtin_LINE()) {
  ::cuda_on_host::store_async(to, from, barrier, line);
}

inline void copy_bulk_to_blocks(void* to, const void* from, int bytes, unsigned long long* barrier, unsigned short blocks,
                                int line = __builtin_LINE()) {
  ::cuda_on_host::start_bulk_copy_to_blocks(to, from, static_cast<unsigned>(bytes), reinterpret_cast<uint64_t*>(barrier), blocks, line);
}

inline int anew(int value) { return value; }

// Some of a block's warps.
inline void sync_threads(int barrier, int threads, int line = __builtin_LINE()) {
  ::cuda_on_host::sync_threads(barrier, static_cast<unsigned>(threads), line);
}
inline void arrive_threads(int barrier, int threads, int line = __builtin_LINE()) {
  ::cuda_on_host::arrive_threads(barrier, static_cast<unsigned>(threads), line);
}
template <int REGISTERS>
inline void give_up_registers() {}
template <int REGISTERS>
inline void take_registers() {}

// Products of a warpgroup.
inline void fence_products(int line = __builtin_LINE()) { ::cuda_on_host::fence_products(line); }
inline void commit_products(int line = __builtin_LINE()) { ::cuda_on_host::commit_products(line); }
template <int LATEST>
inline void wait_for_products(int line = __builtin_LINE()) { ::cuda_on_host::wait_for_products(LATEST, line); }
template <int N>
inline void settle(float (&)[N][4]) {}
inline void settle(unsigned (&)[4]) {}
template <bool A_BY_DEPTH, int N>
inline void multiply_group_f16(float (&d)[N][4], unsigned long long a, unsigned long long b, bool accumulate, int line = __builtin_LINE()) {
  ::cuda_on_host::multiply_group({d[0], 8 * N, nullptr, a, b, accumulate, false, A_BY_DEPTH, true}, line);
}
template <bool A_BY_DEPTH, int N>
inline void multiply_group_bf16(float (&d)[N][4], unsigned long long a, unsigned long long b, bool accumulate, int line = __builtin_LINE()) {
  ::cuda_on_host::multiply_group({d[0], 8 * N, nullptr, a, b, accumulate, true, A_BY_DEPTH, true}, line);
}
template <int N>
inline void multiply_group_registers_f16(float (&d)[N][4], const unsigned (&a)[4], unsigned long long b, bool accumulate,
                                         int line = __builtin_LINE()) {
  ::cuda_on_host::multiply_group({d[0], 8 * N, a, 0, b, accumulate, false, false, true}, line);
}
template <int N>
inline void multiply_group_registers_bf16(float (&d)[N][4], const unsigned (&a)[4], unsigned long long b, bool accumulate,
                                          int line = __builtin_LINE()) {
  ::cuda_on_host::multiply_group({d[0], 8 * N, a, 0, b, accumulate, true, false, true}, line);
}

// The functions of templates/_ptx.cu.j2, which on the device are inline assembly: same names, same contracts, on a CPU.
#pragma once

#include "cuda_on_host/runtime.h"

inline float* dynamic_shared() { return ::cuda_on_host::here.shared; }

// Until wait_for_copies the destination holds NaN: what reads it too early is seen.
template <int N>
inline void copy_async(float* to, const float* from, int line = __builtin_LINE()) {
  static_assert(N == 1 || N == 2 || N == 4, "an asynchronous copy moves 4, 8 or 16 bytes");
  ::cuda_on_host::start_copy(to, from, N, line);
}
inline void wait_for_copies() { ::cuda_on_host::finish_copies(); }

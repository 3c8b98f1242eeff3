// The seam between compiled kernels and the runtime: what the functions of cuda_on_host.h call.
#pragma once

#include <stdint.h>

namespace cuda_on_host {

struct Index {
  unsigned x, y, z;
};

// Where the running thread stands. One per OS thread; the scheduler rewrites it whenever it resumes a fiber.
struct Here {
  Index thread, block, block_size, grid_size;
  float* shared;  // the block's dynamic shared memory
};

// Kernels read `here` in inner loops. The initial-exec model makes that one load, and glibc keeps room for it in libraries that
// are loaded late; `__thread` rather than `thread_local` spares the call that looks for a constructor.
#if defined(__GLIBC__)
#define CUDA_ON_HOST_THREAD_LOCAL __thread __attribute__((tls_model("initial-exec")))
#else
#define CUDA_ON_HOST_THREAD_LOCAL __thread
#endif
extern CUDA_ON_HOST_THREAD_LOCAL Here here;

// Calls in which threads wait for one another.
enum class Call : uint8_t { none, syncthreads, syncwarp, shfl, shfl_up, shfl_down, shfl_xor, ballot, any, all };

// As the source spells it.
const char* name_of(Call call);

// One thread's arrival at such a call.
struct Request {
  Call call = Call::none;
  int line = 0;           // of the kernel source
  unsigned mask = 0;      // lanes that take part; unused by syncthreads
  int operand = 0;        // of a shuffle: source lane, delta or lane mask
  int width = 32;         // of a shuffle: lanes in a segment
  uint64_t value = 0;     // what the lane brings: the bits to shuffle, or its vote
};

// Waits until every thread of the block has called it from the same line.
void barrier(int line);

// Waits until every lane of the mask has made the same call. Returns the bits this lane gets: the value of the source lane of a
// shuffle, otherwise the lanes that voted true.
uint64_t collective(const Request& request);

// Starts a copy of `count` floats to shared memory; finish_copies ends all those of the running thread.
void start_copy(float* to, const float* from, unsigned count, int line);
void finish_copies();

// Ends the launch with an error.
[[noreturn]] void trap(int line);

}  // namespace cuda_on_host

// The seam between compiled kernels and the runtime: what the functions of cuda_on_host.h call.
#pragma once

#include <stdint.h>

namespace cuda_on_host {

constexpr unsigned kWarp = 32;

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
enum class Call : uint8_t {
  none,
  syncthreads,
  sync_threads, wait_phase,  // of some warps, and of whoever arrives at a barrier in shared memory
  sync_cluster,
  multiply_group,  // of a warpgroup
  syncwarp, shfl, shfl_up, shfl_down, shfl_xor, ballot, any, all,  // of the lanes of a mask
  mma_f16, mma_bf16, mma_tf32, load_matrices, load_matrices_transposed,  // of whole warps
  fence_products, commit_products, wait_for_products, is_elected,
};

// As the source spells it.
const char* name_of(Call call);

// One thread's arrival at such a call.
struct Request {
  Call call = Call::none;
  int line = 0;           // of the kernel source
  unsigned mask = 0;      // lanes that take part; unused by calls of more than a warp
  int operand = 0;        // of a shuffle: source lane, delta or lane mask; of sync_threads: the barrier; of wait_phase: the phase
  int width = 32;         // of a shuffle: lanes in a segment
  uint64_t value = 0;     // what the lane brings: the bits to shuffle, its vote, or the address of one of the structs below
};

// Waits until every thread of the block has called it from the same line.
void barrier(int line);

// Waits until every lane of the mask has made the same call. Returns the bits this lane gets: the value of the source lane of a
// shuffle, otherwise the lanes that voted true.
uint64_t collective(const Request& request);

// A lane's registers in a product d += a @ b. They stay on its stack, where the lane that comes last finds them.
struct Fragments {
  float* d;            // 4
  const unsigned* a;   // 4
  const unsigned* b;   // 2
};
void multiply_matrices(Call call, const Fragments& registers, int line);

// The row a lane names for the load of four matrices, and the four registers it gets.
struct MatrixRow {
  unsigned* to;
  const void* row;
};
void load_matrices(Call call, const MatrixRow& row, int line);

// Of a store of so many bytes in one access: whether it may go there.
void check_store(const void* to, unsigned bytes, int line);

// Starts a copy of 4, 8 or 16 bytes to shared memory, of zeros where the source does not exist.
void start_copy(void* to, const void* from, unsigned bytes, bool exists, int line);
// The running thread's copies: CopyQueue in copies.h.
void commit_copies();
void end_copy_groups(unsigned latest);
void end_copies();

// Barriers in shared memory, and copies that end at them: phases.h.
void init_barrier(uint64_t* barrier, unsigned arrivals, int line);
void arrive(uint64_t* barrier, unsigned bytes, int line);
void wait_phase(uint64_t* barrier, unsigned phase, int line);
void start_bulk_copy(void* to, const void* from, unsigned bytes, uint64_t* barrier, int line);

// Whether this lane of a warp whose lanes have all come is the one that acts for all: any of them, one after the other.
bool is_elected(int line);

// Barriers of some of a block's warps. Waits for `threads` arrivals, its own among them; or only arrives.
void sync_threads(int barrier, unsigned threads, int line);
void arrive_threads(int barrier, unsigned threads, int line);

// Of a launch that overlaps with the one before it.
void wait_for_launch_before();

// Clusters: clusters.cpp. Addresses are those of the window of shared memory that all blocks of a cluster are in.
void sync_cluster(int line);
unsigned address_in_block(const void* here, int block, int line);
void arrive_at(unsigned barrier, int line);
void store_async(unsigned to, const float* from, unsigned barrier, int line);  // 4 values
// To the places in the blocks of a mask that are in their shared memory what `to` and `barrier` are in the own one.
void start_bulk_copy_to_blocks(void* to, const void* from, unsigned bytes, uint64_t* barrier, unsigned blocks, int line);

// A thread's part of a product of a warpgroup: groups.h.
struct GroupProduct {
  float* d;  // columns / 2
  unsigned columns;
  const unsigned* a_registers;  // 4, or null: a is in shared memory
  uint64_t a, b;     // descriptors
  bool accumulate;   // or begins at zero
  bool bf16;         // or float16
  bool a_by_depth, b_by_depth;  // whether neighbours in memory are neighbours along the rows of a, the columns of b; or along k
};
void multiply_group(const GroupProduct& product, int line);
void fence_products(int line);
void commit_products(int line);
void wait_for_products(unsigned latest, int line);

// Addresses in the window of shared memory, as descriptors have them. As on the device, a block's begin behind 1024 bytes that are
// not the block's; but they are aligned no better than here.
inline uintptr_t shared_base(uintptr_t shared) { return shared - shared % 1024 - 1024; }
inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(pointer) - shared_base(reinterpret_cast<uintptr_t>(here.shared)));
}

// Ends the launch with an error.
[[noreturn]] void trap(int line);

}  // namespace cuda_on_host

// Runs the blocks of a launch, one after the other, each as one fiber a thread.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <vector>

#include "cuda_on_host/copies.h"
#include "cuda_on_host/fiber.h"
#include "cuda_on_host/groups.h"
#include "cuda_on_host/memory.h"
#include "cuda_on_host/order.h"
#include "cuda_on_host/phases.h"
#include "cuda_on_host/runtime.h"

namespace cuda_on_host {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxClusterThreads = 2 * kMaxThreads;  // a GPU's are up to eight blocks; kernels here have two

// What to run. `entry` calls the kernel on one thread.
struct Work {
  const char* kernel;
  void (*entry)(const void*);
  const void* params;
  int64_t grid;
  unsigned block;
  Order order;
  const Memory* memory;
  bool overlaps;  // with the launch before it
  std::vector<std::shared_ptr<Buffer>> shared;  // of each block of a cluster
};

// The stacks and the scheduler of one OS thread at a time. Clusters do not run at once, so one machine serves a whole launch. Where a
// kernel declares none, each block is a cluster of its own.
class Machine {
 public:
  Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // Runs all clusters. Returns null, or the sentence that says which law the kernel broke.
  const char* run(const Work& work);

  // The stack signal handlers run on.
  void* signal_stack() { return signal_stack_.begin(); }
  static constexpr size_t kSignalStackBytes = 64 << 10;

  // The machine whose kernel is running on this OS thread, or null.
  static Machine* running();

  // Called by the running thread of the kernel, from its fiber.
  void barrier(int line);
  uint64_t collective(const Request& request);

  void load_matrices(Call call, const MatrixRow& row, int line);

  void start_copy(void* to, const void* from, unsigned bytes, bool exists, int line);
  CopyQueue& copies() { return self_->copies; }

  void init_barrier(uint64_t* barrier, unsigned arrivals, int line);
  void arrive(uint64_t* barrier, unsigned bytes, int line);
  void wait_phase(uint64_t* barrier, unsigned phase, int line);
  void start_bulk_copy(const BulkCopy& copy, int line);
  void sync_threads(int barrier, unsigned threads, bool waits, int line);

  void wait_for_launch_before();

  void sync_cluster(int line);
  unsigned address_in_block(const void* here, int block, int line);
  void arrive_at(unsigned barrier, int line);
  void store_async(unsigned to, const float* from, unsigned barrier, int line);
  void start_bulk_copy(const BulkCopy& copy, unsigned blocks, int line);

  void multiply_group(const GroupProduct& product, int line);

  // Ends the launch: leaves the running fiber for good. The message follows "kernel k, block b, thread t: ".
  [[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
  // The same from a signal handler, for a signal that the running fiber caused.
  [[noreturn]] void fault(int signal, const siginfo_t& info, const void* context);

  // "element 7 of dw", or the address as a number; valid until the next call.
  const char* place(uintptr_t address);

 private:
  // A stack and where it was left. A fiber runs threads from their start to their end, one after the other.
  struct Fiber {
    Context context;
  };

  // The device allows a thread 512 KiB of local memory; kernels that come near it would be useless. Touched pages alone cost.
  static constexpr size_t kStackBytes = 256 << 10;
  // Below each stack, and one page more, so that stacks do not lie a power of two apart. Compilers touch a large frame at least
  // every 64 KiB, the largest step among them (gcc on aarch64), so none steps over it.
  static constexpr size_t kStackFence = 64 << 10;

  // A block of the cluster that runs.
  struct Block {
    unsigned index;  // of the grid
    unsigned first;  // place of its first thread
    Buffer* shared;
    unsigned exited;
    unsigned last_exited;
    unsigned at_barrier;
    int barrier_line;
    unsigned first_at_barrier;
    NamedBarrier named_barriers[kNamedBarriers];
  };

  struct Thread {
    unsigned index;  // in its block
    unsigned place;  // in threads_; those of a warp and of a warpgroup are neighbours
    Block* block;
    Fiber* fiber;
    Request waits;    // call none: not waiting
    uint64_t result;  // of the collective call it waited in
    CopyQueue copies;
    bool waited;  // for the launch before
  };

  struct Warp {
    unsigned present;  // lanes the block has
    unsigned exited;   // of these, lanes that left the kernel
    unsigned waiting;  // lanes in a collective call
  };

  void run_cluster(uint64_t index);
  void fiber_loop(Fiber& fiber);
  static void enter_fiber();
  Fiber& idle_fiber();
  bool start_next(Fiber& fiber);
  void leave_kernel();
  void suspend();
  void resume_next(Fiber& fiber);
  void become(Thread& thread);
  void release(Thread& thread);
  void complete(Warp& warp, unsigned first, unsigned mask);
  void complete_matrices(unsigned first);
  void elect(unsigned first);
  void complete_group(unsigned first);
  void end_products(unsigned warp, unsigned latest);
  PhaseBarrier& barrier_at(const Block& block, uint64_t* barrier, int line);
  void arrive(const Block& block, uint64_t* barrier, unsigned bytes, int line);
  void end_phase(PhaseBarrier& barrier);
  void check_bulk_copy(const BulkCopy& copy, int line);
  void start_copy(const BulkCopy& copy, int line);
  Block& block_of(unsigned address, int line);
  template <class T>
  static T* at_address(const Block& block, unsigned address);
  Block& block_with(uintptr_t address);
  const Buffer& shared() const { return *self_->block->shared; }
  unsigned blocks() const { return static_cast<unsigned>(work_.shared.size()); }
  void land_copies();
  unsigned source_lane(const Request& request, unsigned lane, unsigned mask);
  [[noreturn]] void fail_deadlocked();
  const Buffer* buffer_at(uintptr_t address) const;

  const size_t stack_stride_;  // bytes from one stack to the next: a fence that cannot be touched, and the stack above it
  Pages stacks_;
  Pages signal_stack_;
  unsigned fences_ = 0;  // stacks whose fence is in place
  sigjmp_buf escape_;
  char message_[512] = "";
  char place_[128] = "";

  Work work_;
  Thread* self_ = nullptr;
  Context main_;
  unsigned fibers_used_ = 0;  // fibers prepared since the launch began
  Fiber* entering_ = nullptr;

  Walk unstarted_;
  Block blocks_[kMaxClusterThreads / kWarpgroup];
  unsigned exited_ = 0;  // of all blocks
  const Thread* last_exited_ = nullptr;
  unsigned at_cluster_barrier_ = 0;
  const Thread* first_at_cluster_barrier_ = nullptr;
  bool met_ = false;  // whether the blocks of the cluster have
  bool shown_ = true;  // whether what the call writes may be touched: some thread of the cluster has waited for the launch before
  std::vector<Thread*> ready_;  // a stack: the last one runs next
  std::vector<Fiber*> idle_;
  Warp warps_[kMaxClusterThreads / kWarp];
  std::vector<BulkCopy> bulk_copies_;
  WarpProducts products_[kMaxClusterThreads / kWarp];
  unsigned in_group_[kMaxClusterThreads / kWarpgroup];  // threads of each warpgroup that wait for the others of it
  Thread threads_[kMaxClusterThreads];
  Fiber fibers_[kMaxClusterThreads];
};

}  // namespace cuda_on_host

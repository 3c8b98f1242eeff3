#include "cuda_on_host/machine.h"

#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

namespace cuda_on_host {

CUDA_ON_HOST_THREAD_LOCAL Here here;

namespace {

CUDA_ON_HOST_THREAD_LOCAL Machine* current = nullptr;

// The tops of stacks are shifted against one another, or all of them would compete for the same few lines of the caches.
size_t stack_shift(unsigned fiber) { return (fiber % 61) * 64; }

}  // namespace

Machine::Machine()
    : stack_stride_(kStackFence + static_cast<size_t>(sysconf(_SC_PAGESIZE)) + kStackBytes),
      stacks_(stack_stride_ * kMaxClusterThreads, PROT_READ | PROT_WRITE),
      signal_stack_(kSignalStackBytes, PROT_READ | PROT_WRITE) {
  ready_.reserve(kMaxClusterThreads);
  idle_.reserve(kMaxClusterThreads);
}

Machine* Machine::running() { return current; }

const char* Machine::run(const Work& work) {
  work_ = work;
  fibers_used_ = 0;
  idle_.clear();
  for (Thread& thread : threads_) thread.copies.clear();  // of a launch that failed
  bulk_copies_.clear();
  for (WarpProducts& products : products_) products.clear();
  here = {{0, 0, 0}, {0, 0, 0}, {work_.block, 1, 1}, {static_cast<unsigned>(work_.grid), 1, 1}, nullptr};
  message_[0] = '\0';
  if (sigsetjmp(escape_, 0) == 0) {
    current = this;
    for (Walk walk = work_.order.walk(static_cast<uint64_t>(work_.grid) / blocks()); !walk.empty();) run_cluster(walk.next());
  }
  current = nullptr;
  if (!shown_) work_.memory->show_written(true);
  shown_ = true;
  work_.shared.clear();
  return message_[0] == '\0' ? nullptr : message_;
}

void Machine::run_cluster(uint64_t index) {
  exited_ = at_cluster_barrier_ = 0;
  met_ = false;
  ready_.clear();
  shown_ = !work_.overlaps;
  if (work_.overlaps) work_.memory->show_written(false);
  for (unsigned number = 0; number < blocks(); ++number) {
    Block& block = blocks_[number];
    block = {};
    block.index = static_cast<unsigned>(index) * blocks() + number;
    block.first = number * ((work_.block + kWarpgroup - 1) / kWarpgroup * kWarpgroup);
    block.shared = work_.shared[number].get();
    block.shared->poison();
    for (unsigned first = 0; first < work_.block; first += kWarp) {
      const unsigned lanes = work_.block - first;
      warps_[(block.first + first) / kWarp] = {lanes >= kWarp ? ~0u : (1u << lanes) - 1, 0, 0};
    }
  }
  for (unsigned& waiting : in_group_) waiting = 0;
  unstarted_ = work_.order.walk(blocks() * work_.block);
  jump(main_, idle_fiber().context);
  if (!bulk_copies_.empty()) fail("leaves the kernel, as all others have, before a bulk copy to %s has ended", place(reinterpret_cast<uintptr_t>(bulk_copies_.front().to)));
}

Machine::Fiber& Machine::idle_fiber() {
  if (!idle_.empty()) {
    Fiber& fiber = *idle_.back();
    idle_.pop_back();
    return fiber;
  }
  const unsigned number = fibers_used_++;
  char* const fence = stacks_.begin() + number * stack_stride_;
  char* const stack = fence + (stack_stride_ - kStackBytes);
  if (number >= fences_) {
    mprotect(fence, stack_stride_ - kStackBytes, PROT_NONE);
    fences_ = number + 1;
  }
  Fiber& fiber = fibers_[number];
  prepare(fiber.context, stack, kStackBytes - stack_shift(number), enter_fiber);
  entering_ = &fiber;
  return fiber;
}

void Machine::enter_fiber() { current->fiber_loop(*current->entering_); }

// Runs threads until the block is done; then rests, and begins again when a later block resumes it.
void Machine::fiber_loop(Fiber& fiber) {
  for (;;) {
    while (start_next(fiber) && ready_.empty()) {
    }
    if (ready_.empty() && exited_ != blocks() * work_.block) land_copies();
    idle_.push_back(&fiber);
    if (!ready_.empty()) {
      resume_next(fiber);
    } else if (exited_ == blocks() * work_.block) {
      jump(fiber.context, main_);
    } else {
      fail_deadlocked();
    }
  }
}

bool Machine::start_next(Fiber& fiber) {
  if (unstarted_.empty()) return false;
  const unsigned number = static_cast<unsigned>(unstarted_.next()), index = number % work_.block;
  Block& block = blocks_[number / work_.block];
  Thread& thread = threads_[block.first + index];
  thread.index = index;
  thread.place = block.first + index;
  thread.block = &block;
  thread.fiber = &fiber;
  thread.waits.call = Call::none;
  thread.waited = false;
  become(thread);
  work_.entry(work_.params);
  leave_kernel();
  return true;
}

void Machine::wait_for_launch_before() {
  if (!work_.overlaps) return;  // it has ended
  self_->waited = true;
  if (shown_) return;
  work_.memory->show_written(true);
  shown_ = true;
}

void Machine::leave_kernel() {
  Block& block = *self_->block;
  if (work_.overlaps && !self_->waited) fail("leaves the kernel without having waited for the launch before it");
  if (!self_->copies.empty()) fail("leaves the kernel before its asynchronous copies have ended");
  if (!products_[self_->place / kWarp].empty()) fail("leaves the kernel before products of its warpgroup were waited for");
  if (block.at_barrier != 0) {
    fail("leaves the kernel while thread %u waits at __syncthreads (line %d)", block.first_at_barrier, block.barrier_line);
  }
  if (at_cluster_barrier_ != 0) {
    const Thread& other = *first_at_cluster_barrier_;
    fail("leaves the kernel while block %u, thread %u waits at sync_cluster (line %d)", other.block->index, other.index, other.waits.line);
  }
  const unsigned place = self_->place, lane = place % kWarp;
  Warp& warp = warps_[place / kWarp];
  warp.exited |= 1u << lane;
  for (unsigned rest = warp.waiting; rest != 0; rest &= rest - 1) {
    const Thread& other = threads_[place - lane + static_cast<unsigned>(__builtin_ctz(rest))];
    if ((other.waits.mask >> lane & 1) != 0) {
      fail("leaves the kernel while thread %u waits for it at %s (line %d)", other.index, name_of(other.waits.call),
           other.waits.line);
    }
  }
  ++exited_;
  ++block.exited;
  block.last_exited = self_->index;
  last_exited_ = self_;
}

void Machine::barrier(int line) {
  Block& block = *self_->block;
  if (block.exited != 0) fail("waits at __syncthreads (line %d), but thread %u has left the kernel", line, block.last_exited);
  if (block.at_barrier == 0) {
    block.barrier_line = line;
    block.first_at_barrier = self_->index;
  } else if (line != block.barrier_line) {
    fail("waits at __syncthreads (line %d) while thread %u waits at the one of line %d", line, block.first_at_barrier, block.barrier_line);
  }
  self_->waits.call = Call::syncthreads;
  self_->waits.line = line;
  if (++block.at_barrier == work_.block) {
    block.at_barrier = 0;
    for (Walk walk = work_.order.walk(work_.block, true); !walk.empty();) release(threads_[block.first + walk.next()]);
  }
  suspend();
}

void Machine::release(Thread& thread) {
  thread.waits.call = Call::none;
  ready_.push_back(&thread);
}

// Lets another thread run. Returns when this one, which has said what it waits for, was released.
void Machine::suspend() {
  Fiber& fiber = *self_->fiber;
  if (!ready_.empty()) {
    resume_next(fiber);
  } else if (!unstarted_.empty()) {
    jump(fiber.context, idle_fiber().context);
  } else {
    land_copies();
    if (ready_.empty()) fail_deadlocked();
    resume_next(fiber);
  }
}

// Leaves `fiber`, where the caller runs, for the thread that was released last.
void Machine::resume_next(Fiber& fiber) {
  Thread& next = *ready_.back();
  ready_.pop_back();
  become(next);
  if (next.fiber != &fiber) jump(fiber.context, next.fiber->context);
}

void Machine::become(Thread& thread) {
  self_ = &thread;
  here.thread.x = thread.index;
  here.block.x = thread.block->index;
  here.shared = reinterpret_cast<float*>(thread.block->shared->data());
}

void Machine::fail(const char* format, ...) {
  const int used = snprintf(message_, sizeof message_, "kernel %.128s, block %u, thread %u: ", work_.kernel, here.block.x, here.thread.x);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message_ + used, sizeof message_ - static_cast<size_t>(used), format, arguments);
  va_end(arguments);
  siglongjmp(escape_, 1);
}

void check_store(const void* to, unsigned bytes, int line) {
  Machine& machine = *Machine::running();
  const uintptr_t address = reinterpret_cast<uintptr_t>(to);
  if (address % bytes == 0) return;
  machine.fail("line %d: stores %u bytes at %s, which is at no multiple of them", line, bytes, machine.place(address));
}

}  // namespace cuda_on_host

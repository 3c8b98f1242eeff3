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
      stacks_(stack_stride_ * kMaxThreads, PROT_READ | PROT_WRITE),
      signal_stack_(kSignalStackBytes, PROT_READ | PROT_WRITE) {
  ready_.reserve(kMaxThreads);
  idle_.reserve(kMaxThreads);
}

Machine* Machine::running() { return current; }

const char* Machine::run(const Work& work) {
  work_ = work;
  fibers_used_ = 0;
  idle_.clear();
  for (Thread& thread : threads_) thread.copies.clear();  // of a launch that failed
  bulk_copies_.clear();
  for (WarpProducts& products : products_) products.clear();
  here = {{0, 0, 0}, {0, 0, 0}, {work.block, 1, 1}, {static_cast<unsigned>(work.grid), 1, 1},
          reinterpret_cast<float*>(work.shared->data())};
  message_[0] = '\0';
  if (sigsetjmp(escape_, 0) == 0) {
    current = this;
    for (Walk blocks = work_.order.walk(static_cast<uint64_t>(work_.grid)); !blocks.empty();) run_block(blocks.next());
  }
  current = nullptr;
  return message_[0] == '\0' ? nullptr : message_;
}

void Machine::run_block(uint64_t index) {
  here.block.x = static_cast<unsigned>(index);
  work_.shared->poison();
  exited_ = 0;
  at_barrier_ = 0;
  ready_.clear();
  for (unsigned first = 0; first < work_.block; first += kWarp) {
    const unsigned lanes = work_.block - first;
    warps_[first / kWarp] = {lanes >= kWarp ? ~0u : (1u << lanes) - 1, 0, 0};
  }
  for (NamedBarrier& barrier : named_barriers_) barrier = {};
  for (unsigned& waiting : in_group_) waiting = 0;
  unstarted_ = work_.order.walk(work_.block);
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
    if (ready_.empty() && exited_ != work_.block) land_copies();
    idle_.push_back(&fiber);
    if (!ready_.empty()) {
      resume_next(fiber);
    } else if (exited_ == work_.block) {
      jump(fiber.context, main_);
    } else {
      fail_deadlocked();
    }
  }
}

bool Machine::start_next(Fiber& fiber) {
  if (unstarted_.empty()) return false;
  const unsigned index = static_cast<unsigned>(unstarted_.next());
  Thread& thread = threads_[index];
  thread.index = index;
  thread.fiber = &fiber;
  thread.waits.call = Call::none;
  become(thread);
  work_.entry(work_.params);
  leave_kernel();
  return true;
}

void Machine::leave_kernel() {
  if (!self_->copies.empty()) fail("leaves the kernel before its asynchronous copies have ended");
  if (!products_[self_->index / kWarp].empty()) fail("leaves the kernel before products of its warpgroup were waited for");
  if (at_barrier_ != 0) {
    fail("leaves the kernel while thread %u waits at __syncthreads (line %d)", first_at_barrier_, barrier_line_);
  }
  const unsigned index = self_->index, lane = index % kWarp;
  Warp& warp = warps_[index / kWarp];
  warp.exited |= 1u << lane;
  for (unsigned rest = warp.waiting; rest != 0; rest &= rest - 1) {
    const Thread& other = threads_[index - lane + static_cast<unsigned>(__builtin_ctz(rest))];
    if ((other.waits.mask >> lane & 1) != 0) {
      fail("leaves the kernel while thread %u waits for it at %s (line %d)", other.index, name_of(other.waits.call),
           other.waits.line);
    }
  }
  ++exited_;
  last_exited_ = index;
}

void Machine::barrier(int line) {
  if (exited_ != 0) fail("waits at __syncthreads (line %d), but thread %u has left the kernel", line, last_exited_);
  if (at_barrier_ == 0) {
    barrier_line_ = line;
    first_at_barrier_ = self_->index;
  } else if (line != barrier_line_) {
    fail("waits at __syncthreads (line %d) while thread %u waits at the one of line %d", line, first_at_barrier_, barrier_line_);
  }
  self_->waits.call = Call::syncthreads;
  self_->waits.line = line;
  if (++at_barrier_ == work_.block) {
    at_barrier_ = 0;
    for (Walk walk = work_.order.walk(work_.block, true); !walk.empty();) release(threads_[walk.next()]);
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

// Barriers in shared memory, bulk copies, and barriers of some warps. Copies are as late as can be: they land one by one, when no
// thread can go on without them, and until then their destination is NaN.
#include "cuda_on_host/phases.h"

#include <string.h>

#include "cuda_on_host/machine.h"

namespace cuda_on_host {

void init_barrier(uint64_t* barrier, unsigned arrivals, int line) { Machine::running()->init_barrier(barrier, arrivals, line); }
void arrive(uint64_t* barrier, unsigned bytes, int line) { Machine::running()->arrive(barrier, bytes, line); }
void wait_phase(uint64_t* barrier, unsigned phase, int line) { Machine::running()->wait_phase(barrier, phase, line); }
void start_bulk_copy(void* to, const void* from, unsigned bytes, uint64_t* barrier, int line) {
  Machine::running()->start_bulk_copy({to, from, bytes, barrier, {}}, line);
}
void sync_threads(int barrier, unsigned threads, int line) { Machine::running()->sync_threads(barrier, threads, true, line); }
void arrive_threads(int barrier, unsigned threads, int line) { Machine::running()->sync_threads(barrier, threads, false, line); }

void Machine::init_barrier(uint64_t* barrier, unsigned arrivals, int line) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(barrier);
  if (!shared().covers(address)) fail("line %d: makes a barrier of %s, not of shared memory", line, place(address));
  if (address % sizeof *barrier != 0) fail("line %d: makes a barrier at %s, which is at no multiple of 8 bytes", line, place(address));
  if (arrivals < 1 || arrivals > PhaseBarrier::kMaxArrivals) {
    fail("line %d: makes a barrier of %u arrivals; it must be 1 to %u", line, arrivals, PhaseBarrier::kMaxArrivals);
  }
  PhaseBarrier made;
  made.init(arrivals);
  memcpy(barrier, &made, sizeof made);
}

PhaseBarrier& Machine::barrier_at(const Block& block, uint64_t* barrier, int line) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(barrier);
  if (!block.shared->holds(address) || address % sizeof *barrier != 0) {
    fail("line %d: uses %s as a barrier, where none can be", line, place(address));
  }
  PhaseBarrier& found = *reinterpret_cast<PhaseBarrier*>(barrier);
  if (!found.is_valid()) fail("line %d: uses %s as a barrier, which is none, or none any more", line, place(address));
  return found;
}

void Machine::arrive(uint64_t* at, unsigned bytes, int line) { arrive(*self_->block, at, bytes, line); }

void Machine::arrive(const Block& block, uint64_t* at, unsigned bytes, int line) {
  PhaseBarrier& barrier = barrier_at(block, at, line);
  if (barrier.pending() == 0) {
    fail("line %d: arrives at the barrier at %s, to which all have come in this phase", line, place(reinterpret_cast<uintptr_t>(at)));
  }
  if (barrier.bytes() + static_cast<int64_t>(bytes) > PhaseBarrier::kMaxBytes) {
    fail("line %d: expects %u bytes at a barrier, beyond the %u of one phase", line, bytes, PhaseBarrier::kMaxBytes);
  }
  barrier.expect(static_cast<int>(bytes));
  barrier.arrive();
  end_phase(barrier);
}

Machine::Block& Machine::block_with(uintptr_t address) {
  Block* block = blocks_;
  while (!block->shared->covers(address)) ++block;
  return *block;
}

// Lets go on who waits for the phase, if it has ended: threads of the block that has the barrier.
void Machine::end_phase(PhaseBarrier& barrier) {
  if (!barrier.turn()) return;
  const Block& block = block_with(reinterpret_cast<uintptr_t>(&barrier));
  for (Walk walk = work_.order.walk(work_.block, true); !walk.empty();) {
    Thread& thread = threads_[block.first + walk.next()];
    if (thread.waits.call == Call::wait_phase && thread.waits.value == reinterpret_cast<uintptr_t>(&barrier)) release(thread);
  }
}

void Machine::wait_phase(uint64_t* at, unsigned phase, int line) {
  while (barrier_at(*self_->block, at, line).phase() == phase % 2) {
    self_->waits = {Call::wait_phase, line, 0, static_cast<int>(phase), 32, reinterpret_cast<uintptr_t>(at)};
    suspend();
  }
}

void Machine::start_bulk_copy(const BulkCopy& copy, int line) {
  check_bulk_copy(copy, line);
  start_copy(copy, line);
}

void Machine::check_bulk_copy(const BulkCopy& copy, int line) {
  constexpr unsigned kUnit = 16;
  const uintptr_t to = reinterpret_cast<uintptr_t>(copy.to), from = reinterpret_cast<uintptr_t>(copy.from);
  barrier_at(*self_->block, copy.barrier, line);
  if (copy.bytes == 0 || copy.bytes % kUnit != 0) {
    fail("line %d: copies %u bytes in bulk; it must be a multiple of %u", line, copy.bytes, kUnit);
  }
  if (!shared().covers(to)) fail("line %d: copies in bulk to %s, not to shared memory", line, place(to));
  if (shared().covers(from)) fail("line %d: copies in bulk from %s, not from global memory", line, place(from));
  for (const uintptr_t address : {to, from}) {
    if (address % kUnit != 0) fail("line %d: copies in bulk at %s, which is at no multiple of %u bytes", line, place(address), kUnit);
  }
  const Buffer* const source = buffer_at(from);
  if (source == nullptr || !source->holds(from + copy.bytes - 1)) {
    fail("line %d: copies %u bytes in bulk from %s, past the end", line, copy.bytes, place(from));
  }
  if (!shared().holds(to + copy.bytes - 1)) {
    fail("line %d: copies %u bytes in bulk to %s, past the end", line, copy.bytes, place(to));
  }
}

void Machine::start_copy(const BulkCopy& copy, int line) {
  const uintptr_t to = reinterpret_cast<uintptr_t>(copy.to);
  for (const BulkCopy& other : bulk_copies_) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(other.to);
    if (begin < to + copy.bytes && to < begin + other.bytes) {
      fail("line %d: copies in bulk to %s, where another copy has not ended", line, place(to));
    }
  }
  for (unsigned i = 0; i < copy.bytes; i += sizeof kPoison) memcpy(static_cast<char*>(copy.to) + i, &kPoison, sizeof kPoison);
  bulk_copies_.push_back(copy);
}

// Lets copies land until some thread can go on.
void Machine::land_copies() {
  while (ready_.empty() && !bulk_copies_.empty()) {
    const size_t number = work_.order.walk(bulk_copies_.size()).next();
    const BulkCopy copy = bulk_copies_[number];
    bulk_copies_.erase(bulk_copies_.begin() + static_cast<ptrdiff_t>(number));
    memcpy(copy.to, copy.from != nullptr ? copy.from : copy.values, copy.bytes);
    PhaseBarrier& barrier = barrier_at(block_with(reinterpret_cast<uintptr_t>(copy.barrier)), copy.barrier, 0);
    barrier.expect(-static_cast<int>(copy.bytes));
    end_phase(barrier);
  }
}

void Machine::sync_threads(int number, unsigned threads, bool waits, int line) {
  if (number < 1 || number >= kNamedBarriers) fail("line %d: uses barrier %d; it must be 1 to %d", line, number, kNamedBarriers - 1);
  if (threads == 0 || threads % kWarp != 0 || threads > work_.block) {
    fail("line %d: waits for %u threads of %u; it must be whole warps of the block", line, threads, work_.block);
  }
  NamedBarrier& barrier = self_->block->named_barriers[number];
  if (barrier.arrived != 0 && barrier.threads != threads) {
    fail("line %d: waits for %u threads at barrier %d, where others wait for %u", line, threads, number, barrier.threads);
  }
  barrier.threads = threads;
  const bool complete = ++barrier.arrived == threads;
  if (waits) self_->waits = {Call::sync_threads, line, 0, number, 32, 0};
  if (complete) {
    barrier = {};
    for (Walk walk = work_.order.walk(work_.block, true); !walk.empty();) {
      Thread& thread = threads_[self_->block->first + walk.next()];
      if (thread.waits.call == Call::sync_threads && thread.waits.operand == number) release(thread);
    }
  }
  if (waits) suspend();
}

}  // namespace cuda_on_host

// Calls in which the lanes of a warp meet, and what to say when they do not.
#include <stdio.h>
#include <string.h>

#include "cuda_on_host/machine.h"
#include "cuda_on_host/matrix.h"

namespace cuda_on_host {

const char* name_of(Call call) {
  switch (call) {
    case Call::syncthreads: return "__syncthreads";
    case Call::sync_threads: return "sync_threads";
    case Call::wait_phase: return "wait_phase";
    case Call::sync_cluster: return "sync_cluster";
    case Call::multiply_group: return "multiply_group";
    case Call::syncwarp: return "__syncwarp";
    case Call::shfl: return "__shfl_sync";
    case Call::shfl_up: return "__shfl_up_sync";
    case Call::shfl_down: return "__shfl_down_sync";
    case Call::shfl_xor: return "__shfl_xor_sync";
    case Call::ballot: return "__ballot_sync";
    case Call::any: return "__any_sync";
    case Call::all: return "__all_sync";
    case Call::mma_f16: return "mma_f16";
    case Call::mma_bf16: return "mma_bf16";
    case Call::mma_tf32: return "mma_tf32";
    case Call::load_matrices: return "load_matrices";
    case Call::load_matrices_transposed: return "load_matrices_transposed";
    case Call::fence_products: return "fence_products";
    case Call::commit_products: return "commit_products";
    case Call::wait_for_products: return "wait_for_products";
    case Call::is_elected: return "is_elected";
    case Call::none: break;
  }
  return "no call";
}

namespace {

bool is_shuffle(Call call) { return call >= Call::shfl && call <= Call::shfl_xor; }

bool is_of_whole_warps(Call call) { return call >= Call::mma_f16; }

bool is_of_a_warp(Call call) { return call >= Call::syncwarp; }

bool has_mask(Call call) { return is_of_a_warp(call) && !is_of_whole_warps(call); }

bool meet(const Request& a, const Request& b) { return a.call == b.call && a.line == b.line && a.mask == b.mask; }

// " with mask 0x0000ffff"; nothing for a call without a mask.
struct MaskWords {
  explicit MaskWords(const Request& request) {
    if (has_mask(request.call)) snprintf(text, sizeof text, " with mask 0x%08x", request.mask);
  }
  char text[32] = "";
};

// What each lane of a warp brought.
template <class Operands>
struct Brought {
  template <class Threads>
  explicit Brought(const Threads* threads) {
    for (unsigned lane = 0; lane < kWarp; ++lane) lanes[lane] = reinterpret_cast<const Operands*>(threads[lane].waits.value);
  }
  const Operands* lanes[kWarp];
};

}  // namespace

void multiply_matrices(Call call, const Fragments& registers, int line) {
  collective({call, line, ~0u, 0, 32, reinterpret_cast<uintptr_t>(&registers)});
}

bool is_elected(int line) { return collective({Call::is_elected, line, ~0u, 0, 32, 0}) != 0; }

void load_matrices(Call call, const MatrixRow& row, int line) { Machine::running()->load_matrices(call, row, line); }

void Machine::load_matrices(Call call, const MatrixRow& row, int line) {
  constexpr unsigned kBytes = 16;
  const uintptr_t address = reinterpret_cast<uintptr_t>(row.row);
  if (!shared().covers(address)) {
    fail("line %d: loads a row of a matrix from %s, not from shared memory", line, place(address));
  }
  if (address % kBytes != 0) {
    fail("line %d: loads a row of a matrix at %s, which is at no multiple of %u bytes", line, place(address), kBytes);
  }
  uint32_t words[kBytes / sizeof(uint32_t)];
  memcpy(words, row.row, kBytes);  // here, so that a row outside of the buffer is this lane's fault
  for (const uint32_t word : words) {
    if (word != kPoison) continue;
    for (unsigned index = 0; index < work_.block; ++index) {
      if (!threads_[self_->block->first + index].copies.writes(address, kBytes)) continue;
      fail("line %d: loads a row of a matrix at %s, to which an asynchronous copy of thread %u has not ended", line, place(address),
           index);
    }
    break;
  }
  collective({call, line, ~0u, 0, 32, reinterpret_cast<uintptr_t>(&row)});
}

uint64_t Machine::collective(const Request& request) {
  Thread& self = *self_;
  const unsigned lane = self.place % kWarp, first = self.place - lane, mask = request.mask;
  Warp& warp = warps_[self.place / kWarp];
  if ((mask >> lane & 1) == 0) {
    fail("calls %s (line %d) with mask 0x%08x, which leaves out its own lane %u", name_of(request.call), request.line, mask, lane);
  }
  if (const unsigned absent = mask & ~warp.present; absent != 0) {
    fail("calls %s (line %d)%s, but the block of %u threads has no lane %d in this warp", name_of(request.call), request.line,
         MaskWords(request).text, work_.block, __builtin_ctz(absent));
  }
  if (const unsigned exited = mask & warp.exited; exited != 0) {
    fail("calls %s (line %d)%s, but lane %d (thread %u) has left the kernel", name_of(request.call), request.line,
         MaskWords(request).text, __builtin_ctz(exited), self.index - lane + static_cast<unsigned>(__builtin_ctz(exited)));
  }
  if (is_shuffle(request.call) && (request.width < 1 || request.width > 32 || (request.width & (request.width - 1)) != 0)) {
    fail("calls %s (line %d) with width %d; it must be a power of two, at most 32", name_of(request.call), request.line,
         request.width);
  }
  self.waits = request;
  warp.waiting |= 1u << lane;
  if ((warp.waiting & mask) == mask) complete(warp, first, mask);
  suspend();
  return self.result;
}

// Releases the lanes of the mask if all of them, threads `first` and up, wait in the running thread's call.
void Machine::complete(Warp& warp, unsigned first, unsigned mask) {
  const Request& call = self_->waits;
  unsigned votes = 0;
  for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
    const Request& other = threads_[first + lane].waits;
    if (!meet(call, other)) return;
    votes |= static_cast<unsigned>(other.value != 0) << lane;
  }
  if (is_of_whole_warps(call.call)) {
    complete_matrices(first);
  } else {
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
      const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
      Thread& thread = threads_[first + lane];
      thread.result = is_shuffle(call.call) ? threads_[first + source_lane(thread.waits, lane, mask)].waits.value : votes;
    }
  }
  warp.waiting &= ~mask;
  for (Walk walk = work_.order.walk(kWarp, true); !walk.empty();) {
    const unsigned lane = static_cast<unsigned>(walk.next());
    if ((mask >> lane & 1) != 0) release(threads_[first + lane]);
  }
}

void Machine::complete_matrices(unsigned first) {
  const Thread* const threads = threads_ + first;
  const Request& call = threads->waits;
  switch (call.call) {
    case Call::fence_products: return products_[first / kWarp].fence();
    case Call::commit_products: return products_[first / kWarp].commit();
    case Call::wait_for_products: return end_products(first / kWarp, static_cast<unsigned>(call.operand));
    case Call::is_elected: return elect(first);
    case Call::mma_f16: return multiply_f16(Brought<Fragments>(threads).lanes);
    case Call::mma_bf16: return multiply_bf16(Brought<Fragments>(threads).lanes);
    case Call::mma_tf32: return multiply_tf32(Brought<Fragments>(threads).lanes);
    case Call::load_matrices: return distribute(Brought<MatrixRow>(threads).lanes);
    default: return distribute_transposed(Brought<MatrixRow>(threads).lanes);
  }
}

// Nobody should count on a lane: it is the one that has come last.
void Machine::elect(unsigned first) {
  for (unsigned lane = 0; lane < kWarp; ++lane) threads_[first + lane].result = first + lane == self_->place;
}

// The lane whose value `lane` gets: "shfl.sync" in the PTX ISA, lanes of a segment of `width`.
unsigned Machine::source_lane(const Request& request, unsigned lane, unsigned mask) {
  const int begin = static_cast<int>(lane) & -request.width, end = begin + request.width;
  int source = static_cast<int>(lane);
  switch (request.call) {
    case Call::shfl: source = begin + (request.operand & (request.width - 1)); break;
    case Call::shfl_up: source -= request.operand; break;
    case Call::shfl_down: source += request.operand; break;
    default: source ^= request.operand; break;
  }
  // An up or down shuffle past its segment, or an xor shuffle past its end, gives the lane its own value back.
  const bool outside = source >= end || (source < begin && request.call != Call::shfl_xor) || source < 0;
  if (outside) return lane;
  if ((mask >> source & 1) == 0) {
    become(threads_[self_->place - self_->place % kWarp + lane]);
    fail("reads from lane %d in %s (line %d), which its mask 0x%08x leaves out", source, name_of(request.call), request.line, mask);
  }
  return static_cast<unsigned>(source);
}

// No thread can go on. Names one that waits for another, and where that one waits instead.
void Machine::fail_deadlocked() {
  for (unsigned number = 0; number < blocks() * work_.block; ++number) {
    const unsigned place = blocks_[number / work_.block].first + number % work_.block;
    Thread& thread = threads_[place];
    const Request& call = thread.waits;
    if (call.call == Call::none || call.call == Call::syncthreads) continue;
    if (!is_of_a_warp(call.call)) {
      become(thread);
      fail("waits at %s (line %d) for threads that never come", name_of(call.call), call.line);
    }
    for (unsigned rest = call.mask; rest != 0; rest &= rest - 1) {
      const Thread& other = threads_[place - place % kWarp + static_cast<unsigned>(__builtin_ctz(rest))];
      if (meet(call, other.waits)) continue;
      become(thread);
      fail("waits at %s (line %d)%s for thread %u, which waits at %s (line %d)%s", name_of(call.call), call.line,
           MaskWords(call).text, other.index, name_of(other.waits.call), other.waits.line, MaskWords(other.waits).text);
    }
  }
  __builtin_unreachable();  // where all wait at one barrier, it has released them
}

}  // namespace cuda_on_host

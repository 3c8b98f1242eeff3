// Calls in which the lanes of a warp meet, and what to say when they do not.
#include <stdio.h>

#include "cuda_on_host/machine.h"

namespace cuda_on_host {

const char* name_of(Call call) {
  switch (call) {
    case Call::syncthreads: return "__syncthreads";
    case Call::syncwarp: return "__syncwarp";
    case Call::shfl: return "__shfl_sync";
    case Call::shfl_up: return "__shfl_up_sync";
    case Call::shfl_down: return "__shfl_down_sync";
    case Call::shfl_xor: return "__shfl_xor_sync";
    case Call::ballot: return "__ballot_sync";
    case Call::any: return "__any_sync";
    case Call::all: return "__all_sync";
    case Call::none: break;
  }
  return "no call";
}

namespace {

bool is_shuffle(Call call) { return call >= Call::shfl && call <= Call::shfl_xor; }

bool meet(const Request& a, const Request& b) { return a.call == b.call && a.line == b.line && a.mask == b.mask; }

}  // namespace

uint64_t Machine::collective(const Request& request) {
  Thread& self = *self_;
  const unsigned lane = self.index % kWarp, first = self.index - lane, mask = request.mask;
  Warp& warp = warps_[self.index / kWarp];
  if ((mask >> lane & 1) == 0) {
    fail("calls %s (line %d) with mask 0x%08x, which leaves out its own lane %u", name_of(request.call), request.line, mask, lane);
  }
  if (const unsigned absent = mask & ~warp.present; absent != 0) {
    fail("calls %s (line %d) with mask 0x%08x, but the block of %u threads has no lane %d in this warp", name_of(request.call),
         request.line, mask, work_.block, __builtin_ctz(absent));
  }
  if (const unsigned exited = mask & warp.exited; exited != 0) {
    fail("calls %s (line %d) with mask 0x%08x, but lane %d (thread %u) has left the kernel", name_of(request.call), request.line,
         mask, __builtin_ctz(exited), first + static_cast<unsigned>(__builtin_ctz(exited)));
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
  for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
    Thread& thread = threads_[first + lane];
    thread.result = is_shuffle(call.call) ? threads_[first + source_lane(thread.waits, lane, mask)].waits.value : votes;
  }
  warp.waiting &= ~mask;
  for (Walk walk = work_.order.walk(kWarp, true); !walk.empty();) {
    const unsigned lane = static_cast<unsigned>(walk.next());
    if ((mask >> lane & 1) != 0) release(threads_[first + lane]);
  }
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
    become(threads_[self_->index - self_->index % kWarp + lane]);
    fail("reads from lane %d in %s (line %d), which its mask 0x%08x leaves out", source, name_of(request.call), request.line, mask);
  }
  return static_cast<unsigned>(source);
}

// No thread can go on. Names one that waits for another, and where that one waits instead.
void Machine::fail_deadlocked() {
  for (unsigned index = 0; index < work_.block; ++index) {
    Thread& thread = threads_[index];
    const Request& call = thread.waits;
    if (call.call == Call::none || call.call == Call::syncthreads) continue;
    for (unsigned rest = call.mask; rest != 0; rest &= rest - 1) {
      const Thread& other = threads_[index - index % kWarp + static_cast<unsigned>(__builtin_ctz(rest))];
      if (meet(call, other.waits)) continue;
      become(thread);
      char mask[32] = "";
      if (other.waits.call != Call::syncthreads) snprintf(mask, sizeof mask, " with mask 0x%08x", other.waits.mask);
      fail("waits at %s (line %d) with mask 0x%08x for thread %u, which waits at %s (line %d)%s", name_of(call.call), call.line,
           call.mask, other.index, name_of(other.waits.call), other.waits.line, mask);
    }
  }
  __builtin_unreachable();  // where all wait at one barrier, it has released them
}

}  // namespace cuda_on_host
